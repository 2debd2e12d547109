"""Full-size networks of the host, without memory, and inputs of the right shapes. Benchmarks run steps of them."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]

_UNET: dict[str, Any] = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "use_spatial_transformer": True,
    "legacy": False,
    "use_temporal_attention": False,
}


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        config_class: its name in the host's list of supported models.
        unet_config: the sizes of its network.
        channels: of its latents, at an eighth of the picture's size.
        context: rows and width of an encoded caption.
        vector: width of the pooled caption; 0 for none.
    """

    config_class: str
    unet_config: dict[str, Any]
    channels: int
    context: tuple[int, int]
    vector: int


FAMILIES = {
    "sd15": Family(
        "SD15",
        {
            **_UNET,
            "adm_in_channels": None,
            "num_res_blocks": [2, 2, 2, 2],
            "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
            "channel_mult": [1, 2, 4, 4],
            "transformer_depth_middle": 1,
            "use_linear_in_transformer": False,
            "context_dim": 768,
            "num_heads": 8,
            "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        },
        4,
        (77, 768),
        0,
    ),
    "sdxl": Family(
        "SDXL",
        {
            **_UNET,
            "num_classes": "sequential",
            "adm_in_channels": 2816,
            "num_res_blocks": [2, 2, 2],
            "transformer_depth": [0, 0, 2, 2, 10, 10],
            "channel_mult": [1, 2, 4],
            "transformer_depth_middle": 10,
            "use_linear_in_transformer": True,
            "context_dim": 2048,
            "num_head_channels": 64,
            "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
        },
        4,
        (77, 2048),
        1280,
    ),
    "sd3": Family(
        "SD3",
        {
            "in_channels": 16,
            "out_channels": 16,
            "patch_size": 2,
            "depth": 24,
            "input_size": None,
            "adm_in_channels": 2048,
            "context_embedder_config": {
                "target": "torch.nn.Linear",
                "params": {"in_features": 4096, "out_features": 1536},
            },
            "num_patches": 36864,
            "pos_embed_max_size": 192,
            "pos_embed_scaling_factor": None,
            "x_block_self_attn_layers": [],
        },
        16,
        (154, 4096),
        2048,
    ),
    "flux": Family(
        "Flux",
        {
            "image_model": "flux",
            "in_channels": 16,
            "out_channels": 16,
            "patch_size": 2,
            "vec_in_dim": 768,
            "context_in_dim": 4096,
            "hidden_size": 3072,
            "mlp_ratio": 4.0,
            "num_heads": 24,
            "depth": 19,
            "depth_single_blocks": 38,
            "axes_dim": [16, 56, 56],
            "theta": 10000,
            "qkv_bias": True,
            "guidance_embed": True,
        },
        16,
        (256, 4096),
        768,
    ),
}


def enter_host() -> Any:
    """Put the host on the path, on the CPU, and return the pack as the host loads it."""
    from tests.harness.places import host_folder
    from tests.inhost.pack import load_pack

    sys.path.insert(0, str(host_folder()))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    pack = load_pack(ROOT)
    # Shipped, but for tests and benchmarks only: no node imports it.
    importlib.import_module(f"{pack.__name__}.lowvram_lora.fakes")
    return pack


def model(family: str, device: str = "meta") -> Any:
    """Return the host's MODEL of ``family`` in bfloat16; on ``meta`` it takes no memory."""
    import comfy.model_patcher
    import comfy.supported_models

    kind = FAMILIES[family]
    config = getattr(comfy.supported_models, kind.config_class)(dict(kind.unet_config, **_newer_fields(kind)))
    config.set_inference_dtype(torch.bfloat16, None)
    with torch.inference_mode():
        made = config.get_model({}, "", torch.device(device))
    return comfy.model_patcher.ModelPatcher(made, torch.device("cpu"), torch.device("cpu"))


def _newer_fields(kind: Family) -> dict[str, Any]:
    if kind.config_class != "Flux":
        return {}
    from comfy.ldm.flux.model import FluxParams

    # Newer hosts ask for this one; older ones don't know it.
    return {"txt_ids_dims": []} if "txt_ids_dims" in FluxParams.__dataclass_fields__ else {}


def cache(pack: Any, family: str, resolution: int, num: int, folder: Path, text_rows: int = 0) -> Any:
    """Write a sample of ``family`` at ``resolution`` pixels a side; return a cache that holds it ``num`` times.

    Args:
        text_rows: of its caption; 0 for as many as the family's captions have at least.
    """
    kind, core = FAMILIES[family], pack.lowvram_lora
    rows = text_rows or kind.context[0]
    store, parts = core.data.store, core.data.cache
    latents = torch.zeros(kind.channels, resolution // 8, resolution // 8)
    extra = {"pooled_output": torch.zeros(1, kind.vector)} if kind.vector else {}
    encoding = core.data.encodings.pack([[torch.zeros(1, rows, kind.context[1]), extra]])
    store.write(store.path_of(folder, "latents", "aa"), {parts.LATENTS: latents}, {})
    store.write(store.path_of(folder, "text", "bb"), encoding.tensors, {parts.STRUCTURE: encoding.structure})
    entry = parts.CacheEntry.single("zeros", "aa", "bb", tuple(latents.shape), 1)
    return parts.CacheIndex(folder, (entry,) * num, 1 << 30, "bb")
