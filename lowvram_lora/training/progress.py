"""What a run has done so far, and what is kept of it when it ends early."""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..adapters import file
from ..adapters.attach import Adapters
from ..adapters.names import partial_path
from ..errors import PathError
from ..memory.meter import Meter
from ..ports import Denoiser
from .metadata import at_step
from .record import RunStore
from .step import NotFiniteError

LOG = logging.getLogger(__name__)

# The first steps vary by themselves.
MIN_STEPS_FOR_ALARM = 3
SLOW_FACTOR = 3.0
FULL_SHARE = 0.97


@dataclass(kw_only=True)
class Progress:
    """The only thing of a run that changes from step to step.

    Attributes:
        last_good: the adapters before the latest update, known to give a usable loss; on the CPU.
        validation: the loss on held-out pictures, by steps done; None once it could not be measured.
        is_updating: the optimizer is at work, so the adapters may be half updated.
    """

    adapters: Adapters
    meter: Meter
    started: float = field(default_factory=time.time)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: dict[int, float] | None = field(default_factory=dict)
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

    def alarm(self) -> str:
        """Return a sentence if the last step was far slower than usual while the card was full; else nothing.

        Drivers move what does not fit into RAM without telling anybody, which shows in this way alone.
        """
        *before, last = self.seconds
        used, total = (self.meter.latest.get(f"card_{name}", 0) for name in ("used", "total"))
        if len(before) < MIN_STEPS_FOR_ALARM or not total or used < FULL_SHARE * total:
            return ""
        usual = statistics.median(before)
        if last < SLOW_FACTOR * usual:
            return ""
        return (
            f"Step {len(self.seconds)} took {last:.1f} s, {last / usual:.0f} times the usual, while the card was full: "
            "its driver may be moving memory to RAM. Lower vram_budget_gb, or close what else uses the card."
        )

    def usable_steps(self, error: BaseException) -> int:
        """Put back the adapters of the last good step if the present ones are not; return the steps they have seen."""
        steps = len(self.losses)
        diverged = isinstance(error, NotFiniteError)
        if self.last_good and (diverged or self.is_updating):
            self._put_back()
            steps -= diverged
        return steps

    def restore(self) -> None:
        """Put the adapters back to where the present step began, if its update has broken off."""
        if self.is_updating:
            self._put_back()
        self.is_updating = False

    def _put_back(self) -> None:
        for kept, parameter in zip(self.last_good, self.adapters.parameters(), strict=True):
            parameter.data.copy_(kept)


def save_partial(
    progress: Progress, path: Path, denoiser: Denoiser, alpha: float, described: dict[str, str], error: BaseException
) -> str:
    """Write what an unfinished run has learned beside ``path``; return a sentence about it.

    Never raises for a file that can't be written: ``error`` is what the user must hear of.
    """
    steps = progress.usable_steps(error)
    if steps < 1:
        return "No usable step was finished, so nothing was saved."
    target = partial_path(path, steps)
    tensors = file.state_dict(progress.adapters.state(), alpha, denoiser.file_name)
    try:
        file.write(target, tensors, at_step(described, progress.started, time.time(), steps, is_partial=True))
    except PathError as failed:
        return f"The weights after step {steps} could not be kept: {failed}"
    return f"The weights after step {steps} are kept in {target}."


def note_memory(store: RunStore, progress: Progress, run: str) -> None:
    """Keep the run's memory record for the Monitor; a full disk here is no reason to end anything."""
    try:
        store.save_memory(progress.meter.record(run))
    except PathError as failed:
        LOG.warning("The memory record was not kept: %s", failed)
