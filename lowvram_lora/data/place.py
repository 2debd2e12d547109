"""A planned epoch: which sample takes each place of each batch, and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Place(NamedTuple):
    """One place of a batch.

    Attributes:
        entry: number of the sample.
        scale: of the picture's sides, one of those the cache holds for the sample.
        precision: name of the encoding of its latents.
    """

    entry: int
    scale: float
    precision: str


PlannedBatch = tuple[Place, ...]
PlannedEpoch = tuple[PlannedBatch, ...]


@dataclass(frozen=True)
class PrecisionByScore:
    """Which encoding a sample of a score gets.

    Attributes:
        below: score and precision; the first pair whose score is above the sample's decides.
        otherwise: the precision where none does.
    """

    below: tuple[tuple[float, str], ...] = ()
    otherwise: str = "full"

    def at(self, score: float) -> str:
        """Return the precision for a sample of ``score``."""
        return next((name for bound, name in self.below if score < bound), self.otherwise)


def times_seen(epoch: PlannedEpoch, num_samples: int) -> NDArray[np.int64]:
    """Return how often each sample has a place in ``epoch``, counted one by one; shape (num_samples,)."""
    counted = Counter(place.entry for batch in epoch for place in batch)
    return np.array([counted[index] for index in range(num_samples)], dtype=np.int64)


def wrongly_seen(epoch: PlannedEpoch, repeats: Sequence[int] | NDArray[np.int64]) -> list[int]:
    """Return the samples that are not seen exactly as often as ``repeats`` says: none, if the plan is right."""
    return [int(i) for i in np.flatnonzero(times_seen(epoch, len(repeats)) != np.asarray(repeats))]
