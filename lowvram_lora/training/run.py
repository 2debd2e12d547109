"""A training run as a generator of events: the one seam for progress, cancel and tests.

``next()`` is one step. Closing the generator, an interrupt and an error all leave through the same ``finally``: the
steps done so far are written as a partial file, and the model is as it was.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..adapters import file
from ..adapters.attach import build
from ..adapters.names import numbered
from ..data.lock import Lease
from ..errors import DivergedError, OutOfMemoryError, PathError, UnsupportedModelError
from ..events import Event, Finished, Planning, Record, Saved, Started
from ..memory.meter import Meter
from . import metadata
from .job import Job
from .loop import is_out_of_memory, train
from .precision import resolve
from .preflight import Checked, check
from .prepare import Prepared, budget_problems, device_facts, prepare, room_for
from .progress import Progress, note_memory, save_partial
from .step import NotFiniteError

# Raised when the numbers a run produces change, so that records of older versions are not taken for it.
RESULT_VERSION = 1


def fingerprint(job: Job, precision: str, changes: Sequence[str] = (), asks_memory: bool = False) -> str:
    """Return the digest of everything that decides what the run produces.

    Args:
        changes: what a lossy plan has altered; nothing where everything is as it was asked for.
        asks_memory: the sizes of the batches are not known yet; the settings that decide them stand for them.
    """
    config = job.config
    asked = {"vram_budget_gb": config.vram_budget_gb, "allow_lossy": config.allow_lossy}
    parts = {
        "version": RESULT_VERSION,
        "base": job.denoiser.fingerprint,
        "batches": job.recipe.fingerprint,
        "config": config.determining(),
        "precision": precision,
        **({"changes": list(changes)} if changes else {}),
        **({"asked": asked} if asks_memory else {}),
    }
    return hashlib.sha256(file.as_json(parts).encode()).hexdigest()


def run(job: Job) -> Iterator[Event]:
    """Train, or return the finished run of the same fingerprint.

    Yields:
        ``Planning``, ``Started``, a ``Stepped`` for each step, ``Validated`` now and then where pictures are held out,
        ``Lowered`` where memory ran out, ``Saved``, ``Finished``; only the last two for a run found on disk.

    Raises:
        PreflightError: before step 1, with every problem found.
        BudgetError: before step 1; there is no way to train inside the budget.
        DivergedError: the loss is no longer a number.
        OutOfMemoryError: memory ran out, and no plan takes less.
    """
    # From the first look at the cache on: planning takes minutes, in which another process may clean it.
    lease = Lease(job.recipe.cache.root, job.recipe.cache.file_names())
    try:
        yield from _run(job)
    finally:
        lease.release()


def _run(job: Job) -> Iterator[Event]:
    precision, precision_note = resolve(job.config.precision, job.denoiser)
    # Before the model is loaded: what it holds of the device will be given up.
    device = device_facts(job)
    # What is free differs from one Queue to the next, and the sizes of batches with it: what counts is what was asked.
    asks_memory = job.recipe.asks_memory and device.available is not None
    asked = key = fingerprint(job, precision, asks_memory=asks_memory)
    record = job.store.find(key)
    reused = record is not None
    # A finished run needs nothing any more but a place for its file.
    checked = check(
        job.denoiser,
        job.recipe,
        job.config,
        job.loras_root,
        room=room_for(job.config, device),
        found=budget_problems(job.config, device),
        only_path=reused,
    )
    if record is None:
        if device.available is not None:
            yield Planning()
        prepared = prepare(job, checked.layers, precision, device)
        job = replace(job, recipe=prepared.samples.recipe)
        key = fingerprint(job, precision, prepared.changes)
        record = job.store.find(key)
        reused = record is not None
    if record is None:
        notes = (*job.denoiser.notes(), *([precision_note] if precision_note else []), *prepared.notes)
        record = yield from _train(job, prepared, checked, key, notes)
        _keep(job, partial(job.store.save, record))
    if asks_memory and key != asked:
        _keep(job, partial(job.store.remember, asked, key))
    path = _publish(record, checked.path, job.config.overwrite)
    yield Saved(path=path, steps=record.steps)
    if reused:
        yield _found(job, record, path)
    else:
        yield Finished(record=record, path=path, reused=False, reading=prepared.samples.report())


def _held_out(job: Job) -> str:
    validation = job.recipe.cache.validation
    return validation.fingerprint if validation.entries else ""


def _found(job: Job, record: Record, path: Path) -> Finished:
    """Return the end of a run that was on disk; held-out pictures don't decide what is trained, so they may differ."""
    held_out = _held_out(job)
    if record.held_out == held_out:
        return Finished(record=record, path=path, reused=True)
    others = "Other pictures were held out when this LoRA was trained, so there is no loss on those that are now."
    record = replace(record, validation=(), held_out=held_out)
    return Finished(record=record, path=path, reused=True, reading=(others,) if held_out else ())


