"""At what precision a sample is read: by its score and by how far the run is.

Early in a run, the network learns what is coarse, so simple samples are read at less precision; at its end, all are
read in full.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..config import require
from .precision import LatentPrecision


@dataclass(frozen=True, kw_only=True)
class PrecisionSchedule:
    """Thresholds of dynamic precision. A sample whose score is a threshold is not below it.

    The run has three parts: the first fifth, the middle, and the last fifth, which is full for every sample. Full
    precision above some score in all of the run: set ``middle_bands_below`` to it, and the others no higher.

    Attributes:
        early_until: share of the run's steps at which its first part ends, 0 to 1.
        late_from: share at which the last part starts, ``early_until`` to 1; at 1 there is no last part.
        early_half_below: in the first part, samples scored below this are read at half precision, others in full.
        middle_half_below: in the middle, samples scored below this are read at half precision.
        middle_bands_below: in the middle, other samples scored below this are read as bands, the rest in full.
    """

    early_until: float = 0.2
    late_from: float = 0.8
    early_half_below: float = 0.3
    middle_half_below: float = 0.2
    middle_bands_below: float = 0.6

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            require(0.0 <= value <= 1.0, each.name, value, "0 to 1")
        require(self.early_until <= self.late_from, "late_from", self.late_from, f"{self.early_until:g} or more")
        reaches = self.middle_half_below <= self.middle_bands_below
        require(reaches, "middle_bands_below", self.middle_bands_below, f"{self.middle_half_below:g} or more")

    def precision(self, score: float | None, step: int, num_steps: int) -> LatentPrecision:
        """Return the encoding to read a sample at.

        Args:
            score: complexity, 0 to 1. A sample without one (or with NaN) is read in full: nothing is known of it.
            step: optimizer steps done, from 0.
            num_steps: of the whole run.
        """
        done = step / num_steps
        if score is None or done >= self.late_from:
            return "full"
        if done < self.early_until:
            return "half" if score < self.early_half_below else "full"
        if score < self.middle_half_below:
            return "half"
        return "bands" if score < self.middle_bands_below else "full"
