"""Memory runs out in the middle of a run: the step is repeated one rung down, and no number shows that it happened."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import pytest
import tiny
import torch
from safetensors.torch import load_file

from lowvram_lora.adapters.targets import select
from lowvram_lora.errors import OutOfMemoryError
from lowvram_lora.events import Finished, Lowered, Stepped
from lowvram_lora.memory.frozen import matrices
from lowvram_lora.memory.plan import Plan, make_plan
from lowvram_lora.memory.setting import Setting
from lowvram_lora.training import loop, objective, optim, prepare
from lowvram_lora.training import run as run_module
from lowvram_lora.training.attached import Engine
from lowvram_lora.training.job import Job
from lowvram_lora.training.run import run

FAMILY, STEPS, FAILED = "sd3", 4, 2
KEPT, AGAIN = "joint_blocks.0", "joint_blocks.1"


@pytest.fixture(autouse=True)
def host_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The mode LoRA Train runs its loop in; inputs of blocks are small here, and move to RAM all the same."""
    monkeypatch.setattr(loop, "Engine", partial(Engine, worth_moving_bytes=0))
    with torch.inference_mode(), torch.inference_mode(False), torch.no_grad():
        yield


@pytest.fixture(scope="module")
def denoiser(pack: Any) -> Any:
    return pack.nodes._models.HostDenoiser(tiny.FAMILIES[FAMILY]())


