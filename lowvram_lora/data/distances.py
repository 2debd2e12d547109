"""How far samples are apart, in the picture and in the caption: exact, so that every machine finds the same.

Features are rounded to 1024ths. Their products and sums are then whole numbers below 2^24, which float32 holds
exactly: a matrix product gives the same bits in whatever order a library adds. What follows are single operations
(root, product, sum) that IEEE 754 rounds in one way only.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .features import Features

_STEPS = 1024.0
_NUM_PAIRS = 2048
_ALL_PAIRS_UP_TO = 64
_CHUNK = 1 << 22

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Kind:
    """One kind of features, as whole numbers in float32.

    Attributes:
        rows: (n, numbers).
        squares: squared length of each row, (n,).
        factor: turns a root of squares into the share of a distance.
    """

    rows: Features
    squares: Features
    factor: np.float32

    def apart(self, held: _Kind, row: int) -> Features:
        squared = held.squares + self.squares[row] - np.float32(2.0) * (held.rows @ self.rows[row])
        return np.asarray(np.sqrt(squared) * self.factor, dtype=np.float32)

    def take(self, indices: Indices) -> _Kind:
        return _Kind(self.rows[indices], self.squares[indices], self.factor)

    def put(self, slots: Indices, other: _Kind, indices: Indices) -> None:
        self.rows[slots] = other.rows[indices]
        self.squares[slots] = other.squares[indices]


@dataclass(frozen=True, eq=False)
class Held:
    """Samples of a space whose distances are asked for again and again; may be exchanged one by one."""

    visual: _Kind
    textual: _Kind

    def put(self, slots: Indices, space: Space, indices: Indices) -> None:
        """Write the samples ``indices`` of ``space`` into ``slots``."""
        self.visual.put(slots, space.visual, indices)
        self.textual.put(slots, space.textual, indices)


class Space:
    """The samples and their distances.

    A distance is the weighted mean of the visual and the textual one, each measured in its own mean over pairs drawn
    from all samples: 1.0 is as far as two of them are apart on average. Features that are equal in all samples count 0.

    Args:
        visual: (n, numbers), each row of length 1. textual: the same.
        visual_weight, text_weight: 0 or more, one of them above 0.
    """

    def __init__(self, visual: Features, textual: Features, visual_weight: float, text_weight: float) -> None:
        total = visual_weight + text_weight
        self.visual = _kind(visual, visual_weight / total)
        self.textual = _kind(textual, text_weight / total)

    def hold(self, indices: Indices) -> Held:
        """Return the samples ``indices``, copied out."""
        return Held(self.visual.take(indices), self.textual.take(indices))

    def apart(self, held: Held, row: int) -> Features:
        """Return the distance of each of ``held`` from sample ``row``."""
        return np.asarray(self.visual.apart(held.visual, row) + self.textual.apart(held.textual, row))

    def mean_gain(self, batches: Sequence[Sequence[int]]) -> float:
        """Return the mean distance of a sample from the nearest other one of its batch; 0 where all are alone."""
        by_size: dict[int, list[Sequence[int]]] = defaultdict(list)
        for batch in batches:
            if len(batch) > 1:
                by_size[len(batch)].append(batch)
        gains: list[float] = []
        for size, alike in by_size.items():
            step = max(_CHUNK // (size * (size + self.visual.rows.shape[1] + self.textual.rows.shape[1])), 1)
            for start in range(0, len(alike), step):
                gains += self._nearest(np.array(alike[start : start + step], dtype=np.int64)).tolist()
        return math.fsum(gains) / len(gains) if gains else 0.0

    def _nearest(self, indices: Indices) -> Features:
        apart = sum(_between(kind, indices) for kind in (self.visual, self.textual))
        apart = np.asarray(apart) + np.where(np.eye(indices.shape[1], dtype=bool), np.float32(np.inf), np.float32(0.0))
        return np.asarray(apart.min(axis=2).ravel())


def _kind(features: Features, weight: float) -> _Kind:
    rows = np.rint(features.astype(np.float64) * _STEPS).astype(np.float32)
    squares = np.asarray((rows * rows).sum(axis=1), dtype=np.float32)
    mean = _mean_apart(rows, squares)
    return _Kind(rows, squares, np.float32(weight / mean if mean else 0.0))


def _mean_apart(rows: Features, squares: Features) -> float:
    first, second = _pairs(len(rows))
    if not len(first):
        return 0.0
    squared = squares[first] + squares[second] - 2.0 * (rows[first] * rows[second]).sum(axis=1)
    return math.fsum(np.sqrt(squared.astype(np.float64)).tolist()) / len(first)


def _pairs(number: int) -> tuple[Indices, Indices]:
    """Return two different samples for each pair: all pairs of a few samples, else some that depend on nothing else."""
    if number <= _ALL_PAIRS_UP_TO:
        first, second = np.triu_indices(number, 1)
        return first.astype(np.int64), second.astype(np.int64)
    source = random.Random("pairs")
    drawn = [(int(source.random() * number), 1 + int(source.random() * (number - 1))) for _ in range(_NUM_PAIRS)]
    first, offset = np.array(drawn, dtype=np.int64).T
    return first, (first + offset) % number


def _between(kind: _Kind, indices: Indices) -> Features:
    rows, squares = kind.rows[indices], kind.squares[indices]
    products = rows @ rows.transpose(0, 2, 1)
    squared = squares[:, :, None] + squares[:, None, :] - np.float32(2.0) * products
    return np.asarray(np.sqrt(squared) * kind.factor)
