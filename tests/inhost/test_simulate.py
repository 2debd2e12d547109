"""A simulated step on the host's networks: what it counts without data is what there is with data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
import tiny
import torch

from lowvram_lora.adapters.targets import select
from lowvram_lora.memory import convolution
from lowvram_lora.memory.setting import Setting
from lowvram_lora.training import optim, prepare
from lowvram_lora.training.estimate import META, Simulated, Simulator, payload_bytes

FAMILIES = ("sd15", "sd3", "flux")
SETTINGS = {
    "plain": Setting(),
    "convolutions twice": Setting(keep_convolutions=False),
    "all in RAM": Setting(inputs_in_ram=True, optimizer_in_ram=True),
    "bf16 state": Setting(optimizer_dtype=torch.bfloat16),
}


def simulator(pack: Any, folder: Path, family: str, device: torch.device) -> Simulator:
    denoiser = pack.nodes._models.HostDenoiser(tiny.FAMILIES[family]())
    job = jobs.family_job(folder, denoiser, family)
    return Simulator(
        denoiser=denoiser,
        layers=select(denoiser.network, "attention + feed-forward"),
        config=job.config,
        dtype=torch.float32,
        samples=prepare.samples_of(job),
        batch=prepare.largest_batch(job.recipe),
        cancel=job.cancel,
        device=device,
    )


def with_ring(one: Simulator, setting: Setting) -> Setting:
    largest = max(payload_bytes(one.denoiser.weights.payload(module)) for module in one.layers.values())
    return replace(setting, ring_bytes=16 * largest)


def counted(run: Simulated) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Return began, ended and peak by block and phase, over what there was when the step began; no end outside blocks.

    With data, what the batch was made from on the CPU is device memory as well, and stays all the time.
    """
    base = run.counter.counts["", "forward"].began
    counts = {place: count for place, count in run.counter.counts.items() if place[1] != "setup"}
    return {place: (c.began - base, c.ended - base if place[0] else 0, c.peak - base) for place, c in counts.items()}


@pytest.fixture(autouse=True)
def same_way_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pictures convolve in another way on a CPU than elsewhere, and its optimizer is a fused one."""
    monkeypatch.setattr(convolution, "SMALL_PICTURE", 0)
    monkeypatch.setattr(optim, "_FUSED_DEVICES", ())


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_without_data_equal_bytes_with_data_block_by_block(
    pack: Any, tmp_path: Path, family: str, name: str
) -> None:
    without = simulator(pack, tmp_path, family, META)
    with_data = simulator(pack, tmp_path, family, torch.device("cpu"))
    setting = with_ring(without, SETTINGS[name])
    expected, found = with_data.step(setting), without.step(setting)
    assert counted(found) == counted(expected)
    assert (found.counter.peak_phase, found.counter.peak_block) == (
        expected.counter.peak_phase,
        expected.counter.peak_block,
    )
