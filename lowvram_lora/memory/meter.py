"""Memory over a run, as counted bytes."""

from collections import Counter
from contextlib import AbstractContextManager
from typing import Protocol

from ..events import MemoryRecord
from ..ports import Hardware

HISTORY_LENGTH = 512
PHASES = ("forward", "backward", "optimizer")


class Watch(Protocol):
    """Whoever wants to know where a step is."""

    def phase(self, name: str) -> None:
        """Learn that the step enters ``name``: one of ``PHASES``, or what comes between steps; empty for nothing."""
        ...


class Observe(Protocol):
    """What is entered around each run of a block."""

    def __call__(self, path: str, phase: str) -> AbstractContextManager[None]: ...


class Meter:
    """Samples memory in each phase of each step; a long run keeps every second, fourth, ... step.

    Attributes:
        latest: the largest counts of the last whole step.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._history: list[dict[str, int]] = []
        self._stride = 1
        self._steps = 0
        self._peak: dict[str, int] = {}
        self._phases: dict[str, dict[str, int]] = {}
        self._step: dict[str, int] = {}
        self._phase = ""
        self.latest: dict[str, int] = {}
        self._total: Counter[str] = Counter()

    def phase(self, name: str) -> None:
        """Measure what the phase before ``name`` used; what was before the first is no part of the run."""
        now = self._hardware.sample()
        is_before_all = bool(name) and not self._phase and not self._steps
        if not is_before_all:
            _raise_to(self._step, now)
        if self._phase:
            _raise_to(self._phases.setdefault(self._phase, {}), now)
        self._phase = name

    def sample(self) -> None:
        """Measure the last phase of a step; the step is over."""
        self.phase("")
        step, self._step = self._step, {}
        self.latest = step
        _raise_to(self._peak, step)
        self._total.update(step)
        if self._steps % self._stride == 0:
            self._history.append(step)
        self._steps += 1
        if len(self._history) > HISTORY_LENGTH:
            del self._history[1::2]
            self._stride *= 2

    def record(self, run: str) -> MemoryRecord:
        """Return what was measured so far."""
        average = {name: total // max(self._steps, 1) for name, total in self._total.items()}
        return MemoryRecord(
            run=run,
            steps=self._steps,
            history=tuple(self._history),
            peak=dict(self._peak),
            average=average,
            phases={name: dict(counts) for name, counts in self._phases.items()},
        )


def _raise_to(peak: dict[str, int], now: dict[str, int]) -> None:
    for name, value in now.items():
        peak[name] = max(value, peak.get(name, 0))
