"""The LoRA file in diffusers: its own loader and its own network give the delta that the host's loader gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import pytest
import tiny
import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders import StableDiffusionLoraLoaderMixin
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from safetensors.torch import load_file

from lowvram_lora.config import Targets
from lowvram_lora.events import Finished
from lowvram_lora.training.run import run

TARGETS: list[Targets] = ["attention + feed-forward", "all linear + conv"]
# tiny.sd15 in diffusers' words, where attention_head_dim is the number of heads: the host's SD15 has 8 always.
LAYOUT: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (64, 128),
    "layers_per_block": 1,
    "cross_attention_dim": tiny.CONTEXT,
    "attention_head_dim": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
}


def diffusers_network(model: Any) -> UNet2DConditionModel:
    """Return diffusers' own network with the weights of a host MODEL, renamed by diffusers."""
    network = UNet2DConditionModel(**LAYOUT)
    weights = {
        f"model.diffusion_model.{key}": value.clone() for key, value in model.model.diffusion_model.state_dict().items()
    }
    network.load_state_dict(convert_ldm_unet_checkpoint(weights, config=network.config))
    return network.eval()


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, 8, 8, generator=generator)
    return x, torch.tensor([3.0, 700.0]), torch.randn(2, 7, tiny.CONTEXT, generator=generator)


@torch.no_grad()
def predicted_by_diffusers(network: UNet2DConditionModel) -> torch.Tensor:
    x, t, context = inputs()
    out: torch.Tensor = network(x, t, encoder_hidden_states=context).sample
    return out


def predicted_by_host(pack: Any, model: Any) -> torch.Tensor:
    """Return what the host's network gives with all patches on MODEL applied by the host."""
    x, t, context = inputs()
    denoiser = pack.nodes._models.HostDenoiser(model)
    with denoiser.training(torch.float32), torch.inference_mode():
        out: torch.Tensor = denoiser.network(x, t, context=context, transformer_options={})
    return out.clone()


def trained_file(pack: Any, folder: Path, targets: Targets) -> Path:
    """Train as LoRA Train does and return the file it writes; alpha differs from rank."""
    job = jobs.job(folder, pack.nodes._models.HostDenoiser(tiny.sd15()), targets=targets)
    assert job.config.lora.alpha != job.config.lora.rank
    with torch.inference_mode(), torch.inference_mode(False), torch.no_grad():
        *_, last = run(job)
    assert isinstance(last, Finished)
    return last.path


def test_the_networks_agree_without_a_lora(pack: Any) -> None:
    model = tiny.sd15()
    torch.testing.assert_close(
        predicted_by_diffusers(diffusers_network(model)), predicted_by_host(pack, model), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("targets", TARGETS)
def test_diffusers_loads_the_file_and_gives_the_hosts_delta(pack: Any, tmp_path: Path, targets: Targets) -> None:
    file = trained_file(pack, tmp_path, targets)
    model = tiny.sd15()
    base = predicted_by_host(pack, model)
    with torch.inference_mode():
        patched = pack.nodes._models.with_lora(model, load_file(file))
    expected = predicted_by_host(pack, patched) - base

    # Of another MODEL with the same weights: the host has patched the first one's in place.
    network = diffusers_network(tiny.sd15())
    before = predicted_by_diffusers(network)
    state, alphas, metadata = StableDiffusionLoraLoaderMixin.lora_state_dict(
        str(file.parent), weight_name=file.name, local_files_only=True, return_lora_metadata=True
    )
    StableDiffusionLoraLoaderMixin.load_lora_into_unet(state, alphas, network, metadata=metadata)
    delta = predicted_by_diffusers(network) - before
    adapted = {name.replace(".", "_") for name, layer in network.named_modules() if hasattr(layer, "lora_A")}
    assert adapted == {key.split(".")[0].removeprefix("lora_unet_") for key in load_file(file)}

    assert expected.norm() > 1e-2 * base.norm()
    assert (delta - expected).norm() < 1e-3 * expected.norm()
