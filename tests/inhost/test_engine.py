"""Runs on a device that RAM plays: where weights, inputs and state wait changes no bit, and nothing is left."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import jobs
import pytest
import tiny
import torch
from safetensors.torch import load_file

from lowvram_lora.adapters.attach import build
from lowvram_lora.adapters.targets import select
from lowvram_lora.events import Started, Stepped
from lowvram_lora.memory.footprint import num_passes
from lowvram_lora.memory.frozen import matrices
from lowvram_lora.memory.meter import Meter
from lowvram_lora.memory.setting import Setting
from lowvram_lora.training import loop, unseen
from lowvram_lora.training import run as run_module
from lowvram_lora.training.attached import Engine, attached
from lowvram_lora.training.estimate import payload_bytes
from lowvram_lora.training.optim import build_optimizer, build_schedule
from lowvram_lora.training.prepare import Prepared, samples_of
from lowvram_lora.training.run import run
from lowvram_lora.training.step import Stepper

STEPS = 10


@pytest.fixture(autouse=True)
def host_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The mode LoRA Train runs its loop in; inputs of blocks are small here, and move to RAM all the same."""
    monkeypatch.setattr(loop, "Engine", partial(Engine, worth_moving_bytes=0))
    with torch.inference_mode(), torch.inference_mode(False), torch.no_grad():
        yield


def denoiser_of(pack: Any, family: str) -> Any:
    return pack.nodes._models.HostDenoiser(tiny.FAMILIES[family]())


def streamed(denoiser: Any, num: float = 2) -> Setting:
    return Setting(ring_bytes=jobs.ring(denoiser.network, denoiser.weights, num))


def every_layer(denoiser: Any) -> frozenset[str]:
    return frozenset(path for path, _ in matrices(denoiser.network))


# bf16 makes a new weight for each use, fp32 uses what is in the ring.
@pytest.mark.parametrize(
    ("family", "precision"), [*((family, "fp32") for family in tiny.FAMILIES), ("sd3", "bf16"), ("flux", "fp16")]
)
def test_losses_are_the_same_with_streaming_on_and_off(
    pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, precision: Any
) -> None:
    """h08. A base model in RAM and adapters on the device meet in every layer."""
    denoiser, device = denoiser_of(pack, family), jobs.Device()
    job = jobs.family_job(tmp_path / "off", denoiser, family, batch_size=1, steps=STEPS, precision=precision)
    off = jobs.finish(job).record
    jobs.forced(monkeypatch, streamed(denoiser))
    job = jobs.family_job(tmp_path / "on", denoiser, family, batch_size=1, steps=STEPS, precision=precision)
    on = jobs.finish(jobs.on_device(job, device)).record
    assert on.losses == off.losses
    assert len(set(on.losses)) == STEPS
    assert all(torch.equal(on.lora[key], tensor) for key, tensor in off.lora.items())
    assert device.num_copies > STEPS * len(every_layer(denoiser))


