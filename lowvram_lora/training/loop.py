"""The steps of a run, on the rung of the ladder that memory allows."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..data.batches import BatchRecipe
from ..data.tiers import TieredCache
from ..errors import CacheMissError, PathError
from ..events import Event, Lowered, Noted, Stepped, Validated
from ..memory.ladder import next_rung
from ..memory.setting import Setting
from ..memory.table import describe_plan
from ..ports import Transfers
from .altered import as_configured, differences
from .attached import Engine, attached
from .job import Job
from .optim import Optimizer, build_optimizer, build_schedule, place_state
from .precision import DTYPES
from .prepare import Prepared
from .progress import Progress
from .step import Batches, Stepper
from .unseen import Unseen, is_due

# What drivers and libraries say when device memory is gone; torch has a class for its own allocator alone.
_SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@dataclass(frozen=True, kw_only=True)
class _Rig:
    """What lasts from rung to rung.

    Attributes:
        held_out: pictures that are not trained on; None where there are none.
        tells: before its first step, measure how far the settings lead away from the network's own function.
    """

    job: Job
    layers: dict[str, nn.Module]
    progress: Progress
    transfers: Transfers | None
    optimizer: Optimizer
    stepper: Stepper
    held_out: Batches | None
    tells: bool = True


def train(job: Job, prepared: Prepared, layers: dict[str, nn.Module], progress: Progress) -> Iterator[Event]:
    """Run all steps; where memory runs out, repeat the step one rung further down.

    Every step depends on the seed and its number alone, so a repeated one draws the same batch, noise and sigmas.

    Raises:
        torch.OutOfMemoryError: on the last rung.
    """
    with ExitStack() as undo:
        undo.enter_context(closing(prepared.samples))
        if prepared.budget is not None:
            # The adapters are part of the plan, and there already.
            adapter_bytes = sum(parameter.nbytes for parameter in progress.adapters.parameters())
            undo.enter_context(job.hardware.capped(prepared.budget - adapter_bytes))
        transfers = job.transfers(prepared.setting.staging_bytes)
        if transfers is not None:
            undo.enter_context(closing(transfers))
        setting, plan = prepared.setting, prepared.plan
        rig: _Rig | None = None
        while True:
            try:
                rig = rig or _rig(job, replace(prepared, setting=setting), layers, progress, transfers)
                yield from _steps(rig, prepared, setting)
                return
            except (torch.OutOfMemoryError, RuntimeError) as error:
                lower = plan and next_rung(plan, prepared.wishes, prepared.device) if is_out_of_memory(error) else None
                if lower is None:
                    raise
                cause = str(error).splitlines()[0]
            # Only here the failed step's tensors are gone: the error held them.
            plan, setting = lower, lower.setting
            rig = rig and _unbroken(rig)
            progress.restore()
            gc.collect()
            job.hardware.release_cached()
            yield Lowered(step=len(progress.losses) + 1, cause=cause, plan=describe_plan(plan))


def _unbroken(rig: _Rig) -> _Rig:
    """Return ``rig`` for another rung: its scaler at its present scale, without what a step that broke off has left
    in it; what there is to tell has been told."""
    scaler = rig.stepper.scaler
    fresh = torch.amp.GradScaler(rig.job.denoiser.device.type, enabled=scaler.is_enabled())
    fresh.load_state_dict(scaler.state_dict())
    return replace(rig, stepper=replace(rig.stepper, scaler=fresh), tells=False)


def _steps(rig: _Rig, prepared: Prepared, setting: Setting) -> Iterator[Event]:
    """Run the steps that are left with ``setting``."""
    job, progress, config = rig.job, rig.progress, prepared.config
    place_state(rig.optimizer, setting, rig.transfers)
    engine = Engine(setting=setting, transfers=rig.transfers, writes_in_place=prepared.writes_in_place)
    dtype = DTYPES[prepared.precision]
    with attached(job.denoiser, rig.layers, progress.adapters, dtype, engine) as engaged:
        stepper = replace(rig.stepper, begin=engaged.begin, micro_batch=setting.micro_batch)
        if rig.tells:
            yield from _notes(job, stepper, rig.held_out)
        yield from _validated(job, stepper, progress, config.steps, rig.held_out)
        for step in range(len(progress.losses), config.steps):
            yield _one(job, stepper, progress, step, config.steps)
            yield from _validated(job, stepper, progress, config.steps, rig.held_out)


def _held_out(job: Job, samples: Batches) -> Batches | None:
    """Return what is not trained on. It is looked at seldom, so none of it waits in RAM."""
    index = replace(job.recipe.cache.validation, ram_cache_bytes=0, predictive=False)
    if not index.entries:
        return None
    config = replace(job.recipe.config, strategy="ordered", adaptive_batch=False)
    return replace(samples, recipe=BatchRecipe(index, config), cache=TieredCache(index, samples.seed))


def _notes(job: Job, stepper: Stepper, held_out: Batches | None) -> Iterator[Noted]:
    samples, where = (stepper.batches, "the first batch") if held_out is None else (held_out, "a held-out batch")
    try:
        for text in differences(job.denoiser, job.config, samples, stepper.begin, where):
            yield Noted(text)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        cause = _cause(error)
    else:
        return
    _let_go(job)
    yield Noted(
        "By how much the settings change the network's function could not be measured: without them it needs more "
        f"memory than there is ({cause})."
    )


def _validated(
    job: Job, stepper: Stepper, progress: Progress, steps: int, held_out: Batches | None
) -> Iterator[Validated | Noted]:
    """Measure the loss on what is held out, where the run is at a point for it."""
    done, found = len(progress.losses), progress.validation
    if held_out is None or found is None or done in found or not is_due(done, steps):
        return
    unseen = Unseen(
        denoiser=stepper.denoiser,
        samples=held_out,
        num_entries=len(held_out.recipe.cache.entries),
        cancel=job.cancel,
        watch=stepper.watch,
        begin=stepper.begin,
    )
    try:
        found[done] = unseen.loss()
    except (CacheMissError, PathError) as error:
        # What is only looked at must not cost what was learned.
        cause = str(error)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        cause = f"it needs more memory than there is ({_cause(error)})."
    else:
        yield Validated(done=done, steps=steps, loss=found[done])
        return
    progress.validation = None
    _let_go(job)
    yield Noted(f"From step {done + 1} on, the loss on held-out pictures is not measured: {cause}")


def _cause(error: RuntimeError) -> str:
    """Return what the device said; raise ``error`` if it is about anything but memory."""
    if not is_out_of_memory(error):
        raise error
    return str(error).splitlines()[0]


def _let_go(job: Job) -> None:
    gc.collect()
    job.hardware.release_cached()


def _one(job: Job, stepper: Stepper, progress: Progress, step: int, steps: int) -> Stepped:
    began = time.perf_counter()
    job.cancel.check()
    loss, norm = stepper.gradients(step)
    progress.keep()
    progress.is_updating = True
    learning_rate = stepper.update(norm)
    progress.is_updating = False
    progress.losses.append(loss)
    progress.meter.sample()
    seconds = time.perf_counter() - began
    progress.seconds.append(seconds)
    return Stepped(
        step=step + 1,
        steps=steps,
        loss=loss,
        learning_rate=learning_rate,
        seconds_per_step=seconds,
        remaining_s=progress.remaining_s(steps),
        alarm=progress.alarm(),
    )


def _rig(
    job: Job,
    prepared: Prepared,
    layers: dict[str, nn.Module],
    progress: Progress,
    transfers: Transfers | None,
) -> _Rig:
    parameters, config = progress.adapters.parameters(), prepared.config
    optimizer = build_optimizer(parameters, config.optim, prepared.setting, seed=config.seed, transfers=transfers)
    stepper = Stepper(
        denoiser=as_configured(job.denoiser, config),
        batches=prepared.samples,
        parameters=parameters,
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config.optim, config.steps),
        scaler=torch.amp.GradScaler(job.denoiser.device.type, enabled=prepared.precision == "fp16"),
        config=config.optim,
        cancel=job.cancel,
        watch=progress.meter,
        begin=lambda: None,
    )
    return _Rig(
        job=job,
        layers=layers,
        progress=progress,
        transfers=transfers,
        optimizer=optimizer,
        stepper=stepper,
        held_out=_held_out(job, prepared.samples),
    )
