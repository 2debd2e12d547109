"""Tiny models of the host's own classes, with seeded weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CONTEXT = 64
VECTOR = 32
CPU = torch.device("cpu")


def sd15(dtype: torch.dtype = torch.float32, seed: int = 0, inference: bool = True) -> Any:
    """Return a ModelPatcher of an SD1.5 network of about 4 M parameters.

    Args:
        inference: build in inference mode, as the host's loaders do.
    """
    return _model("SD15", _unet_config(), dtype, seed, inference)


def sd3(dtype: torch.dtype = torch.float32, seed: int = 0, inference: bool = True) -> Any:
    """Return a ModelPatcher of an SD3 network of two blocks."""
    return _model("SD3", _mmdit_config(), dtype, seed, inference)


def flux(dtype: torch.dtype = torch.float32, seed: int = 0, inference: bool = True) -> Any:
    """Return a ModelPatcher of a Flux.1 network of two double and two single blocks."""
    return _model("Flux", _flux_config(), dtype, seed, inference)


def flux2(dtype: torch.dtype = torch.float32, seed: int = 0, inference: bool = True) -> Any:
    """Return a ModelPatcher of a Flux.2 network of two double and two single blocks."""
    return _model("Flux2", _flux2_config(), dtype, seed, inference)


def wan(dtype: torch.dtype = torch.float32, seed: int = 0, inference: bool = True) -> Any:
    """Return a ModelPatcher of a Wan 2.1 text-to-video network of two blocks."""
    return _model("WAN21_T2V", _wan_config(), dtype, seed, inference)


def qwen(dtype: torch.dtype = torch.float32, seed: int = 0, inference: bool = True) -> Any:
    """Return a ModelPatcher of a Qwen-Image network of two blocks."""
    return _model("QwenImage", _qwen_config(), dtype, seed, inference)


FAMILIES: dict[str, Callable[..., Any]] = {
    "sd15": sd15,
    "sd3": sd3,
    "flux": flux,
    "flux2": flux2,
    "wan": wan,
    "qwen": qwen,
}
# Of the latents, without batch: channels first, then frames for the video families.
LATENTS = {
    "sd15": (4, 8, 8),
    "sd3": (16, 8, 8),
    "flux": (16, 8, 8),
    "flux2": (128, 4, 4),
    "wan": (16, 1, 8, 8),
    "qwen": (16, 1, 8, 8),
}


def _model(family: str, unet_config: dict[str, Any], dtype: torch.dtype, seed: int, inference: bool) -> Any:
    import comfy.model_patcher
    import comfy.supported_models

    config = getattr(comfy.supported_models, family)(unet_config)
    config.set_inference_dtype(dtype, None)
    with torch.inference_mode(inference):
        model = config.get_model({}, "", CPU)
        fill(model.diffusion_model, seed)
    return comfy.model_patcher.ModelPatcher(model, CPU, CPU)


def fill(network: torch.nn.Module, seed: int) -> None:
    """Draw every parameter at a scale that keeps activations near 1, and every buffer (SD3's positions)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(drawn / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(drawn * 0.1 + (0.0 if name.endswith("bias") else 1.0))
        for buffer in network.buffers():
            buffer.copy_(torch.randn(buffer.shape, generator=generator))


def _unet_config() -> dict[str, Any]:
    return {
        "image_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        # 32 channels would put one in each of GroupNorm's 32 groups, and the timestep would have no effect.
        "model_channels": 64,
        "num_res_blocks": [1, 1],
        "channel_mult": [1, 2],
        "num_heads": 4,
        "use_spatial_transformer": True,
        "transformer_depth": [1, 1],
        "transformer_depth_output": [1, 1, 1, 1],
        "transformer_depth_middle": 1,
        "context_dim": CONTEXT,
        "use_linear_in_transformer": False,
        "legacy": False,
        "adm_in_channels": None,
        "use_temporal_attention": False,
    }


def _mmdit_config() -> dict[str, Any]:
    # The width is 64 times the depth.
    return {
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "depth": 2,
        "input_size": None,
        "adm_in_channels": VECTOR,
        "context_embedder_config": {
            "target": "torch.nn.Linear",
            "params": {"in_features": CONTEXT, "out_features": 128},
        },
        "num_patches": 64,
        "pos_embed_max_size": 8,
        "pos_embed_scaling_factor": None,
        "qk_norm": "rms",
        "x_block_self_attn_layers": [0],
    }


def _flux_config() -> dict[str, Any]:
    return {
        "image_model": "flux",
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "vec_in_dim": VECTOR,
        "context_in_dim": CONTEXT,
        "hidden_size": 128,
        "mlp_ratio": 4.0,
        "num_heads": 1,
        "depth": 2,
        "depth_single_blocks": 2,
        "axes_dim": [16, 56, 56],
        "theta": 10000,
        "qkv_bias": True,
        "guidance_embed": True,
        **_text_positions([]),
    }


def _flux2_config() -> dict[str, Any]:
    return {
        "image_model": "flux2",
        "in_channels": 128,
        "out_channels": 128,
        "patch_size": 1,
        "vec_in_dim": None,
        "context_in_dim": CONTEXT,
        "hidden_size": 128,
        "mlp_ratio": 3.0,
        "num_heads": 1,
        "depth": 2,
        "depth_single_blocks": 2,
        "axes_dim": [32, 32, 32, 32],
        "theta": 2000,
        "qkv_bias": False,
        "guidance_embed": True,
        "global_modulation": True,
        "mlp_silu_act": True,
        "ops_bias": False,
        "default_ref_method": "index",
        "ref_index_scale": 10.0,
        **_text_positions([3]),
    }


def _text_positions(axes: list[int]) -> dict[str, Any]:
    """Newer hosts ask for this; older ones don't know it."""
    from comfy.ldm.flux.model import FluxParams

    return {"txt_ids_dims": axes} if "txt_ids_dims" in FluxParams.__dataclass_fields__ else {}


def _wan_config() -> dict[str, Any]:
    return {
        "image_model": "wan2.1",
        "model_type": "t2v",
        "dim": 128,
        "ffn_dim": 256,
        "freq_dim": 64,
        "text_dim": CONTEXT,
        "in_dim": 16,
        "out_dim": 16,
        "num_heads": 2,
        "num_layers": 2,
        "patch_size": (1, 2, 2),
        "window_size": (-1, -1),
        "qk_norm": True,
        "cross_attn_norm": True,
        "eps": 1e-6,
    }


def _qwen_config() -> dict[str, Any]:
    return {
        "image_model": "qwen_image",
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 2,
        "attention_head_dim": 128,
        "num_attention_heads": 1,
        "joint_attention_dim": CONTEXT,
        "axes_dims_rope": (16, 56, 56),
    }
