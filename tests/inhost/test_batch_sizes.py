"""The memory model that sizes batches: what was not simulated is never reckoned with too little."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
import tiny
import torch

from lowvram_lora.adapters.targets import select
from lowvram_lora.config import SamplerConfig
from lowvram_lora.data import store
from lowvram_lora.data.batches import BatchRecipe
from lowvram_lora.data.cache import LATENTS
from lowvram_lora.data.index import CacheEntry, CacheIndex
from lowvram_lora.memory.between import Corners
from lowvram_lora.memory.facts import Facts
from lowvram_lora.memory.fitting import positions
from lowvram_lora.memory.footprint import footprint
from lowvram_lora.memory.setting import Setting
from lowvram_lora.training import prepare
from lowvram_lora.training.estimate import Simulator, measured
from lowvram_lora.training.job import Job

# Of the latents' sides, the corners first.
SIDES = ((8, 8), (16, 16), (8, 16), (12, 8))
# More than the truth by at most so much.
TOO_MUCH = 1.06


@pytest.fixture(autouse=True)
def host_mode() -> Iterator[None]:
    """The mode LoRA Train runs its loop in."""
    with torch.inference_mode(), torch.inference_mode(False), torch.no_grad():
        yield


def cache_of(folder: Path, family: str, sides: tuple[tuple[int, int], ...], num: int) -> CacheIndex:
    """Return ``num`` samples of each size, of random numbers."""
    like = jobs.family_cache(folder, family, num=1)
    generator = torch.Generator().manual_seed(3)
    entries = []
    for number, (height, width) in enumerate(sides * num):
        shape = (*tiny.LATENTS[family][:-2], height, width)
        key = f"cc{number:02x}"
        store.write(store.path_of(folder, "latents", key), {LATENTS: torch.randn(shape, generator=generator)}, {})
        entries.append(CacheEntry.single(f"{number}.png", key, like.entries[0].text_key, shape, 1))
    return replace(like, entries=tuple(entries))


def job_of(pack: Any, folder: Path, family: str, sides: tuple[tuple[int, int], ...] = SIDES, num: int = 8) -> Job:
    denoiser = pack.nodes._models.HostDenoiser(tiny.FAMILIES[family]())
    config = SamplerConfig(batch_size=2, seed=1, adaptive_batch=True)
    recipe = BatchRecipe(cache_of(folder / "cache", family, sides, num), config)
    job = jobs.on_device(jobs.job(folder, denoiser, steps=2), jobs.Device(), 1 << 40)
    return replace(job, recipe=recipe)


def simulated(job: Job, shape: tuple[int, ...], size: int) -> Facts:
    """Return the facts of a batch of ``size`` samples of ``shape``."""
    draw = job.recipe.members()[shape].draw
    one = Simulator(
        denoiser=job.denoiser,
        layers=select(job.denoiser.network, job.config.lora.targets),
        config=job.config,
        dtype=torch.float32,
        samples=prepare.samples_of(job),
        batch=(draw,) * size,
        cancel=job.cancel,
    )
    return measured({size: one}, 1, lambda _: False)[0]


def settings_of(facts: Facts) -> list[Setting]:
    blocks = next(iter(facts.steps.values())).blocks
    keepable = frozenset(block.path for block in blocks if not block.writes_in_place)
    return [
        Setting(),
        Setting(kept=keepable),
        Setting(kept=frozenset(sorted(keepable)[::2]), optimizer_in_ram=True),
        Setting(inputs_in_ram=True, keep_convolutions=False),
    ]


@pytest.mark.parametrize("family", ["sd15", "sd3", "flux"])
def test_between_simulated_batches_nothing_is_reckoned_with_too_little(pack: Any, tmp_path: Path, family: str) -> None:
    job = job_of(pack, tmp_path, family)
    small, large, *others = (shape for shape in job.recipe.members())
    assert positions(small) < positions(large)
    corners = Corners({(positions(s), b): simulated(job, s, b) for s in (small, large) for b in (2, 8)})
    for shape, size in ((others[0], 2), (others[0], 5), (others[1], 3), (small, 4), (large, 7), (others[1], 8)):
        true = simulated(job, shape, size)
        found = corners.at(positions(shape), size)
        for setting in settings_of(true):
            least, most = footprint(true, setting).peak, footprint(found, setting).peak
            assert least <= most <= TOO_MUCH * least