@pytest.fixture(scope="module")
def plan(denoiser: Any, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    job = jobs.on_device(
        jobs.family_job(tmp_path_factory.mktemp("plan"), denoiser, FAMILY), jobs.Device(), available=1 << 40
    )
    device = prepare.device_facts(job)
    with torch.no_grad():
        facts, _ = prepare.facts_of(job, select(denoiser.network, job.config.lora.targets), "fp32", device)
    return make_plan(facts, prepare.wishes_of(job.config, "fp32"), device)


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nAnd more lines.")


class Shortage:
    """Runs out of memory once, at the end of a block's run in the step ``FAILED``."""

    def __init__(self, phase: str, path: str) -> None:
        self._place, self._num = (path, phase), 0

    @contextmanager
    def __call__(self, path: str, phase: str) -> Iterator[None]:
        yield
        self._num += (path, phase) == self._place
        if self._num == FAILED and (path, phase) == self._place:
            raise out_of_memory()


def in_block(phase: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what lets memory run out in a block."""

    def fail(patch: pytest.MonkeyPatch) -> None:
        engine = partial(Engine, worth_moving_bytes=0, observe=Shortage(phase, AGAIN))
        patch.setattr(loop, "Engine", engine)

    return fail


def in_update(patch: pytest.MonkeyPatch) -> None:
    """Let memory run out when half of the parameters are updated."""
    step, calls = optim.PlainAdamW.step, []

    def failing(self: Any, closure: Any = None) -> Any:
        calls.append(self)
        if len(calls) == FAILED:
            parameters = self.param_groups[0]["params"]
            for parameter in parameters[: len(parameters) // 2]:
                parameter.add_(1.0)
            raise out_of_memory()
        return step(self, closure)

    patch.setattr(optim.PlainAdamW, "step", failing)


PLACES = {
    "forward": in_block("forward"),
    "recompute": in_block("recompute"),
    "backward": in_block("backward"),
    "optimizer": in_update,
}


def ring_bytes(denoiser: Any) -> int:
    return jobs.ring(denoiser.network, denoiser.weights)


# From one setting to a lower one, given the ring's bytes and all layers.
RUNGS: dict[str, Callable[[int, frozenset[str]], tuple[Setting, Setting]]] = {
    "residency": lambda ring, layers: (Setting(resident=layers), Setting(ring_bytes=ring)),
    "recompute": lambda ring, layers: (
        Setting(resident=layers, kept=frozenset([KEPT])),
        Setting(resident=layers),
    ),
    "RAM": lambda ring, layers: (
        Setting(ring_bytes=ring),
        Setting(ring_bytes=ring, inputs_in_ram=True, optimizer_in_ram=True),
    ),
    "back from RAM": lambda ring, layers: (
        Setting(resident=layers, inputs_in_ram=True, optimizer_in_ram=True),
        Setting(ring_bytes=ring, keep_convolutions=False),
    ),
    "parts of the batch": lambda ring, layers: (Setting(ring_bytes=ring), Setting(ring_bytes=ring, micro_batch=1)),
}


def job_on(folder: Path, denoiser: Any, device: jobs.Device, **changes: Any) -> Job:
    return jobs.on_device(jobs.family_job(folder, denoiser, FAMILY, steps=STEPS, **changes), device)


def on_rungs(patch: pytest.MonkeyPatch, plan: Plan, first: Setting, *lower: Setting) -> None:
    """Let a run start with one setting and have others below it."""
    made = run_module.prepare
    left = list(lower)

    def prepared(*args: Any) -> Any:
        return replace(made(*args), setting=first, plan=replace(plan, setting=first))

    patch.setattr(run_module, "prepare", prepared)
    patch.setattr(loop, "next_rung", lambda *_: replace(plan, setting=left.pop(0)) if left else None)


def change_without_an_error(patch: pytest.MonkeyPatch, lower: Setting) -> None:
    """Let the step ``FAILED`` and all after it run with ``lower``."""
    steps = loop._steps

    def changing(rig: Any, prepared: Any, setting: Setting) -> Iterator[Any]:
        before = replace(prepared, config=replace(prepared.config, steps=FAILED - 1))
        yield from steps(rig, before, setting)
        yield from steps(rig, prepared, lower)

    patch.setattr(loop, "_steps", changing)


@pytest.mark.parametrize("name", RUNGS)
def test_a_run_that_ran_out_of_memory_equals_one_that_changed_by_itself(
    plan: Plan, denoiser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first, lower = RUNGS[name](ring_bytes(denoiser), frozenset(path for path, _ in matrices(denoiser.network)))
    with monkeypatch.context() as patch:
        on_rungs(patch, plan, first)
        change_without_an_error(patch, lower)
        expected = jobs.finish(job_on(tmp_path / "expected", denoiser, jobs.Device()))
    for place, fail in PLACES.items():
        device = jobs.Device()
        job = job_on(tmp_path / place, denoiser, device)
        with monkeypatch.context() as patch:
            on_rungs(patch, plan, first, lower)
            fail(patch)
            events = list(run(job))
        (lowered,) = (event for event in events if isinstance(event, Lowered))
        assert lowered.step == FAILED
        assert lowered.cause == "CUDA out of memory. Tried to allocate 20.00 MiB."
        assert [event.step for event in events if isinstance(event, Stepped)] == [1, 2, 3, 4]
        found = events[-1]
        assert isinstance(found, Finished)
        assert found.record.losses == expected.record.losses, place
        tensors, wanted = load_file(found.path), load_file(expected.path)
        assert [key for key in wanted if not torch.equal(tensors[key], wanted[key])] == [], place
        assert device.alive == []


def test_a_failed_copy_of_the_optimizers_state_costs_nothing_either(
    plan: Plan, denoiser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Setting(ring_bytes=ring_bytes(denoiser), optimizer_in_ram=True)
    expected, device = losses_of(plan, denoiser, tmp_path, monkeypatch, first), jobs.Device()
    # Once when the run begins, to put the state where it waits.
    from_ram, first_calls, calls = device.from_ram, 1, []

    def failing(kept: Any, room: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(kept)
        if len(calls) == first_calls + FAILED:
            raise out_of_memory()
        return from_ram(kept, room)

    monkeypatch.setattr(device, "from_ram", failing)
    on_rungs(monkeypatch, plan, first, first)
    *events, found = run(job_on(tmp_path / "found", denoiser, device))
    assert isinstance(found, Finished)
    assert [event.step for event in events if isinstance(event, Lowered)] == [FAILED]
    assert found.record.losses == expected


def losses_of(
    plan: Plan, denoiser: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, setting: Setting, **changes: Any
) -> tuple[float, ...]:
    """Return the losses of a run in which nothing goes wrong."""
    with monkeypatch.context() as patch:
        on_rungs(patch, plan, setting)
        return jobs.finish(job_on(folder / "expected", denoiser, jobs.Device(), **changes)).record.losses


@pytest.mark.parametrize("place", ["backward", "optimizer"])
def test_the_scale_of_fp16_survives(
    plan: Plan, denoiser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    setting = Setting(ring_bytes=ring_bytes(denoiser))
    expected = losses_of(plan, denoiser, tmp_path, monkeypatch, setting, precision="fp16")
    on_rungs(monkeypatch, plan, setting, setting)
    PLACES[place](monkeypatch)
    found = jobs.finish(job_on(tmp_path / "found", denoiser, jobs.Device(), precision="fp16"))
    assert found.record.losses == expected


def test_all_memory_of_the_failed_step_is_free_before_the_next_rung(
    plan: Plan, denoiser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, device = Setting(ring_bytes=ring_bytes(denoiser)), jobs.Device()
    draw, drawn, free = objective.draw_noise, [], []

    def watched(*args: Any) -> torch.Tensor:
        noise = draw(*args)
        drawn.append(weakref.ref(noise))
        return noise

    monkeypatch.setattr(objective, "draw_noise", watched)
    on_rungs(monkeypatch, plan, setting, setting)
    PLACES["recompute"](monkeypatch)
    job = job_on(tmp_path, denoiser, device)
    monkeypatch.setattr(job.hardware, "release_cached", lambda: free.append((device.alive.copy(), drawn[-1]())))
    jobs.finish(job)
    assert free == [([], None)]


def test_the_last_rung_keeps_the_lora_and_says_what_to_lower(
    denoiser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down a real ladder, from everything on the device to the least there is."""
    phase, calls = jobs.run_module.Meter.phase, []

    def failing(self: Any, name: str) -> None:
        calls.append(name)
        if name == "optimizer" and calls.count(name) > 1:
            raise out_of_memory()
        phase(self, name)

    monkeypatch.setattr(jobs.run_module.Meter, "phase", failing)
    device, said = jobs.Device(), []
    job = jobs.on_device(jobs.family_job(tmp_path, denoiser, FAMILY, steps=STEPS), device, available=1 << 40)
    settings, place = [], loop.place_state

    def noted(optimizer: Any, setting: Setting, transfers: Any) -> None:
        settings.append(setting)
        place(optimizer, setting, transfers)

    monkeypatch.setattr(loop, "place_state", noted)
    with pytest.raises(OutOfMemoryError, match="Lower resolution on Load Dataset, or rank") as caught:
        jobs.finish(replace(job, say=said.append))
    assert caught.value.step == FAILED
    (partial_file,) = (tmp_path / "loras").glob("*")
    assert partial_file.name == "tiny_partial_step00001.safetensors"
    assert str(partial_file) in caught.value.kept and str(partial_file) in said[0]
    # It holds what the only finished step has learned.
    monkeypatch.undo()
    with torch.inference_mode(False), torch.no_grad():
        one = jobs.on_device(jobs.family_job(tmp_path / "one", denoiser, FAMILY, steps=1), jobs.Device(), 1 << 40)
        wanted = load_file(jobs.finish(one).path)
    tensors = load_file(partial_file)
    assert [key for key in wanted if not torch.equal(tensors[key], wanted[key])] == []
    # The ladder began with everything on the device and ended with the least.
    assert not settings[0].ring_bytes and settings[0].kept
    assert settings[-1].ring_bytes and settings[-1].micro_batch == 1 and settings[-1].optimizer_in_ram
    assert len(settings) > 3
    assert device.alive == []
