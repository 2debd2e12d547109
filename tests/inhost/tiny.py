"""Tiny models of the host's own classes, with seeded weights."""

from __future__ import annotations

from typing import Any

import torch

CONTEXT = 64
CPU = torch.device("cpu")


def sd15(dtype: torch.dtype = torch.float32, seed: int = 0, inference: bool = True) -> Any:
    """Return a ModelPatcher of an SD1.5 network of about 4 M parameters.

    Args:
        inference: build in inference mode, as the host's loaders do.
    """
    import comfy.model_patcher
    import comfy.supported_models

    config = comfy.supported_models.SD15(_unet_config())
    config.set_inference_dtype(dtype, None)
    with torch.inference_mode(inference):
        model = config.get_model({}, "", CPU)
        fill(model.diffusion_model, seed)
    return comfy.model_patcher.ModelPatcher(model, CPU, CPU)


def fill(network: torch.nn.Module, seed: int) -> None:
    """Draw every parameter at a scale that keeps activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(drawn / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(drawn * 0.1 + (0.0 if name.endswith("bias") else 1.0))


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
