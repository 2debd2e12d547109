"""The loss on held-out pictures: of the same pictures and noise each time, and beside the run, not part of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from lowvram_lora import fakes
from lowvram_lora.adapters import file
from lowvram_lora.config import DataConfig, LoraConfig, OptimConfig, SamplerConfig, TrainConfig
from lowvram_lora.data.batches import BatchRecipe
from lowvram_lora.data.cache import build
from lowvram_lora.data.draw import Draw
from lowvram_lora.data.profiles import CachePlan
from lowvram_lora.data.scan import scan
from lowvram_lora.data.store import path_of
from lowvram_lora.events import Event, Finished, Lowered, Noted, Stepped, Validated
from lowvram_lora.memory.meter import Meter
from lowvram_lora.ports import Encoding
from lowvram_lora.training import objective
from lowvram_lora.training.record import RunStore
from lowvram_lora.training.report import describe_run
from lowvram_lora.training.run import Job, run
from lowvram_lora.training.unseen import NUM_DRAWS, Unseen, is_due, spread_sigmas

STEPS = 120


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Four pictures, of which one is held out."""
    pictures = tmp_path / "猫"
    pictures.mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64), (number * 80, 90, 30)).save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text(f"图 {number}", encoding="utf-8")
    dataset = scan(DataConfig(folder=str(pictures), resolution=64, validation_share=0.25), [tmp_path])
    plan = CachePlan()
    index, _ = build(dataset, fakes.FakeCodec(), fakes.FakeTextEncoder(), tmp_path / "cache", lambda *_: None, plan)
    assert len(index.entries) == 3 and len(index.held_out) == 1
    return Job(
        denoiser=fakes.FakeDenoiser(),
        recipe=BatchRecipe(index, SamplerConfig(batch_size=2)),
        config=TrainConfig(steps=STEPS, lora=LoraConfig(rank=2, alpha=5.0), optim=OptimConfig(learning_rate=0.01)),
        hardware=fakes.FakeHardware(),
        cancel=fakes.FakeCancel(),
        loras_root=tmp_path / "loras",
        store=RunStore(tmp_path / "runs"),
    )


def without_held_out(job: Job, store: Path) -> Job:
    cache = replace(job.recipe.cache, held_out=())
    return replace(job, recipe=replace(job.recipe, cache=cache), store=RunStore(store))


def figures(events: list[Event]) -> dict[int, float]:
    return {event.done: event.loss for event in events if isinstance(event, Validated)}


def finished_of(events: list[Event]) -> Finished:
    last = events[-1]
    assert isinstance(last, Finished)
    return last


def test_it_is_told_before_the_first_step_now_and_then_and_after_the_last(job: Job) -> None:
    events = list(run(job))
    found = figures(events)
    assert list(found) == [0, 50, 100, STEPS]
    kinds = [type(event) for event in events]
    assert kinds.index(Validated) < kinds.index(Stepped)
    finished = finished_of(events)
    assert finished.record.validation == tuple(found.items())
    again = finished_of(list(run(job)))
    assert again.reused and again.record.validation == finished.record.validation
    report = describe_run(again.record, again.path, "", (), reused=True)
    assert f"{found[0]:.4f} before step 1" in report and f"{found[STEPS]:.4f} after 120 steps" in report


@pytest.mark.parametrize("steps", [1, 49, 50, 1000, 12345])
def test_a_run_is_never_held_up_often(steps: int) -> None:
    points = [done for done in range(steps + 1) if is_due(done, steps)]
    assert points[0] == 0 and points[-1] == steps and len(points) <= 12
    assert all(later - sooner >= 50 for sooner, later in pairwise(points[:-1]))


def test_the_run_is_the_one_it_were_without(job: Job, tmp_path: Path) -> None:
    with_it = finished_of(list(run(job))).record
    without = finished_of(list(run(without_held_out(job, tmp_path / "other")))).record
    assert not without.validation
    assert with_it.losses == without.losses
    assert with_it.lora.keys() == without.lora.keys()
    assert all(torch.equal(tensor, without.lora[key]) for key, tensor in with_it.lora.items())


def test_what_learns_nothing_has_the_same_loss_each_time(job: Job) -> None:
    idle = replace(job.config, optim=replace(job.config.optim, learning_rate=1e-30))
    found = figures(list(run(replace(job, config=idle))))
    assert len(found) == 4 and len(set(found.values())) == 1
    assert len(set(figures(list(run(job))).values())) == 4


def test_a_report_says_where_it_was_least(job: Job) -> None:
    record = finished_of(list(run(job))).record
    falling = replace(record, validation=((0, 0.9), (50, 0.7), (STEPS, 0.5)))
    rising = replace(record, validation=((0, 0.9), (50, 0.7), (STEPS, 0.8)))
    assert "It was least" not in describe_run(falling, Path("x"), "", (), reused=False)
    assert "It was least, 0.7000, after 50 steps" in describe_run(rising, Path("x"), "", (), reused=False)


