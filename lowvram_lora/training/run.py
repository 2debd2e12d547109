"""A training run as a generator of events: the one seam for progress, cancel and tests.

``next()`` is one step. Closing the generator, an interrupt and an error all leave through the same ``finally``: the
steps done so far are written as a partial file, and the model is as it was.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..adapters import file
from ..adapters.attach import Adapters, adapted_forwards, build
from ..adapters.names import numbered
from ..config import TrainConfig
from ..data.batches import BatchRecipe
from ..data.tiers import TieredCache
from ..errors import DivergedError, PathError, UnsupportedModelError
from ..events import Event, Finished, Record, Saved, Started, Stepped
from ..memory.frozen import BlockMemory, frozen, frozen_forward, matrices, usable_parameters
from ..memory.meter import Meter
from ..memory.recompute import recomputed
from ..ports import Cancel, Denoiser, Hardware
from . import metadata
from .optim import build_optimizer, build_schedule
from .precision import DTYPES, resolve
from .preflight import Checked, check
from .progress import Progress, note_memory, save_partial
from .record import RunStore
from .step import Batches, NotFiniteError, Stepper

LOG = logging.getLogger(__name__)

# Raised when the numbers a run produces change, so that records of older versions are not taken for it.
RESULT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a run needs from outside.

    ``say`` takes a sentence for the user about a run that ends early; an event can't carry it any more then.
    """

    denoiser: Denoiser
    recipe: BatchRecipe
    config: TrainConfig
    hardware: Hardware
    cancel: Cancel
    loras_root: Path
    store: RunStore
    say: Callable[[str], None] = LOG.warning


def fingerprint(job: Job, precision: str) -> str:
    """Return the digest of everything that decides what the run produces."""
    parts = {
        "version": RESULT_VERSION,
        "base": job.denoiser.fingerprint,
        "batches": job.recipe.fingerprint,
        "config": job.config.determining(),
        "precision": precision,
    }
    return hashlib.sha256(file.as_json(parts).encode()).hexdigest()


def run(job: Job) -> Iterator[Event]:
    """Train, or return the finished run of the same fingerprint.

    Yields:
        ``Started``, a ``Stepped`` for each step, ``Saved``, ``Finished``; only the last two for a run found on disk.

    Raises:
        PreflightError: before step 1, with every problem found.
        DivergedError: the loss is no longer a number.
    """
    precision, precision_note = resolve(job.config.precision, job.denoiser)
    key = fingerprint(job, precision)
    record = job.store.find(key)
    reused = record is not None
    # A finished run needs nothing any more but a place for its file.
    checked = check(job.denoiser, job.recipe, job.config, job.loras_root, only_path=reused)
    if record is None:
        notes = (*job.denoiser.notes(), *([precision_note] if precision_note else []))
        record = yield from _train(job, checked, precision, key, notes)
        _keep_record(job, record)
    path = _publish(record, checked.path, job.config.overwrite)
    yield Saved(path=path, steps=record.steps)
    yield Finished(record=record, path=path, reused=reused)


def _keep_record(job: Job, record: Record) -> None:
    """Keep the record; without it the graph trains again when it is queued again, and nothing else is lost."""
    try:
        job.store.save(record)
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
    job: Job, checked: Checked, precision: str, key: str, notes: tuple[str, ...]
) -> Generator[Event, None, Record]:
    described = metadata.describe(job.denoiser, job.recipe, job.config, precision, key)
    adapters = build(checked.layers, job.config.lora, job.config.seed, job.denoiser.device)
    progress = Progress(adapters=adapters, meter=Meter(job.hardware))
    num_parameters = sum(p.numel() for p in adapters.parameters())
    yield Started(
        steps=job.config.steps,
        num_layers=len(checked.layers),
        num_parameters=num_parameters,
        precision=precision,
        notes=notes,
    )
    try:
        with attached(job.denoiser, checked.layers, adapters, DTYPES[precision], job.config.recompute):
            yield from _steps(job, progress, precision)
    except BaseException as error:
        kept = save_partial(progress, checked.path, job.denoiser, job.config.lora.alpha, described, error)
        job.say(f"Training stopped early. {kept}")
        _explain(error, len(progress.losses) + 1, kept)
        raise
    finally:
        note_memory(job.store, progress, job.config.output_name)
    finished = time.time()
    steps = len(progress.losses)
    return Record(
        fingerprint=key,
        steps=steps,
        losses=tuple(progress.losses),
        seconds=finished - progress.started,
        precision=precision,
        num_layers=len(checked.layers),
        num_parameters=num_parameters,
        metadata=metadata.at_step(described, progress.started, finished, steps, is_partial=False),
        memory=progress.meter.record(job.config.output_name),
        lora=file.state_dict(adapters.state(), job.config.lora.alpha, job.denoiser.file_name),
    )


def _explain(error: BaseException, step: int, kept: str) -> None:
    """Raise an error for the user in place of one that only this package or autograd understands."""
    if isinstance(error, NotFiniteError):
        raise DivergedError(step, str(error), kept) from None
    # Autograd says this of what patches and wrappers on the MODEL do inside the network.
    undifferentiable = ("Inference tensors cannot be saved", "modified by an inplace operation", "in-place operation")
    if isinstance(error, RuntimeError) and any(text in str(error) for text in undifferentiable):
        raise UnsupportedModelError(
            f"Something on the MODEL can't be trained through ({str(error).splitlines()[0]}).",
            "Take patches such as FreeU or an image adapter off the MODEL that goes into LoRA Train (low-VRAM).",
        ) from error


@contextmanager
def attached(
    denoiser: Denoiser, layers: dict[str, nn.Module], adapters: Adapters, dtype: torch.dtype, recompute: bool
) -> Iterator[None]:
    """Hold the host's network in a state fit for training; every module is as before on every way out."""
    network, memory = denoiser.network, BlockMemory(denoiser.weights)
    with ExitStack() as undo:
        undo.enter_context(denoiser.training(dtype))
        undo.enter_context(usable_parameters(network, dtype, denoiser.device))
        forwards = {module: frozen_forward(module, memory) for _, module in matrices(network)}
        forwards.update(adapted_forwards(layers, adapters, memory))
        undo.enter_context(frozen(forwards))
        undo.enter_context(frozen(dict(recomputed(network, memory, denoiser.device, layers, wanted=recompute))))
        yield


def _steps(job: Job, progress: Progress, precision: str) -> Iterator[Event]:
    config = job.config
    stepper = _stepper(job, progress.adapters, precision)
    for step in range(config.steps):
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
        yield Stepped(
            step=step + 1,
            steps=config.steps,
            loss=loss,
            learning_rate=learning_rate,
            seconds_per_step=seconds,
            remaining_s=progress.remaining_s(config.steps),
        )


def _stepper(job: Job, adapters: Adapters, precision: str) -> Stepper:
    parameters, config = adapters.parameters(), job.config
    optimizer = build_optimizer(parameters, config.optim)
    return Stepper(
        denoiser=job.denoiser,
        batches=Batches(recipe=job.recipe, cache=TieredCache(job.recipe.cache), seed=config.seed),
        parameters=parameters,
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config.optim, config.steps),
        scaler=torch.amp.GradScaler(job.denoiser.device.type, enabled=precision == "fp16"),
        config=config.optim,
        cancel=job.cancel,
    )