def _keep(job: Job, write: Callable[[], None]) -> None:
    """Keep the record; without it the graph trains again when it is queued again, and nothing else is lost."""
    try:
        write()
    except PathError as failed:
        job.say(f"The run's record was not kept, so queueing this graph again will train again. {failed}")


def _publish(record: Record, path: Path, overwrite: bool) -> Path:
    """Write the LoRA where the user wants it; a file that is already this run's is left alone."""
    if overwrite:
        target = path
    else:
        target = next(p for p in numbered(path) if not p.exists() or file.fingerprint_of(p) == record.fingerprint)
    if file.fingerprint_of(target) != record.fingerprint:
        file.write(target, record.lora, record.metadata)
    return target


def _train(
    job: Job, prepared: Prepared, checked: Checked, key: str, notes: tuple[str, ...]
) -> Generator[Event, None, Record]:
    config = prepared.config
    described = metadata.describe(job.denoiser, job.recipe, config, prepared.precision, key, prepared.changes)
    adapters = build(
        checked.layers, config.lora, config.seed, job.denoiser.device, dtype=prepared.setting.adapter_dtype
    )
    progress = Progress(adapters=adapters, meter=Meter(job.hardware))
    num_parameters = sum(p.numel() for p in adapters.parameters())
    yield Started(
        steps=config.steps,
        num_layers=len(checked.layers),
        num_parameters=num_parameters,
        precision=prepared.precision,
        plan=prepared.table,
        notes=notes,
    )
    try:
        yield from train(job, prepared, checked.layers, progress)
    except BaseException as error:
        kept = save_partial(progress, checked.path, job.denoiser, config.lora.alpha, described, error)
        job.say(f"Training stopped early. {kept}")
        _explain(error, len(progress.losses) + 1, kept)
        raise
    finally:
        note_memory(job.store, progress, config.output_name)
    finished = time.time()
    steps = len(progress.losses)
    return Record(
        fingerprint=key,
        steps=steps,
        losses=tuple(progress.losses),
        seconds=sum(progress.seconds),
        precision=prepared.precision,
        num_layers=len(checked.layers),
        num_parameters=num_parameters,
        metadata=metadata.at_step(described, progress.started, finished, steps, is_partial=False),
        memory=progress.meter.record(config.output_name),
        validation=tuple((progress.validation or {}).items()),
        held_out=_held_out(job),
        lora=file.state_dict(adapters.state(), config.lora.alpha, job.denoiser.file_name),
    )


def _explain(error: BaseException, step: int, kept: str) -> None:
    """Raise an error for the user in place of one that only this package or autograd understands."""
    if isinstance(error, NotFiniteError):
        raise DivergedError(step, str(error), kept) from None
    if is_out_of_memory(error):
        raise OutOfMemoryError(step, str(error).splitlines()[0], kept) from error
    # Autograd says this of what patches and wrappers on the MODEL do inside the network.
    undifferentiable = (
        "Inference tensors cannot be saved",
        "modified by an inplace operation",
        "in-place operation",
        "no autograd formula was registered",
    )
    if isinstance(error, RuntimeError) and any(text in str(error) for text in undifferentiable):
        raise UnsupportedModelError(
            f"Something on the MODEL can't be trained through ({str(error).splitlines()[0]}).",
            "Take patches such as FreeU or an image adapter off the MODEL that goes into LoRA Train (low-VRAM).",
        ) from error
