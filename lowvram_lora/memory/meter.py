"""Memory over a run, as counted bytes."""

from collections import Counter

from ..events import MemoryRecord
from ..ports import Hardware

HISTORY_LENGTH = 512


class Meter:
    """Samples memory once a step; a long run keeps every second, fourth, ... sample."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._history: list[dict[str, int]] = []
        self._stride = 1
        self._steps = 0
        self._peak: dict[str, int] = {}
        self._total: Counter[str] = Counter()

    def sample(self) -> None:
        """Measure now."""
        now = self._hardware.sample()
        for name, value in now.items():
            self._peak[name] = max(value, self._peak.get(name, 0))
        self._total.update(now)
        if self._steps % self._stride == 0:
            self._history.append(now)
        self._steps += 1
        if len(self._history) > HISTORY_LENGTH:
            del self._history[1::2]
            self._stride *= 2

    def record(self, run: str) -> MemoryRecord:
        """Return what was measured so far."""
        average = {name: total // max(self._steps, 1) for name, total in self._total.items()}
        return MemoryRecord(
            run=run, steps=self._steps, history=tuple(self._history), peak=dict(self._peak), average=average
        )
