"""A training run as a generator of events: the one seam for progress, cancel and tests.

``next()`` is one step. Closing the generator, an interrupt and an error all leave through the same ``finally``: the
steps done so far are written as a partial file, and the model is as it was.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ..adapters import file
from ..adapters.attach import Adapters, adapted_forwards, build
from ..adapters.names import numbered, partial_path
from ..config import TrainConfig
from ..data.batches import BatchRecipe
from ..data.tiers import TieredCache
from ..errors import DivergedError
from ..events import Event, Finished, Record, Saved, Started, Stepped
from ..memory.frozen import BlockMemory, frozen, frozen_forward, matrices, usable_parameters
from ..memory.meter import Meter
from ..memory.recompute import recomputed
from ..ports import Cancel, Denoiser, Hardware
from . import metadata
from .optim import build_optimizer, build_schedule
from .precision import DTYPES, resolve
from .preflight import Checked, check
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
        job.store.save(record)
    path = _publish(record, checked.path, job.config.overwrite)
    yield Saved(path=path, steps=record.steps)
    yield Finished(record=record, path=path, reused=reused)


def _publish(record: Record, path: Path, overwrite: bool) -> Path:
    """Write the LoRA where the user wants it; a file that is already this run's is left alone."""
    if overwrite:
        target = path
    else:
        target = next(p for p in numbered(path) if not p.exists() or file.fingerprint_of(p) == record.fingerprint)
    if file.fingerprint_of(target) != record.fingerprint:
        file.write(target, record.lora, record.metadata)
    return target


@dataclass(kw_only=True)
class _Progress:
    """What a run has done so far; the only thing that changes from step to step."""

    adapters: Adapters
    meter: Meter
    started: float
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    # The adapters before the latest update, known to give a usable loss; CPU.
    last_good: list[Tensor] = field(default_factory=list)
    is_updating: bool = False

    def keep(self) -> None:
        """Copy the adapters, whose loss has just come out usable, to the CPU."""
        parameters = self.adapters.parameters()
        if not self.last_good:
            self.last_good = [torch.empty_like(p, device="cpu", requires_grad=False) for p in parameters]
        for kept, parameter in zip(self.last_good, parameters, strict=True):
            kept.copy_(parameter.detach())

    def remaining_s(self, steps: int) -> float:
        """Return the time left; the first step, which is slower than any other, counts only while it is the only."""
        typical = statistics.fmean(self.seconds[1:] or self.seconds)
        return typical * (steps - len(self.seconds))

    def restore(self) -> None:
        """Put the kept adapters back."""
        for kept, parameter in zip(self.last_good, self.adapters.parameters(), strict=True):
            parameter.data.copy_(kept)


def _train(
    job: Job, checked: Checked, precision: str, key: str, notes: tuple[str, ...]
) -> Generator[Event, None, Record]:
    described = metadata.describe(job.denoiser, job.recipe, job.config, precision, key)
    adapters = build(checked.layers, job.config.lora, job.config.seed, job.denoiser.device)
    progress = _Progress(adapters=adapters, meter=Meter(job.hardware), started=time.time())
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
        kept = _save_partial(job, checked, progress, described, error)
        job.say(f"Training stopped early. {kept}")
        if isinstance(error, NotFiniteError):
            raise DivergedError(len(progress.losses) + 1, error.loss, kept) from None
        raise
    finally:
        job.store.save_memory(progress.meter.record(job.config.output_name))
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


def _steps(job: Job, progress: _Progress, precision: str) -> Iterator[Event]:
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


def _save_partial(
    job: Job, checked: Checked, progress: _Progress, described: dict[str, str], error: BaseException
) -> str:
    """Write what an unfinished run has learned; return a sentence about it."""
    steps = len(progress.losses)
    diverged = isinstance(error, NotFiniteError)
    if progress.last_good and (diverged or progress.is_updating):
        progress.restore()
        steps -= diverged
    if steps < 1:
        return "No usable step was finished, so nothing was saved."
    path = partial_path(checked.path, steps)
    tensors = file.state_dict(progress.adapters.state(), job.config.lora.alpha, job.denoiser.file_name)
    file.write(path, tensors, metadata.at_step(described, progress.started, time.time(), steps, is_partial=True))
    return f"The weights after step {steps} are kept in {path}."
