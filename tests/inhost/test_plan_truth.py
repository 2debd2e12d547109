"""A plan is true: it needs what it says, it fits where it says, and what is refused would not fit."""

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
from lowvram_lora.errors import BudgetError, LowVramLoraError
from lowvram_lora.events import Finished, Planning, Started
from lowvram_lora.memory import recompute
from lowvram_lora.memory.facts import Facts
from lowvram_lora.memory.footprint import footprint
from lowvram_lora.memory.frozen import matrices
from lowvram_lora.memory.lossy import Change
from lowvram_lora.memory.pace import ring_sizes
from lowvram_lora.memory.refusal import changed_space
from lowvram_lora.memory.setting import Setting
from lowvram_lora.training import estimate, prepare
from lowvram_lora.training.job import Job
from lowvram_lora.training.run import run
from lowvram_lora.units import GIB

# The worst found is 3 % (tiny networks, where small tensors weigh most).
TOO_MUCH = 1.05


@pytest.fixture(autouse=True)
def host_mode() -> Iterator[None]:
    """The mode LoRA Train runs its loop in."""
    with torch.inference_mode(), torch.inference_mode(False), torch.no_grad():
        yield


@pytest.fixture(scope="module")
def known() -> dict[Any, Any]:
    """What was measured of the jobs of this file, which differ in their budget alone."""
    return {}


@pytest.fixture(autouse=True)
def measured_once(known: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    measured = prepare.measured

    def once(simulators: dict[int, Any], passes: int, *_: Any) -> Any:
        one = simulators[1]
        key = (one.denoiser, one.config.lora, one.dtype, one.samples.latent_scale, tuple(simulators), passes)
        if key not in known:
            known[key] = measured(simulators, passes)
        return known[key]

    monkeypatch.setattr(prepare, "measured", once)


@pytest.fixture(scope="module")
def denoisers(pack: Any) -> dict[str, Any]:
    return {family: pack.nodes._models.HostDenoiser(tiny.FAMILIES[family]()) for family in ("sd15", "sd3", "flux")}


def job_of(denoisers: dict[str, Any], folder: Path, family: str, available: int = 1 << 40, **changes: Any) -> Job:
    denoiser = denoisers[family]
    return jobs.on_device(jobs.family_job(folder, denoiser, family, **changes), jobs.Device(), available)


def with_available(job: Job, available: int, **changes: Any) -> Job:
    """Return ``job`` on another device."""
    return replace(jobs.on_device(job, jobs.Device(), available), config=replace(job.config, **changes))


def layers_of(job: Job) -> dict[str, Any]:
    return select(job.denoiser.network, job.config.lora.targets)


def prepared(job: Job) -> prepare.Prepared:
    return prepare.prepare(job, layers_of(job), "fp32", prepare.device_facts(job))


def settings_of(facts: Facts) -> dict[str, Setting]:
    small = ring_sizes(facts.layers)[0]
    every = frozenset(layer.path for layer in facts.layers)
    keepable = frozenset(b.path for b in facts.steps[facts.batch_size].blocks if not b.writes_in_place)
    in_parts = frozenset(b.path for b in facts.steps[facts.batch_size].blocks if b.in_parts)
    some = frozenset(sorted(keepable)[::2])
    least = Setting(ring_bytes=small, micro_batch=1, inputs_in_ram=True, optimizer_in_ram=True, keep_convolutions=False)
    return {
        "smallest ring": Setting(ring_bytes=small),
        "resident, nothing again": Setting(resident=every, kept=keepable),
        "a half of all": Setting(resident=frozenset(sorted(every)[::2]), kept=some, ring_bytes=small),
        "least": least,
        "feed-forwards in parts": replace(least, chunked=in_parts, ring_bytes=max(small, facts.parts_ring_bytes)),
    }


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_a_setting_takes_what_its_footprint_says(denoisers: dict[str, Any], tmp_path: Path, family: str) -> None:
    job = job_of(denoisers, tmp_path, family)
    made = prepared(job)
    assert made.plan is not None
    for name, setting in settings_of(made.plan.facts).items():
        foreseen = footprint(made.plan.facts, setting).peak
        peak = prepare.simulated(job, layers_of(job), replace(made, setting=setting)).counter.peak
        assert peak <= foreseen <= TOO_MUCH * peak, name


def smallest_budget(job: Job) -> int:
    """Return the least bytes that the job fits into."""
    made = prepared(job)
    assert made.plan is not None
    return changed_space(made.plan.facts, Change(), made.wishes, made.device).smallest(made.device.ram)


def test_a_plan_for_any_budget_stays_inside_it(denoisers: dict[str, Any], tmp_path: Path) -> None:
    job = job_of(denoisers, tmp_path, "sd3")
    least, seconds = smallest_budget(job), []
    for spare in (0, 300_000, 2_000_000, 1 << 30):
        tight = with_available(job, least + spare)
        made = prepared(tight)
        assert made.plan is not None
        peak = prepare.simulated(tight, layers_of(tight), made).counter.peak
        assert peak <= made.plan.peak_bytes
        assert peak + made.plan.footprint.margin <= least + spare
        seconds.append(made.plan.pace.seconds)
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]


