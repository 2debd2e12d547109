"""Batch sizes from the plan's memory model, in whole runs on the fakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lowvram_lora import fakes
from lowvram_lora.adapters.targets import select
from lowvram_lora.config import DataConfig, LoraConfig, SamplerConfig, TrainConfig
from lowvram_lora.data.batches import BatchRecipe
from lowvram_lora.data.cache import build
from lowvram_lora.data.groups import by_shape
from lowvram_lora.data.index import CacheIndex
from lowvram_lora.data.scan import scan
from lowvram_lora.errors import BudgetError
from lowvram_lora.events import Finished, Stepped
from lowvram_lora.training import prepare
from lowvram_lora.training.estimate import Simulator
from lowvram_lora.training.job import Job
from lowvram_lora.training.record import RunStore
from lowvram_lora.training.report import describe_run
from lowvram_lora.training.run import run
from lowvram_lora.units import MIB

LARGE, SMALL = "512x512", "256x256"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> CacheIndex:
    """Nine pictures of one size and nine of another."""
    root = tmp_path_factory.mktemp("sizes ü")
    folder = root / "图"
    folder.mkdir()
    for number in range(18):
        pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        side = 512 if number % 2 else 256
        Image.fromarray(pixels).resize((side, side)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"图 {number}", encoding="utf-8")
    dataset = scan(DataConfig(folder=str(folder), resolution=512, upscale=False), [root])
    return build(dataset, fakes.FakeCodec(), fakes.FakeTextEncoder(), root / "cache", lambda *_: None)[0]


def job_of(index: CacheIndex, folder: Path, free: int | None, budget_gb: float = 0.0, **options: Any) -> Job:
    config = SamplerConfig(**{"batch_size": 2, "strategy": "bucketed", "adaptive_batch": True, **options})
    return Job(
        denoiser=fakes.FakeDenoiser(),
        recipe=BatchRecipe(index, config),
        config=TrainConfig(steps=2, vram_budget_gb=budget_gb, lora=LoraConfig(rank=2)),
        hardware=fakes.FakeHardware(available_bytes=free, total_bytes=None if free is None else 1 << 40),
        cancel=fakes.FakeCancel(),
        loras_root=folder / "loras",
        store=RunStore(folder / "runs"),
        transfers=lambda _: None if free is None else fakes.LateTransfers(),
    )


def finish(job: Job) -> Finished:
    *_, last = run(job)
    assert isinstance(last, Finished)
    return last


def test_with_room_for_all_a_batch_holds_four_times_the_base_size_and_the_report_says_so(
    index: CacheIndex, tmp_path: Path
) -> None:
    finished = finish(job_of(index, tmp_path, 1 << 36))
    text = describe_run(finished.record, finished.path, "", (), reused=False)
    assert f"Samples a batch, as memory allowed (adaptive_batch): 8 of {SMALL}, {LARGE}." in text
    again = finish(job_of(index, tmp_path, 1 << 36))
    assert again.reused and "8 of" in describe_run(again.record, again.path, "", (), reused=True)


def test_every_full_batch_fits_the_budget_at_once_and_makes_no_sample_slower(index: CacheIndex, tmp_path: Path) -> None:
    seen = set()
    for number, free in enumerate(range(66 * MIB, 94 * MIB, 3 * MIB)):
        job = job_of(index, tmp_path / str(number), free)
        layers, device = select(job.denoiser.network, job.config.lora.targets), prepare.device_facts(job)
        try:
            made = prepare.prepare(job, layers, "fp32", device)
        except BudgetError:
            continue
        sizes = dict(made.samples.recipe.sizes)
        small, large = sorted(sizes)
        assert 2 <= sizes[large] <= sizes[small] <= 8
        assert made.plan is not None
        seen.add(tuple(sizes.values()))
        if sizes[large] == 2:
            continue
        assert not made.setting.micro_batch
        for shape, size in sizes.items():
            simulator = Simulator(
                denoiser=job.denoiser,
                layers=layers,
                config=made.config,
                dtype=torch.float32,
                samples=made.samples,
                batch=(job.recipe.members()[shape].draw,) * size,
                cancel=job.cancel,
            )
            peak = simulator.step(made.setting, made.writes_in_place).counter.peak
            assert peak + made.plan.footprint.margin <= free
        count = replace(job.recipe, config=replace(job.recipe.config, adaptive_batch=False))
        base = prepare.prepare(replace(job, recipe=count), layers, "fp32", device).plan
        assert base is not None
        assert made.plan.pace.seconds / made.plan.facts.batch_size <= base.pace.seconds / 2 * 1.01
    assert len(seen) > 3


def test_less_than_the_base_size_needs_at_once_keeps_the_base_size(index: CacheIndex, tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as refused:
        finish(job_of(index, tmp_path, 1 << 20))
    assert refused.value.needed is not None
    record = finish(job_of(index, tmp_path, refused.value.needed)).record
    assert set(json.loads(record.metadata["ss_batch_sizes"]).values()) == {2}


def test_the_unchanged_graph_is_not_trained_again_when_other_memory_is_free(index: CacheIndex, tmp_path: Path) -> None:
    first = finish(job_of(index, tmp_path, 1 << 36))
    for free in (1 << 30, 80 * MIB, 1 << 20):
        again = finish(job_of(index, tmp_path, free))
        assert again.reused and again.record.fingerprint == first.record.fingerprint


def test_another_budget_trains_only_where_it_gives_other_sizes(index: CacheIndex, tmp_path: Path) -> None:
    first = finish(job_of(index, tmp_path, 1 << 36))
    assert finish(job_of(index, tmp_path, 1 << 36, budget_gb=32.0)).reused
    apart = finish(job_of(index, tmp_path, 1 << 36, strategy="random"))
    assert not apart.reused and apart.record.fingerprint != first.record.fingerprint


def test_sizes_are_part_of_what_a_run_is_known_by(index: CacheIndex) -> None:
    config = SamplerConfig(batch_size=2, strategy="bucketed", adaptive_batch=True)
    shapes = {entry.latent_shape for entry in index.entries}
    prints = {
        BatchRecipe(index, config, sizes).fingerprint
        for sizes in ((), *(tuple((shape, size) for shape in sorted(shapes)) for size in (2, 3, 8)))
    }
    assert len(prints) == 4


@pytest.mark.parametrize("strategy", ["bucketed", "random", "sparse"])
def test_no_shape_of_any_batch_holds_more_than_its_size(index: CacheIndex, strategy: str) -> None:
    small, large = sorted({entry.latent_shape for entry in index.entries})
    sizes = {small: 6, large: 3}
    config = SamplerConfig(batch_size=2, strategy=strategy, adaptive_batch=True)
    made = BatchRecipe(index, config, tuple(sizes.items()))
    groups = [by_shape(index, batch) for number in range(3) for batch in made.epoch(number)]
    assert all(len(group) <= sizes[shape] for each in groups for shape, group in each.items())
    assert made.sizes_by_resolution() == {SMALL: 6, LARGE: 3}


def test_where_the_host_computes_in_ram_batches_are_full_by_tokens(index: CacheIndex, tmp_path: Path) -> None:
    finished = finish(job_of(index, tmp_path, None))
    assert "ss_batch_sizes" not in finished.record.metadata
    report = job_of(index, tmp_path, None).recipe.report()
    assert "LoRA Train decides how many samples of each size make a batch, 2 to 8" in report
    assert "tokens a batch" in report


def test_a_batch_size_of_0_is_the_preset_for_the_largest_pictures(index: CacheIndex) -> None:
    assert BatchRecipe(index, SamplerConfig(batch_size=0)).config.batch_size == 8
    entries = tuple(replace(entry, bucket_px=(1024, 960)) for entry in index.entries)
    assert BatchRecipe(replace(index, entries=entries), SamplerConfig(batch_size=0)).config.batch_size == 2


def test_of_what_goes_through_at_once_the_largest_is_planned_for(index: CacheIndex) -> None:
    """Five small pictures hold more than one large one, but one of them does not."""
    small, large = sorted({entry.latent_shape for entry in index.entries})
    one_large = next(e for e in index.entries if e.latent_shape == large)
    some = replace(index, entries=(one_large, *(e for e in index.entries if e.latent_shape == small)))
    for options in ({}, {"adaptive_batch": True}):
        planner = BatchRecipe(some, SamplerConfig(batch_size=8, strategy="bucketed", **options)).planner
        shapes = [some.image_of(planner.largest(size)[0]).latent_shape for size in (None, 1)]
        assert shapes == [small, large]


def test_five_simulated_steps_tell_the_sizes(
    index: CacheIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, count = job_of(index, tmp_path, 1 << 36), [0]
    layers, device = select(job.denoiser.network, job.config.lora.targets), prepare.device_facts(job)
    step, decide, steps = Simulator.step, prepare.decide, []

    def counted(self: Simulator, *args: Any, **more: Any) -> Any:
        count[0] += 1
        return step(self, *args, **more)

    def noted(*args: Any) -> Any:
        found = decide(*args)
        steps.append(count[0])
        return found

    monkeypatch.setattr(Simulator, "step", counted)
    monkeypatch.setattr(prepare, "decide", noted)
    prepare.prepare(job, layers, "fp32", device)
    assert steps == [5]


def test_a_cancelled_run_is_not_taken_for_the_one_that_was_asked_for(index: CacheIndex, tmp_path: Path) -> None:
    job = job_of(index, tmp_path, 1 << 36)
    events = run(job)
    next(event for event in events if isinstance(event, Stepped))
    events.close()
    assert not finish(job).reused
