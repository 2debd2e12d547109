"""Random checkpoints in Stable Diffusion 1.5's file layout, which ComfyUI loads as MODEL, CLIP and VAE.

Names and shapes come from ComfyUI's own modules, built without memory on the ``meta`` device. That needs
ComfyUI on the path, so the file is made in a process of its own:
``python -m tests.harness.checkpoint FILE SEED SIZE``.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from tests.harness.places import CACHE, ROOT, host_folder

Size = Literal["small", "full"]

# Part of the cached file's name: raise it when the contents change.
VERSION = 3

SD15_UNET: dict[str, Any] = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "context_dim": 768,
    "num_heads": 8,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": False,
    "legacy": False,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "small": {
        "channel_mult": (1, 1),
        "num_res_blocks": [1, 1],
        "transformer_depth": [1, 1],
        "transformer_depth_output": [1, 1, 1, 1],
        "transformer_depth_middle": 1,
    },
    "full": {
        "channel_mult": (1, 2, 4, 4),
        "num_res_blocks": [2, 2, 2, 2],
        "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
        "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        "transformer_depth_middle": 1,
    },
}

# Latents of real pictures have about this scale before Stable Diffusion multiplies them to unit variance.
SD15_LATENT_SCALE = 0.18215


def make_sd15(path: Path, seed: int = 0, size: Size = "small") -> Path:
    """Write a random checkpoint to ``path`` unless it is there, and return ``path``."""
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.harness.checkpoint", str(path), str(seed), size]
    subprocess.run(command, cwd=ROOT, check=True)
    return path


def cached_sd15(seed: int = 0, size: Size = "small") -> Path:
    """Return the random checkpoint of this seed and size, made once."""
    return make_sd15(CACHE / "checkpoints" / f"sd15-{size}-seed{seed}-v{VERSION}.safetensors", seed, size)


def _host_modules(size: str) -> dict[str, Any]:
    """Return ComfyUI's modules by the prefix they have in a checkpoint, on the meta device."""
    sys.path.insert(0, str(host_folder()))
    from comfy.cli_args import args

    args.cpu = True
    import comfy.clip_model
    import comfy.ldm.modules.diffusionmodules.openaimodel as unet
    import comfy.ops
    import comfy.taesd.taesd
    import torch

    host = host_folder()
    clip_config = json.loads((host / "comfy" / "sd1_clip_config.json").read_text(encoding="utf-8"))
    operations = comfy.ops.disable_weight_init
    with torch.device("meta"):
        return {
            "model.diffusion_model.": unet.UNetModel(**SD15_UNET, **LAYOUTS[size], device="meta"),
            "cond_stage_model.transformer.text_model.": comfy.clip_model.CLIPTextModel(
                clip_config, torch.float32, "meta", operations
            ).text_model,
            "first_stage_model.": comfy.taesd.taesd.TAESD(latent_channels=4),
        }


def _norm_names(module: Any) -> set[str]:
    return {name for name, child in module.named_modules() if "Norm" in type(child).__name__}


def _fill(name: str, shape: tuple[int, ...], is_norm: bool, generator: Any) -> Any:
    """Return values at a scale that keeps activations near one."""
    import torch

    if name.endswith("vae_scale"):
        return torch.tensor(SD15_LATENT_SCALE)
    if is_norm:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    if len(shape) < 2:
        return torch.randn(shape, generator=generator) * 0.02 * (len(shape) > 0)
    fan_in = shape[1] if "embedding" in name else math.prod(shape[1:])
    return torch.randn(shape, generator=generator) / math.sqrt(fan_in)


def _tensors(size: str, seed: int) -> Iterator[tuple[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    for prefix, module in _host_modules(size).items():
        norms = _norm_names(module)
        for name, value in module.state_dict().items():
            is_norm = name.rpartition(".")[0] in norms
            yield prefix + name, _fill(name, tuple(value.shape), is_norm, generator).half()


def _pass_noise(tensors: dict[str, Any]) -> None:
    """Make the network predict its own input plus something small, so that sampling stays in range.

    The first group of ten channels carries the latents and their negatives from the first convolution over
    the last skip connection to the last one, where ``silu(a) - silu(-a) == a``.
    """
    unet = "model.diffusion_model."
    count = len({key.split(".")[3] for key in tensors if key.startswith(f"{unet}output_blocks.")})
    last = f"{unet}output_blocks.{count - 1}."
    first, skip = f"{unet}input_blocks.0.0", f"{last}0.skip_connection"
    for layer in (first, skip, f"{last}0.out_layers.3", f"{last}1.proj_out"):
        tensors[f"{layer}.weight"][:10] = 0
        tensors[f"{layer}.bias"][:10] = 0
    width = tensors[f"{first}.weight"].shape[0]
    out = tensors[f"{unet}out.2.weight"].mul_(0.1)
    out[:, :10] = 0
    for channel in range(4):
        for carrier, sign in ((channel, 1.0), (channel + 4, -1.0)):
            tensors[f"{first}.weight"][carrier, channel, 1, 1] = sign
            tensors[f"{skip}.weight"][carrier, width + carrier] = 1
            # Two of the group's ten channels are empty, which the group norm counts.
            out[channel, carrier, 1, 1] = sign * math.sqrt(0.8)


def _calibrate_vae(tensors: dict[str, Any]) -> None:
    """Scale the last convolutions: latents of unit variance, decoded pictures that are not all black."""
    import comfy.taesd.taesd
    import torch

    prefix = "first_stage_model."
    vae = comfy.taesd.taesd.TAESD(latent_channels=4)
    vae.load_state_dict({k[len(prefix) :]: v.float() for k, v in tensors.items() if k.startswith(prefix)})
    generator = torch.Generator().manual_seed(0)
    pixels = torch.nn.functional.interpolate(torch.rand(4, 3, 16, 16, generator=generator), scale_factor=8)
    with torch.no_grad():
        latents = vae.taesd_encoder(pixels)
        decoded = vae.taesd_decoder(torch.randn(4, 4, 16, 16, generator=generator))
    for part, produced, std, mean in (("encoder", latents, 1.0, 0.0), ("decoder", decoded, 0.25, 0.5)):
        last = max(int(k.split(".")[2]) for k in tensors if k.startswith(f"{prefix}taesd_{part}."))
        weight, bias = (f"{prefix}taesd_{part}.{last}.{name}" for name in ("weight", "bias"))
        scale = std / produced.std(dim=(0, 2, 3))
        shift = mean - produced.mean(dim=(0, 2, 3)) * scale
        tensors[weight] = (tensors[weight].float() * scale[:, None, None, None]).half()
        tensors[bias] = (tensors[bias].float() * scale + shift).half()


def _write(path: Path, seed: int, size: str) -> None:
    import safetensors.torch

    tensors = dict(_tensors(size, seed))
    _pass_noise(tensors)
    _calibrate_vae(tensors)
    partial = path.with_suffix(f".partial-{os.getpid()}")
    safetensors.torch.save_file(tensors, partial)
    os.replace(partial, path)


if __name__ == "__main__":
    _write(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