def test_where_things_wait_changes_no_bit_of_the_file(
    pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    denoiser = denoiser_of(pack, "sd15")
    nothing, everything = streamed(denoiser), Setting(resident=every_layer(denoiser))
    settings = {
        "nothing resident": nothing,
        "everything resident": everything,
        "a half resident": replace(streamed(denoiser, 16), resident=frozenset(sorted(every_layer(denoiser))[::2])),
        "inputs in RAM": replace(everything, inputs_in_ram=True),
        "state in RAM": replace(everything, optimizer_in_ram=True),
        "all of it": replace(nothing, inputs_in_ram=True, optimizer_in_ram=True, keep_convolutions=False),
    }
    files, to_ram = {}, {}
    for name, setting in settings.items():
        with monkeypatch.context() as patch:
            jobs.forced(patch, setting)
            job = jobs.family_job(tmp_path / name, denoiser, "sd15", batch_size=1, steps=3)
            device = jobs.Device()
            files[name] = load_file(jobs.finish(jobs.on_device(job, device)).path)
            to_ram[name] = device.num_to_ram
    first = files.pop("nothing resident")
    assert any(tensor.any() for key, tensor in first.items() if "lora_up" in key)
    for name, tensors in files.items():
        assert tensors.keys() == first.keys()
        assert [key for key, tensor in first.items() if not torch.equal(tensor, tensors[key])] == [], name
    assert [name for name, number in to_ram.items() if number] == ["inputs in RAM", "state in RAM", "all of it"]


def gradients(job: Any, setting: Setting, transfers: Any) -> tuple[float, list[torch.Tensor]]:
    """Return loss and gradients of a step in float64, adapters as well."""
    denoiser = job.denoiser
    layers = select(denoiser.network, "all linear")
    adapters = build(layers, job.config.lora, 0, tiny.CPU, torch.float64)
    generator = torch.Generator().manual_seed(3)
    for parameter in adapters.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
    optimizer = build_optimizer(adapters.parameters(), job.config.optim)
    with ExitStack() as undo:
        engine = Engine(setting=setting, transfers=transfers)
        engaged = undo.enter_context(attached(denoiser, layers, adapters, torch.float64, engine))
        stepper = Stepper(
            denoiser=denoiser,
            batches=samples_of(job),
            parameters=adapters.parameters(),
            optimizer=optimizer,
            schedule=build_schedule(optimizer, job.config.optim, 1),
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            config=job.config.optim,
            cancel=job.cancel,
            watch=Meter(job.hardware),
            begin=engaged.begin,
            micro_batch=setting.micro_batch,
        )
        loss, _ = stepper.gradients(0)
        return loss, [parameter.grad for parameter in adapters.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_a_batch_in_parts_has_the_gradients_of_the_whole(pack: Any, tmp_path: Path, family: str) -> None:
    denoiser = denoiser_of(pack, family)
    job = jobs.family_job(tmp_path, denoiser, family, batch_size=2)
    loss, whole = gradients(job, Setting(), None)
    split = replace(streamed(denoiser), micro_batch=1)
    loss_in_parts, in_parts = gradients(job, split, jobs.Device())
    assert loss_in_parts == pytest.approx(loss, rel=1e-6)  # a float32 number
    assert len(in_parts) == len(whole) > 20
    for one, other in zip(in_parts, whole, strict=True):
        assert (one - other).norm() <= 1e-9 * other.norm()
        assert not torch.equal(one, other) or not other.any()


def planned(monkeypatch: pytest.MonkeyPatch) -> list[Prepared]:
    """Return a list that takes up how each run from now on is to go."""
    made: list[Prepared] = []
    prepare = run_module.prepare
    monkeypatch.setattr(run_module, "prepare", lambda *args: made.append(prepare(*args)) or made[-1])
    return made


@pytest.mark.parametrize(
    ("family", "available", "batch_size", "accumulation"), [("sd15", 77 << 20, 1, 1), ("flux", 67 << 20, 2, 2)]
)
def test_copies_and_bytes_of_each_step_are_what_the_plan_says(
    pack: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    available: int,
    batch_size: int,
    accumulation: int,
) -> None:
    denoiser, device, made = denoiser_of(pack, family), jobs.Device(), planned(monkeypatch)
    job = jobs.family_job(tmp_path, denoiser, family, batch_size=batch_size, steps=4)
    job = replace(job, config=replace(job.config, optim=replace(job.config.optim, accumulation=accumulation)))
    counts = []
    for event in run(jobs.on_device(job, device, available)):
        if isinstance(event, Started):
            counts.append((0, 0))
        if isinstance(event, Stepped):
            counts.append((device.num_copies, device.num_bytes))
    (prepared,) = made
    assert prepared.plan is not None
    ring_bytes, passes = prepared.setting.ring_bytes, num_passes(prepared.plan.facts, prepared.setting.micro_batch)
    # Nothing is taken but the ring and the memory of what is resident.
    assert ring_bytes > 0 and ring_bytes in device.given and len(device.given) <= 2
    # What is resident is copied before the first pass.
    stored = [denoiser.weights.payload(denoiser.network.get_submodule(path)) for path in prepared.setting.resident]
    foreseen = [(len(stored), sum(tensor.nbytes for payload in stored for tensor in payload)), *prepared.copies]
    total = list(zip(*(accumulate(numbers) for numbers in zip(*foreseen, strict=True)), strict=True))
    num_steps = len(prepared.copies) // passes
    assert num_steps >= 1
    assert counts[1 : num_steps + 1] == total[passes::passes]
    assert prepared.plan.pace.copied_bytes == passes * prepared.copies[-1][1]


def test_a_run_gives_its_device_and_the_network_back(
    pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_run import host_state

    denoiser, device = denoiser_of(pack, "sd3"), jobs.Device()
    with denoiser.training(torch.float32):
        pass
    before = host_state(denoiser._patcher)
    payloads = {path: denoiser.weights.payload(module) for path, module in matrices(denoiser.network)}
    resident = frozenset(sorted(payloads)[::3])
    setting = replace(streamed(denoiser), resident=resident, inputs_in_ram=True, optimizer_in_ram=True)
    jobs.forced(monkeypatch, setting)
    events = run(jobs.on_device(jobs.family_job(tmp_path, denoiser, "sd3", steps=3), device))
    next(event for event in events if isinstance(event, Stepped))
    stored = sum(payload_bytes(payloads[path]) for path in resident)
    assert sorted(device.given) == sorted([setting.ring_bytes, stored])
    assert sorted(device.alive) == sorted(device.given)
    assert host_state(denoiser._patcher) != before
    del events
    gc.collect()
    assert device.alive == []
    assert device.is_closed
    assert host_state(denoiser._patcher) == before


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_a_look_at_held_out_pictures_in_between_changes_no_bit(
    pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(unseen, "LEAST_APART", 2)
    monkeypatch.setattr(unseen, "NUM_DRAWS", 2)
    denoiser = denoiser_of(pack, family)
    jobs.forced(monkeypatch, replace(streamed(denoiser), inputs_in_ram=True, optimizer_in_ram=True))
    finished = []
    for has_held_out in (False, True):
        job = jobs.family_job(tmp_path / str(has_held_out), denoiser, family, batch_size=1, steps=STEPS)
        index = jobs.family_cache(tmp_path / str(has_held_out) / "cache", family, 3)
        parted = replace(index, entries=index.entries[:2], held_out=index.entries[2:] if has_held_out else ())
        job = replace(job, recipe=replace(job.recipe, cache=parted))
        finished.append(jobs.finish(jobs.on_device(job, jobs.Device())).record)
    off, on = finished
    assert on.losses == off.losses and all(torch.equal(on.lora[key], tensor) for key, tensor in off.lora.items())
    assert [done for done, _ in on.validation] == [0, 2, 4, 6, 8, STEPS] and not off.validation
    assert len({loss for _, loss in on.validation}) == 6