def test_a_lossy_plan_stays_inside_its_budget(denoisers: dict[str, Any], tmp_path: Path) -> None:
    job = job_of(denoisers, tmp_path, "flux")
    budget = smallest_budget(job) - 1
    tight = with_available(job, budget, allow_lossy=True)
    made = prepared(tight)
    assert made.plan is not None and made.changes
    peak = prepare.simulated(tight, layers_of(tight), made).counter.peak
    assert peak + made.plan.footprint.margin <= budget


def test_the_smallest_budget_of_a_refusal_trains_and_a_byte_less_does_not(
    denoisers: dict[str, Any], tmp_path: Path
) -> None:
    job = job_of(denoisers, tmp_path, "flux", steps=2)
    with pytest.raises(BudgetError, match=r"the smallest budget in which this job fits is 0\.10 GiB") as caught:
        jobs.finish(with_available(job, 1))
    needed = caught.value.needed
    assert needed is not None
    with pytest.raises(BudgetError):
        jobs.finish(with_available(job, needed - 1))
    least = with_available(job, needed)
    first, started, *_, last = run(least)
    assert isinstance(first, Planning) and isinstance(started, Started) and isinstance(last, Finished)
    assert f"{needed / GIB:.2f}" in started.plan
    # Whole batches on a host without a device.
    plain = jobs.finish(replace(job, hardware=jobs.FakeHardware(), transfers=lambda _: None, store=other(job)))
    assert last.record.losses == pytest.approx(plain.record.losses, rel=1e-5)


def other(job: Job) -> Any:
    """Return a store that knows no finished run."""
    return replace(job.store, root=job.store.root / "other")


def test_a_budget_below_the_smallest_plan_is_refused_with_the_smallest(
    denoisers: dict[str, Any], tmp_path: Path
) -> None:
    job = with_available(job_of(denoisers, tmp_path, "flux"), 1 << 40, vram_budget_gb=0.05)
    with pytest.raises(BudgetError, match=r"vram_budget_gb is 0.05; .* Set vram_budget_gb to 0.10 or more\."):
        jobs.finish(job)
    assert jobs.finish(with_available(job, 1 << 40, vram_budget_gb=0.1)).record.steps == 3


def test_a_budget_larger_than_the_card_is_refused(denoisers: dict[str, Any], tmp_path: Path) -> None:
    job = job_of(denoisers, tmp_path, "flux", vram_budget_gb=2000.0)
    with pytest.raises(LowVramLoraError, match=r"vram_budget_gb is 2000, but the card has 1024\.00 GiB"):
        jobs.finish(job)


def test_a_host_that_computes_in_ram_ignores_the_budget_and_says_so(denoisers: dict[str, Any], tmp_path: Path) -> None:
    first = next(run(jobs.family_job(tmp_path, denoisers["flux"], "flux", vram_budget_gb=0.05)))
    assert isinstance(first, Started)
    assert first.plan == ""
    assert first.notes == (
        "This ComfyUI computes in RAM, so there is no VRAM to plan. vram_budget_gb = 0.05 is ignored.",
    )


def test_a_model_whose_blocks_are_not_recognised_trains_layer_by_layer(
    denoisers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(denoisers, tmp_path, "sd3", batch_size=1, steps=2)
    expected = jobs.finish(replace(job, store=other(job))).record.losses
    monkeypatch.setattr(prepare, "measured", estimate.measured)
    for module in (recompute, estimate, prepare):
        monkeypatch.setattr(module, "find_blocks", lambda network: {})
    tight = with_available(job, 67 << 20)
    assert jobs.finish(tight).record.losses == pytest.approx(expected, rel=1e-5)
    device = tight.transfers(0)
    assert isinstance(device, jobs.Device)
    assert device.num_copies > len(list(matrices(job.denoiser.network)))


@pytest.mark.parametrize("kind", ["a LoRA on the MODEL", "a weight function"])
def test_what_is_on_the_model_goes_through_the_ring_too(
    pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from test_weights import left_in_ram, lora_for

    model, models = tiny.sd15(), pack.nodes._models
    plain = jobs.finish(jobs.family_job(tmp_path / "plain", models.HostDenoiser(model), "sd15", steps=2)).record
    if kind == "a LoRA on the MODEL":
        with torch.inference_mode():
            model = models.with_lora(model, lora_for(model, pack))
    denoiser = models.HostDenoiser(model)
    # As on a card: the weights stay in RAM, and what acts on them waits beside them.
    monkeypatch.setattr(denoiser, "load", lambda room=None: setattr(denoiser, "_is_loaded", True))
    if kind == "a LoRA on the MODEL":
        left_in_ram(model)
    else:
        for _, layer in matrices(denoiser.network):
            layer.weight_function = [lambda weight: weight * 0.9]
    off = jobs.finish(jobs.family_job(tmp_path / "off", denoiser, "sd15", steps=2)).record
    for name, resident in {"streamed": 0, "half": 2, "resident": 1}.items():
        paths = sorted(path for path, _ in matrices(denoiser.network))
        setting = Setting(
            ring_bytes=jobs.ring(denoiser.network, denoiser.weights),
            resident=frozenset(paths[::resident] if resident else ()),
        )
        with monkeypatch.context() as patch:
            jobs.forced(patch, setting)
            on = jobs.finish(jobs.on_device(jobs.family_job(tmp_path / name, denoiser, "sd15", steps=2), jobs.Device()))
        assert on.record.losses == off.losses, name
        assert all(torch.equal(on.record.lora[key], tensor) for key, tensor in off.lora.items())
    assert off.losses != plain.losses
