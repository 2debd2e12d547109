"""Feed-forwards in parts, on the host's networks and through a ring: the same numbers, the bytes foreseen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import pytest
import tiny
import torch

from lowvram_lora.adapters.attach import build
from lowvram_lora.adapters.targets import select
from lowvram_lora.memory import convolution
from lowvram_lora.memory.facts import Facts
from lowvram_lora.memory.footprint import footprint
from lowvram_lora.memory.meter import Meter
from lowvram_lora.memory.recompute import find_blocks
from lowvram_lora.memory.search import Space
from lowvram_lora.memory.setting import Setting
from lowvram_lora.training import estimate, loop, optim, prepare
from lowvram_lora.training.attached import Engine, attached
from lowvram_lora.training.optim import build_optimizer, build_schedule
from lowvram_lora.training.run import run
from lowvram_lora.training.step import Stepper

# A kept block is reckoned to hold everything while its forward run is at its peak: much where there are two blocks.
TOO_MUCH = 1.1


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The mode LoRA Train runs its loop in, and parts of few tokens: there are not many."""
    for module in (loop, estimate):
        monkeypatch.setattr(module, "Engine", partial(Engine, part_rows=5, worth_moving_bytes=0))
    # Small pictures convolve in another way on a CPU than elsewhere, and its optimizer is a fused one.
    monkeypatch.setattr(convolution, "SMALL_PICTURE", 0)
    monkeypatch.setattr(optim, "_FUSED_DEVICES", ())
    with torch.inference_mode(), torch.inference_mode(False), torch.no_grad():
        yield


def job_of(pack: Any, folder: Path, family: str, available: int | None = None, **changes: Any) -> Any:
    denoiser = pack.nodes._models.HostDenoiser(tiny.FAMILIES[family]())
    return jobs.on_device(jobs.family_job(folder, denoiser, family, **changes), jobs.Device(), available)


def in_parts(job: Any, **changes: Any) -> Setting:
    network = job.denoiser.network
    ring_bytes = jobs.ring(network, job.denoiser.weights, 4)
    return replace(Setting(chunked=frozenset(find_blocks(network)), ring_bytes=ring_bytes), **changes)


def facts_of(job: Any) -> Facts:
    layers = select(job.denoiser.network, job.config.lora.targets)
    return prepare.facts_of(job, layers, "fp32", prepare.device_facts(job))[0]


def gradients(job: Any, setting: Setting, transfers: Any) -> list[torch.Tensor]:
    """Return the gradients of a step in float64."""
    denoiser, layers = job.denoiser, select(job.denoiser.network, "all linear")
    adapters = build(layers, job.config.lora, 0, tiny.CPU, torch.float64)
    generator = torch.Generator().manual_seed(3)
    for parameter in adapters.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
    optimizer = build_optimizer(adapters.parameters(), job.config.optim)
    with ExitStack() as undo:
        engine = Engine(setting=setting, transfers=transfers, part_rows=5)
        engaged = undo.enter_context(attached(denoiser, layers, adapters, torch.float64, engine))
        Stepper(
            denoiser=denoiser,
            batches=prepare.samples_of(job),
            parameters=adapters.parameters(),
            optimizer=optimizer,
            schedule=build_schedule(optimizer, job.config.optim, 1),
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            config=job.config.optim,
            cancel=job.cancel,
            watch=Meter(job.hardware),
            begin=engaged.begin,
        ).gradients(0)
        return [parameter.grad for parameter in adapters.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_through_a_ring_the_gradients_are_those_of_the_whole(pack: Any, tmp_path: Path, family: str) -> None:
    job = job_of(pack, tmp_path, family)
    whole = gradients(job, Setting(), None)
    found = gradients(job, in_parts(job), jobs.Device())
    assert len(found) == len(whole) > 20
    for one, other in zip(found, whole, strict=True):
        assert (one - other).norm() <= 1e-9 * other.norm()


@pytest.mark.parametrize("family", ["sd15", "sd3", "flux"])
def test_bytes_without_data_equal_bytes_with_data(pack: Any, tmp_path: Path, family: str) -> None:
    job = job_of(pack, tmp_path, family)
    counts = []
    for device in (estimate.META, tiny.CPU):
        simulator = estimate.Simulator(
            denoiser=job.denoiser,
            layers=select(job.denoiser.network, job.config.lora.targets),
            config=job.config,
            dtype=torch.float32,
            samples=prepare.samples_of(job),
            batch=prepare.largest_batch(job.recipe),
            cancel=job.cancel,
            device=device,
        )
        counter = simulator.step(in_parts(job)).counter
        base = counter.counts["", "forward"].began
        counts.append({place: count.peak - base for place, count in counter.counts.items() if place[1] != "setup"})
    assert counts[0] == counts[1]


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_a_setting_in_parts_takes_and_works_what_was_foreseen(pack: Any, tmp_path: Path, family: str) -> None:
    job = job_of(pack, tmp_path, family)
    facts, layers = facts_of(job), select(job.denoiser.network, job.config.lora.targets)
    blocks = facts.steps[2].blocks
    chunked = frozenset(block.path for block in blocks if block.in_parts)
    keepable = frozenset(block.path for block in blocks if not block.writes_in_place)
    assert chunked
    known = {block.path: block.writes_in_place for block in blocks}
    plain = replace(prepare._unplanned(job, "fp32", prepare.device_facts(job)), writes_in_place=known)
    for some, kept in ((chunked, frozenset()), (chunked, keepable), (frozenset(sorted(chunked)[::2]), keepable)):
        setting = in_parts(job, chunked=some, kept=kept)
        foreseen = footprint(facts, setting).peak
        peak = prepare.simulated(job, layers, replace(plain, setting=setting)).counter.peak
        assert peak <= foreseen <= TOO_MUCH * peak


def test_the_smallest_plan_runs_in_parts_and_keeps_its_word(pack: Any, tmp_path: Path) -> None:
    family = "sd3"
    job = job_of(pack, tmp_path, family, batch_size=1)
    rates = prepare.device_facts(job).rates
    facts = facts_of(job)
    least = Space(facts, rates).smallest(1 << 40)
    blocks = tuple(replace(block, in_parts=None) for block in facts.steps[1].blocks)
    assert least < Space(replace(facts, steps={1: replace(facts.steps[1], blocks=blocks)}), rates).smallest(1 << 40)
    job = jobs.on_device(job, jobs.Device(), least)
    made = prepare.prepare(
        job, select(job.denoiser.network, job.config.lora.targets), "fp32", prepare.device_facts(job)
    )
    assert made.setting.chunked
    assert made.plan is not None and "feed-forward" in made.table
    assert made.plan.footprint.need <= least
    whole = jobs.finish(job_of(pack, tmp_path / "whole", family, available=1 << 40, batch_size=1)).record.losses
    *_, last = run(job)
    assert last.record.losses == pytest.approx(whole, rel=1e-3)


def test_where_everything_fits_parts_are_not_even_measured(
    pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Setting] = []
    step = estimate.Simulator.step
    monkeypatch.setattr(
        estimate.Simulator, "step", lambda self, setting, *a, **k: steps.append(setting) or step(self, setting, *a, **k)
    )
    job = job_of(pack, tmp_path, "sd15", available=1 << 34)
    prepare.prepare(job, select(job.denoiser.network, job.config.lora.targets), "fp32", prepare.device_facts(job))
    assert steps and not any(setting.chunked for setting in steps)
