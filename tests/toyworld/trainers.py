"""Our trainer as the judge runs it: with every lossless memory technique, with those that are exact, with none.

The techniques run through ``LateTransfers``: a device that RAM plays, whose copies are made when they are waited for
and whose memory is NaN whenever nobody may read it. What is trained is what a card would train; the seconds are not a
card's.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lowvram_lora.adapters.targets import select
from lowvram_lora.config import LoraConfig, OptimConfig, SamplerConfig, TrainConfig
from lowvram_lora.data import store
from lowvram_lora.data.batches import BatchRecipe
from lowvram_lora.data.cache import LATENTS, STRUCTURE, CacheEntry, CacheIndex
from lowvram_lora.data.encodings import pack
from lowvram_lora.events import Finished, Noted, Stepped
from lowvram_lora.fakes import FakeCancel, FakeHardware, LateTransfers
from lowvram_lora.memory.frozen import matrices
from lowvram_lora.memory.recompute import find_blocks
from lowvram_lora.memory.setting import Setting
from lowvram_lora.training import estimate, loop, prepare
from lowvram_lora.training import run as run_module
from lowvram_lora.training.attached import Engine
from lowvram_lora.training.job import Job
from lowvram_lora.training.record import Record, RunStore

from .task import ALPHA, BATCH, RANK, TARGETS, Task, Taught, fresh_model

EAGER = partial(Engine, worth_moving_bytes=0, part_rows=24)
"""Tensors of the toy world are small: without this, inputs would stay and feed-forwards would be one part."""


def exact(denoiser: Any) -> Setting:
    """Return the setting with every technique that may not change one bit."""
    return Setting(
        ring_bytes=estimate.smallest_ring(denoiser),
        inputs_in_ram=True,
        optimizer_in_ram=True,
        keep_convolutions=False,
    )


def everything(denoiser: Any) -> Setting:
    """Return the setting with every lossless technique; two of them change the order of sums."""
    return replace(exact(denoiser), micro_batch=BATCH // 2, chunked=frozenset(find_blocks(denoiser.network)))


def nothing(denoiser: Any) -> Setting:
    """Return the setting of a network that fits: all weights resident, all activations kept."""
    resident = frozenset(path for path, _ in matrices(denoiser.network))
    return Setting(resident=resident, kept=frozenset(find_blocks(denoiser.network)))


def ours_on(host_pack: Any, task: Task, rate: float, seed: int) -> Taught:
    """Train with every lossless technique on."""
    return _trained(host_pack, task, rate, seed, everything)


def ours_exact(host_pack: Any, task: Task, rate: float, seed: int) -> Taught:
    """Train with every technique on that is exact."""
    return _trained(host_pack, task, rate, seed, exact)


def ours_off(host_pack: Any, task: Task, rate: float, seed: int) -> Taught:
    """Train as on a host that computes where the weights are, without recompute."""
    return _trained(host_pack, task, rate, seed, None)


def _trained(host_pack: Any, task: Task, rate: float, seed: int, technique: Any) -> Taught:
    with tempfile.TemporaryDirectory() as folder, host_pack.nodes._host.outside_inference_mode():
        job = job_of(host_pack, task, rate, seed, Path(folder))
        with _techniques(technique and technique(job.denoiser)):
            job = job if technique is None else replace(job, transfers=lambda staging_bytes: LateTransfers())
            done = ran(job)
        return Taught(done.record.lora, done.record.losses, statistics.median(done.seconds))


@dataclass(frozen=True)
class Ran:
    """A run that came to its end: what is kept of it, the seconds of each step, and what it told on the way."""

    record: Record
    seconds: tuple[float, ...]
    notes: tuple[str, ...]


def ran(job: Job) -> Ran:
    """Run ``job`` to its end."""
    seconds, notes, record = [], [], None
    for event in run_module.run(job):
        if isinstance(event, Stepped):
            seconds.append(event.seconds_per_step)
        if isinstance(event, Noted):
            notes.append(event.text)
        if isinstance(event, Finished):
            record = event.record
    assert record is not None
    return Ran(record, tuple(seconds), tuple(notes))


@contextmanager
def _techniques(setting: Setting | None) -> Iterator[None]:
    """Let runs go as ``setting`` says, whatever would have been planned; None leaves them alone."""
    if setting is None:
        yield
        return
    planned = run_module.prepare

    def forced(*args: Any) -> Any:
        return replace(planned(*args), setting=setting)

    with mock.patch.object(run_module, "prepare", forced), mock.patch.object(loop, "Engine", EAGER):
        yield


def job_of(host_pack: Any, task: Task, rate: float, seed: int, folder: Path) -> Job:
    """Return the task as a job of ours in float32 whose files all go under ``folder``."""
    recipe = BatchRecipe(_cache(task, folder / "cache"), SamplerConfig(batch_size=BATCH, seed=seed))
    return job_on(host_pack, recipe, config_of(task.samples // BATCH, rate, seed), folder)


def config_of(steps: int, rate: float, seed: int, **changes: Any) -> TrainConfig:
    """Return the settings that every training has; ``changes`` are other fields."""
    return TrainConfig(
        steps=steps,
        seed=seed,
        precision="fp32",
        recompute=False,
        lora=LoraConfig(rank=RANK, alpha=ALPHA, targets=TARGETS),
        optim=OptimConfig(learning_rate=rate),
        **changes,
    )


def job_on(host_pack: Any, recipe: BatchRecipe, config: TrainConfig, folder: Path) -> Job:
    """Return a job on a base model of its own, whose files go under ``folder``."""
    return Job(
        denoiser=host_pack.nodes._models.HostDenoiser(fresh_model()),
        recipe=recipe,
        config=config,
        hardware=FakeHardware(),
        cancel=FakeCancel(),
        loras_root=folder / "loras",
        store=RunStore(folder / "runs"),
    )


def _cache(task: Task, folder: Path) -> CacheIndex:
    entries = []
    for number, (latents, text) in enumerate(zip(task.latents, task.texts, strict=True)):
        picture, caption = f"aa{number:02x}", f"bb{number:02x}"
        encoding = pack(text)
        store.write(store.path_of(folder, "latents", picture), {LATENTS: latents.contiguous()}, {})
        store.write(store.path_of(folder, "text", caption), encoding.tensors, {STRUCTURE: encoding.structure})
        entries.append(CacheEntry.single(f"scene {number}", picture, caption, tuple(latents.shape), 1))
    return CacheIndex(folder, tuple(entries), 1 << 30, "bb00")


def device_bytes(host_pack: Any, task: Task, technique: Any) -> int:
    """Return the peak of one simulated step of the task, in device bytes."""
    with tempfile.TemporaryDirectory() as folder, host_pack.nodes._host.outside_inference_mode():
        job = job_of(host_pack, task, 1e-3, 0, Path(folder))
        layers = select(job.denoiser.network, job.config.lora.targets)
        prepared = prepare.prepare(job, layers, "fp32", prepare.device_facts(job))
        with mock.patch.object(estimate, "Engine", EAGER):
            run = prepare.simulated(job, layers, replace(prepared, setting=technique(job.denoiser)))
        return run.counter.peak


def differing(ones: Taught, others: Taught) -> Sequence[str]:
    """Return the names of tensors that one alone has or that are not the same bit for bit, and ``losses`` likewise."""
    names = [name for name in {**ones.lora, **others.lora} if not _same(ones.lora.get(name), others.lora.get(name))]
    return names if ones.losses == others.losses else ["losses", *names]


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def loss_distance(ones: Taught, others: Taught) -> float:
    """Return the greatest relative difference between the losses of a step; NaN where they can't be compared."""
    if len(ones.losses) != len(others.losses) or not all(others.losses):
        return math.nan
    distances = [abs(one - other) / abs(other) for one, other in zip(ones.losses, others.losses, strict=True)]
    # max() would pass over a NaN that is not the first.
    return max(distances) if all(map(math.isfinite, distances)) else math.nan
