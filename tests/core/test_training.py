"""A run on the shipped fakes: events, cancel, records, memory, metadata."""

from __future__ import annotations

import json
import math
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from lowvram_lora import fakes
from lowvram_lora.adapters.attach import Adapters
from lowvram_lora.config import DataConfig, LoraConfig, OptimConfig, SamplerConfig, TrainConfig
from lowvram_lora.data.batches import BatchRecipe
from lowvram_lora.data.cache import CachePlan, build
from lowvram_lora.data.cleaning import clean
from lowvram_lora.data.scan import scan
from lowvram_lora.errors import BudgetError, ConfigError, PathError, PreflightError, UnsupportedModelError
from lowvram_lora.events import Finished, Noted, Saved, Started, Stepped
from lowvram_lora.memory.meter import HISTORY_LENGTH, PHASES, Meter
from lowvram_lora.memory.summary import describe_memory, efficiency
from lowvram_lora.training import objective
from lowvram_lora.training.optim import build_optimizer, build_schedule
from lowvram_lora.training.precision import resolve
from lowvram_lora.training.progress import Progress
from lowvram_lora.training.record import RunStore
from lowvram_lora.training.report import describe_run
from lowvram_lora.training.run import Job, run


@pytest.fixture
def job(tmp_path: Path) -> Job:
    pictures = tmp_path / "my photos ü"
    pictures.mkdir()
    for number in range(3):
        Image.new("RGB", (64, 64), (number * 80, 90, 30)).save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text(f"图 {number}", encoding="utf-8")
    dataset = scan(DataConfig(folder=str(pictures), resolution=64), [tmp_path])
    plan = CachePlan(ram_cache_bytes=1 << 20)
    index, _ = build(dataset, fakes.FakeCodec(), fakes.FakeTextEncoder(), tmp_path / "cache", lambda *_: None, plan)
    return Job(
        denoiser=fakes.FakeDenoiser(),
        recipe=BatchRecipe(index, SamplerConfig(batch_size=2)),
        config=TrainConfig(
            steps=4,
            output_name="sub/größe",
            lora=LoraConfig(rank=2, alpha=5.0),
            optim=OptimConfig(learning_rate=0.01),
        ),
        hardware=fakes.FakeHardware(),
        cancel=fakes.FakeCancel(),
        loras_root=tmp_path / "loras",
        store=RunStore(tmp_path / "runs"),
    )


def test_events_come_in_order_and_the_file_is_there(job: Job) -> None:
    events = list(run(job))
    assert [type(event) for event in events] == [Started, *[Stepped] * 4, Saved, Finished]
    assert [event.step for event in events if isinstance(event, Stepped)] == [1, 2, 3, 4]
    assert events[-1].path == job.loras_root / "sub" / "größe.safetensors"
    assert events[-1].path.is_file()
    assert len(events[-1].record.losses) == 4


def test_the_run_tells_what_the_tiers_did_and_leaves_no_thread(job: Job) -> None:
    cache = replace(job.recipe.cache, predictive=True)
    *_, finished = run(replace(job, recipe=replace(job.recipe, cache=cache)))
    text = "\n".join(finished.reading)
    # Four steps of an epoch of two batches, of three samples in all; each has a picture and a caption.
    assert "6 of 12 reads from RAM" in text and "6 files" in text and "to the device: 4" in text
    assert not [thread for thread in threading.enumerate() if "read_ahead" in thread.name]
    assert not list(cache.root.glob("in_use/*.txt"))


def test_an_error_ends_the_reading_ahead_too(job: Job) -> None:
    cache = replace(job.recipe.cache, predictive=True)
    job = replace(job, recipe=replace(job.recipe, cache=cache), cancel=fakes.FakeCancel(at=4))
    with pytest.raises(KeyboardInterrupt):
        list(run(job))
    assert not [thread for thread in threading.enumerate() if "read_ahead" in thread.name]


def test_what_only_saves_room_changes_no_number(job: Job) -> None:
    *_, plain = run(job)
    cache = replace(job.recipe.cache, predictive=True, ram_cache_bytes=3000)
    assert cache.fingerprint == job.recipe.cache.fingerprint
    *_, other = run(replace(job, recipe=replace(job.recipe, cache=cache), store=RunStore(job.store.root / "other")))
    assert not other.reused
    assert other.record.losses == plain.record.losses