def test_where_memory_does_not_suffice_for_it_the_run_goes_on(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def loss(unseen: Unseen) -> float:
        calls.append(unseen)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("out of memory: 7 bytes more")
        return 1.0

    monkeypatch.setattr(Unseen, "loss", loss)
    events = list(run(job))
    assert len([event for event in events if isinstance(event, Stepped)]) == STEPS
    (note,) = [event.text for event in events if isinstance(event, Noted)]
    assert "held-out pictures" in note and "7 bytes more" in note
    assert not [event for event in events if isinstance(event, Lowered)]
    assert len(calls) == 2 and finished_of(events).record.validation == ()


def test_a_held_out_encoding_that_is_gone_costs_no_step(job: Job) -> None:
    held_out = job.recipe.cache.held_out[0]
    steps, notes = [], []
    for event in run(job):
        steps += [event.step] if isinstance(event, Stepped) else []
        notes += [event.text] if isinstance(event, Noted) else []
        if steps and steps[-1] == 60:
            path_of(job.recipe.cache.root, "latents", held_out.latents_key).unlink(missing_ok=True)
    assert len(steps) == STEPS
    (note,) = notes
    assert held_out.name in note and "From step 101 on" in note
    assert isinstance(event, Finished) and event.path.is_file() and not event.record.validation


def test_a_run_from_disk_shows_no_figures_of_other_pictures(job: Job, tmp_path: Path) -> None:
    cache = job.recipe.cache
    first = finished_of(list(run(job)))
    other = replace(cache, held_out=(replace(cache.held_out[0], text_keys=cache.entries[0].text_keys),))
    for held_out, told in ((other.held_out, 1), ((), 0)):
        recipe = replace(job.recipe, cache=replace(cache, held_out=held_out))
        again = finished_of(list(run(replace(job, recipe=recipe))))
        assert again.reused and first.record.validation and not again.record.validation
        assert len(again.reading) == told
    same = finished_of(list(run(job)))
    assert same.record.validation == first.record.validation and not same.reading


def test_a_loss_that_is_no_number_is_never_the_least(job: Job) -> None:
    record = replace(finished_of(list(run(job))).record, validation=((0, float("nan")), (50, 0.7), (STEPS, 0.8)))
    assert "It was least, 0.7000, after 50 steps" in describe_run(record, Path("x"), "", (), reused=False)


def test_another_error_is_not_hidden(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(unseen: Unseen) -> float:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(Unseen, "loss", loss)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        list(run(job))


def test_cancel_acts_in_it_and_the_steps_done_are_kept(job: Job) -> None:
    cancel, done = fakes.FakeCancel(), []
    with pytest.raises(KeyboardInterrupt):
        for event in run(replace(job, cancel=cancel)):
            done += [event.step] if isinstance(event, Stepped) else []
            if done and done[-1] == 50:
                cancel.at = 3
    (kept,) = job.loras_root.rglob("*_partial_step00050.safetensors")
    tensors, _ = file.read(kept)
    assert tensors and done[-1] == 50


@dataclass
class Pictures:
    """Held-out samples of chosen numbers; notes what was asked for."""

    masks: Tensor | None = None
    seed: int = 3
    asked: list[Draw] = field(default_factory=list)

    def latents(self, draw: Draw) -> Tensor:
        self.asked.append(draw)
        return torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(draw.entry))

    def mask(self, draw: Draw) -> Tensor | None:
        return self.masks

    def conditioning(self, draw: Draw) -> Encoding:
        return fakes.FakeTextEncoder().encode(f"caption {draw.entry}")


def unseen(samples: Any, num: int) -> Unseen:
    return Unseen(
        denoiser=fakes.FakeDenoiser(),
        samples=samples,
        num_entries=num,
        cancel=fakes.FakeCancel(),
        watch=Meter(fakes.FakeHardware()),
        begin=lambda: None,
    )


@pytest.mark.parametrize(("num", "taken"), [(1, range(1)), (3, range(3)), (16, range(16)), (32, range(0, 32, 2))])
def test_it_takes_so_many_passes_whatever_is_held_out(num: int, taken: range) -> None:
    samples = Pictures()
    unseen(samples, num).loss()
    assert len(samples.asked) == NUM_DRAWS
    assert set(samples.asked) == {Draw(entry) for entry in taken}


def test_masks_weigh_as_in_training() -> None:
    half = torch.zeros(1, 8, 8)
    half[:, :, :4] = 1.0
    plain, whole, left, right = (
        unseen(Pictures(mask), 1).loss() for mask in (None, torch.ones(1, 8, 8), half, 1.0 - half)
    )
    assert whole == pytest.approx(plain) and left != pytest.approx(plain)
    assert (left + right) / 2 == pytest.approx(plain)


def test_sigmas_are_spread_over_the_whole_table() -> None:
    table = torch.linspace(0.0, 14.6, 1000)
    sigmas = spread_sigmas(table, NUM_DRAWS)
    assert sigmas.shape == (NUM_DRAWS,) and bool((sigmas.diff() > 0).all())
    assert float(sigmas.mean()) == pytest.approx(float(table.mean()), rel=0.01)
    assert spread_sigmas(torch.zeros(4), 2).tolist() == pytest.approx([objective.MIN_SIGMA] * 2)