def test_training_lowers_the_loss(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    # The same noise every step, so that only the weights change.
    monkeypatch.setattr(objective, "generator_for", lambda *_: torch.Generator().manual_seed(1))
    config = replace(job.config, steps=60, optim=replace(job.config.optim, schedule="constant", max_grad_norm=0.0))
    losses = [event.loss for event in run(replace(job, config=config)) if isinstance(event, Stepped)]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_every_adapter_gets_a_gradient(job: Job) -> None:
    *_, last = run(job)
    lora = last.record.lora
    ups = [tensor for key, tensor in lora.items() if key.endswith("lora_up.weight")]
    assert ups and all(up.abs().max() > 0 and up.isfinite().all() for up in ups)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules_warm_up_and_fall(schedule: Any) -> None:
    config = OptimConfig(learning_rate=1.0, schedule=schedule, warmup_steps=2)
    optimizer = build_optimizer([torch.nn.Parameter(torch.ones(2))], config)
    steps = build_schedule(optimizer, config, steps=10)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        steps.step()
    assert rates[:3] == [0.0, 0.5, 1.0]
    assert rates[-1] == 1.0 if schedule == "constant" else rates[-1] < 0.2


@pytest.mark.parametrize("limit", [1e-3, 0.0])
def test_clipping_bounds_the_gradients_that_reach_the_optimizer(
    job: Job, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms: list[float] = []
    step = torch.optim.AdamW.step

    def noted(self: torch.optim.AdamW, *args: Any) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    list(run(replace(job, config=replace(job.config, optim=replace(job.config.optim, max_grad_norm=limit)))))
    assert len(norms) == 4
    if limit:
        assert norms == pytest.approx([limit] * 4, rel=1e-4)
    else:
        assert min(norms) > 1e-2


def test_a_record_comes_back_as_it_was_and_a_damaged_one_does_not(job: Job) -> None:
    *_, finished = run(job)
    record = finished.record
    found = job.store.find(record.fingerprint)
    assert found is not None
    assert replace(found, lora={}) == replace(record, lora={})
    assert all(torch.equal(found.lora[key], tensor) for key, tensor in record.lora.items())
    assert job.store.find("another") is None
    weights = next(job.store.root.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-10])
    assert job.store.find(record.fingerprint) is None
    *_, again = run(job)
    assert not again.reused


def test_a_deleted_lora_is_written_again_without_training(job: Job) -> None:
    *_, first = run(job)
    first.path.unlink()
    *_, second = run(job)
    assert second.reused and second.path == first.path and first.path.is_file()


@pytest.mark.parametrize(
    ("change", "reused"),
    [
        ({"vram_budget_gb": 4.0}, True),
        ({"output_name": "b"}, True),
        ({"seed": 1}, False),
        ({"recompute": False}, False),
    ],
)
def test_what_a_run_is_known_by(job: Job, change: dict[str, Any], reused: bool) -> None:
    list(run(job))
    *_, last = run(replace(job, config=replace(job.config, **change)))
    assert last.reused is reused


def test_metadata_says_what_the_file_is(job: Job) -> None:
    *_, finished = run(job)
    metadata = finished.record.metadata
    assert metadata["ss_network_dim"] == "2" and metadata["ss_network_alpha"] == "5.0"
    assert metadata["ss_steps"] == "4" and metadata["ss_num_train_images"] == "3"
    assert metadata["modelspec.sai_model_spec"] == "1.0.1"
    assert json.loads(metadata["ss_network_args"]) == {"targets": "attention + feed-forward"}


def test_a_cancelled_run_keeps_its_steps_as_a_partial_file(job: Job) -> None:
    with pytest.raises(KeyboardInterrupt):
        list(run(replace(job, cancel=fakes.FakeCancel(5))))
    (path,) = job.loras_root.rglob("*.safetensors")
    assert path.name == "größe_partial_step00002.safetensors"
    latest = job.store.latest_memory()
    assert latest is not None and latest.steps == 2
    assert not list(job.store.root.glob("*.safetensors"))


def test_a_full_disk_at_the_end_names_the_file(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    events = run(job)
    for event in events:
        if isinstance(event, Stepped) and event.step == 4:
            monkeypatch.setattr("lowvram_lora.adapters.file.save_file", full)
            break
    with pytest.raises(Exception, match="No space left"):
        list(events)


def test_a_missing_package_is_named_before_step_1(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules is how Python says that a module can't be imported.
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(PreflightError, match=r"package peft .*requirements\.txt"):
        next(run(job))


@pytest.mark.parametrize("name", ["../x", "C:\\x"])
def test_a_bad_name_is_known_before_step_1(job: Job, name: str) -> None:
    with pytest.raises(PreflightError, match="output_name"):
        next(run(replace(job, config=replace(job.config, output_name=name))))


@pytest.mark.parametrize(
    "change",
    [
        lambda: TrainConfig(steps=0),
        lambda: LoraConfig(rank=0),
        lambda: LoraConfig(alpha=math.nan),
        lambda: OptimConfig(learning_rate=-1.0),
        lambda: TrainConfig(vram_budget_gb=-1.0),
        lambda: SamplerConfig(batch_size=-1),
        lambda: SamplerConfig(strategy="nope"),  # type: ignore[arg-type]
        lambda: LoraConfig(targets="nope"),  # type: ignore[arg-type]
        lambda: OptimConfig(schedule="nope"),  # type: ignore[arg-type]
        lambda: TrainConfig(precision="nope"),  # type: ignore[arg-type]
        lambda: DataConfig(folder="x", caption_extension="nope"),  # type: ignore[arg-type]
    ],
)
def test_settings_outside_their_range_say_what_they_must_be(change: Any) -> None:
    with pytest.raises(ConfigError, match="must be"):
        change()


def test_a_precision_the_device_lacks_falls_back_with_a_note() -> None:
    """h04, h05, h06"""
    denoiser = fakes.FakeDenoiser()
    assert resolve("auto", denoiser) == ("fp32", None)
    assert resolve("bf16", denoiser) == ("bf16", None)
    denoiser.supports = lambda dtype: dtype is not torch.bfloat16  # type: ignore[method-assign]
    precision, note = resolve("bf16", denoiser)
    assert precision == "fp16" and "bf16" in (note or "")


def test_noise_depends_on_seed_step_and_batch_only() -> None:
    def draw(*where: int) -> list[float]:
        return torch.randn(4, generator=objective.generator_for(*where)).tolist()

    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert len({tuple(draw(*where)) for where in [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (12, 3, 0)]}) == 5


def test_sigmas_come_from_the_models_table_and_stay_above_the_floor() -> None:
    table = torch.linspace(0.0, 1.0, 11)
    drawn = objective.draw_sigmas(table, 500, torch.Generator().manual_seed(0))
    assert drawn.min() == pytest.approx(objective.MIN_SIGMA)
    assert set(drawn.tolist()) <= {*table.tolist(), drawn.min().item()}
    assert len(drawn.unique()) == 11


@pytest.mark.parametrize(
    ("seconds", "used", "alarms"),
    [
        ((1, 1, 1, 1, 9), 990, True),
        ((1, 1, 1, 1, 9), 500, False),
        ((1, 1, 1, 1, 1.2), 990, False),
        ((1, 9), 990, False),
    ],
)
def test_a_step_far_slower_than_usual_on_a_full_card_raises_the_alarm(
    job: Job, seconds: tuple[float, ...], used: int, alarms: bool
) -> None:
    progress = Progress(adapters=Adapters({}), meter=Meter(job.hardware))
    progress.seconds.extend(seconds)
    progress.meter.latest = {"card_used": used, "card_total": 1000}
    assert ("driver" in progress.alarm()) == alarms


def test_the_meter_keeps_peaks_and_a_bounded_history() -> None:
    meter = Meter(fakes.FakeHardware())
    for _ in range(5000):
        meter.sample()
    record = meter.record("x")
    assert record.peak == {"ram": 5000} and record.average == {"ram": 2500} and record.steps == 5000
    assert 2 <= len(record.history) <= HISTORY_LENGTH
    counts = [sample["ram"] for sample in record.history]
    assert counts == sorted(counts) and counts[-1] > 4900


def test_what_was_before_the_first_phase_is_no_part_of_a_run() -> None:
    """Counts are peaks since the last sample, so the first tells of an image generation before the run."""
    counts = iter([900, 30, 50, 20, 7, 31, 52, 21])
    hardware = fakes.FakeHardware()
    hardware.sample = lambda: {"device_allocated": next(counts)}  # type: ignore[method-assign]
    meter = Meter(hardware)
    for _ in range(2):
        for name in PHASES:
            meter.phase(name)
        meter.sample()
    record = meter.record("x")
    assert record.peak == {"device_allocated": 52}
    assert [record.phases[name]["device_allocated"] for name in PHASES] == [31, 52, 21]


def test_memory_in_words(job: Job) -> None:
    assert "No training run" in describe_memory(None, {"ram": 1 << 30})
    list(run(job))
    text = describe_memory(job.store.latest_memory(), {"ram": 1 << 30, "device_allocated": 3, "device_reserved": 4})
    assert "1.00 GiB" in text and "größe" in text and "peak" in text and "average" in text
    assert efficiency({"device_allocated": 3, "device_reserved": 4}) == 0.75
    assert efficiency({"ram": 3}) is None


def test_the_report_says_how_it_went_and_that_there_was_no_vram_to_plan(job: Job) -> None:
    config = replace(job.config, vram_budget_gb=4.0)
    started, *_, finished = run(replace(job, config=config))
    text = describe_run(finished.record, finished.path, "", started.notes, reused=False)
    assert "vram_budget_gb = 4 is ignored" in text and "computes in RAM" in text
    assert f"Trained {config.steps} steps" in text and str(finished.path) in text
    reused = describe_run(finished.record, finished.path, "", (), reused=True)
    assert reused.startswith("Nothing changed")


def failing(*_: Any, **__: Any) -> None:
    raise PathError("somewhere", "can't be written")


@pytest.mark.parametrize("method", ["save", "save_memory"])
def test_a_record_that_cannot_be_kept_costs_no_finished_run(
    job: Job, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunStore, method, failing)
    *_, last = run(job)
    assert last.path.is_file() and not last.reused


def test_what_cannot_be_kept_of_a_cancelled_run_does_not_hide_the_cancel(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("lowvram_lora.adapters.file.write", failing)
    monkeypatch.setattr(RunStore, "save_memory", failing)
    with pytest.raises(KeyboardInterrupt):
        list(run(replace(job, cancel=fakes.FakeCancel(5), say=said.append)))
    assert "could not be kept" in said[0]


@pytest.mark.parametrize(
    "change",
    [
        {"losses": []},
        {"losses": ["a"] * 4},
        {"losses": [None] * 4},
        {"num_parameters": "x"},
        {"fingerprint": "another"},
        {"memory": {}},
        {"metadata": {"ss_steps": 4}},
    ],
)
def test_a_record_that_somebody_edited_is_not_taken(job: Job, change: dict[str, Any]) -> None:
    list(run(job))
    (path,) = [file for file in job.store.root.glob("*.json") if "latest" not in file.name]
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    *_, last = run(job)
    assert not last.reused


@pytest.mark.parametrize(
    "text", ["", "[", "[" * 100_000, "null", '{"run": 1}', '{"history": [1], "peak": [], "average": {}}']
)
def test_a_memory_record_that_is_none_is_as_if_there_were_none(job: Job, text: str) -> None:
    job.store.root.mkdir()
    (job.store.root / "latest_memory.json").write_text(text, encoding="utf-8")
    assert job.store.latest_memory() is None


def test_a_network_out_of_reach_of_the_adapters_is_an_error(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fakes.FakeDenoiser, "predict_x0", lambda self, noised, sigma, conditioning: noised.requires_grad_() * 1.0
    )
    with pytest.raises(UnsupportedModelError, match="No gradient"):
        list(run(job))


def test_a_layer_that_no_step_reads_does_not_stop_a_planned_run(job: Job) -> None:
    """Image models carry layers for inputs that training never gives."""
    expected = [event.loss for event in run(job) if isinstance(event, Stepped)]
    denoiser = fakes.FakeDenoiser()
    denoiser.network.add_module("unused", torch.nn.Linear(512, 512).requires_grad_(False))
    planned = replace(
        job,
        denoiser=denoiser,
        hardware=fakes.FakeHardware(available_bytes=1 << 34, total_bytes=1 << 34),
        transfers=lambda _: fakes.LateTransfers(),
        store=RunStore(job.store.root / "planned"),
    )
    assert [event.loss for event in run(planned) if isinstance(event, Stepped)] == expected


def test_a_lossy_run_says_so_in_report_and_file_and_is_not_taken_for_a_lossless_one(job: Job) -> None:
    def planned(free: int, allow_lossy: bool) -> Job:
        return replace(
            job,
            config=replace(job.config, allow_lossy=allow_lossy),
            hardware=fakes.FakeHardware(available_bytes=free, total_bytes=1 << 34),
            transfers=lambda _: fakes.LateTransfers(),
        )

    with pytest.raises(BudgetError) as refused:
        list(run(planned(1 << 20, allow_lossy=False)))
    assert refused.value.needed is not None
    *_, lossy = run(planned(refused.value.needed - 1, allow_lossy=True))
    comment = lossy.record.metadata["ss_training_comment"]
    assert comment.startswith("lossy: ")
    assert comment in describe_run(lossy.record, lossy.path, "", (), reused=False)
    *_, lossless = run(planned(1 << 34, allow_lossy=True))
    assert not lossless.reused and lossless.record.fingerprint != lossy.record.fingerprint
    *_, again = run(planned(refused.value.needed - 1, allow_lossy=True))
    assert again.reused


def test_what_a_run_needs_is_not_cleaned_away_while_it_is_prepared(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    root = job.recipe.cache.root
    monkeypatch.setattr(job.denoiser, "load", lambda room=None: clean(root, 1))
    *_, finished = run(job)
    assert isinstance(finished, Finished) and finished.record.steps == job.config.steps
    assert clean(root, 1).num_removed > 0


def test_what_changes_the_network_is_judged_by_held_out_pictures_where_there_are_any(job: Job) -> None:
    index = job.recipe.cache
    config = replace(job.config, dynamic_text=True)
    held = replace(index, entries=index.entries[:2], held_out=index.entries[2:])
    told = []
    for cache in (index, held):
        events = run(replace(job, config=config, recipe=replace(job.recipe, cache=cache)))
        told += [event.text for event in events if isinstance(event, Noted)]
    first, unseen = told
    assert "of the first batch" in first and "of a held-out batch" in unseen
