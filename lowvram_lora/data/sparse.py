"""Sparse batches: hard samples first, each with company that is unlike it and cheap.

A batch begins with an anchor, one of the hardest samples that the turn has not shown yet. Then, one by one, comes the
sample and configuration of the largest value

    (gain + 0.001) * kept / (1 + cost_discount * (tokens / mean tokens + new_shape_cost, if its shape is new))

- ``gain``: distance, visual and textual, from the nearest sample of the batch (``distances.Space``); 1.0 is as far as
  two samples are apart on average. The 0.001 lets cost decide where nothing differs.
- ``kept = 1 - score * (1 - scale)``: what is left of the sample at a smaller scale. A model, not a measurement: the
  hardest sample loses in proportion to its sides, the simplest nothing.
- tokens are those of the configuration over the mean of all samples at their largest scale; a new shape is one more
  micro-batch.

An anchor takes the configuration of the largest ``kept / (1 + cost_discount * tokens / mean tokens)``.

Members come from a pool: a bounded random part of what the turn has not shown yet, so that the time of an epoch grows
with the number of samples, not with its square. An epoch is planned from seed and number alone, with operations that
give the same result on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..config import require
from .distances import Held, Space
from .order import permuted, spread_turns
from .place import Place, PlannedBatch, PlannedEpoch, PrecisionByScore
from .population import Population
from .tokens import Limit

_LEAST_GAIN = 1e-3
_EMPTY = -1


@dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """How sparse batches are made.

    Attributes:
        visual_weight, text_weight: share of each distance; 0 or more, one of them above 0.
        cost_discount: how much the cost of a configuration counts against its gain; 0 takes the largest scale always.
        new_shape_cost: what one more latent shape in a batch costs, in samples of mean size.
        num_anchors: of so many hardest samples one is taken; which, moves on with every batch and every epoch.
        pool_size: samples among which members are chosen.
    """

    visual_weight: float = 0.5
    text_weight: float = 0.5
    cost_discount: float = 0.25
    new_shape_cost: float = 1.0
    num_anchors: int = 8
    pool_size: int = 256

    def __post_init__(self) -> None:
        for name in ("visual_weight", "text_weight", "cost_discount", "new_shape_cost"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, name, value, "a number of at least 0")
        total = self.visual_weight + self.text_weight
        require(total > 0, "visual_weight + text_weight", total, "above 0")
        require(self.num_anchors >= 1, "num_anchors", self.num_anchors, "1 or more")
        require(self.pool_size >= 1, "pool_size", self.pool_size, "1 or more")


class SparsePlanner:
    """Plans any epoch of a population; what does not change between epochs is worked out once.

    Args:
        precision: which encoding each sample's latents get.
    """

    def __init__(
        self,
        population: Population,
        limit: Limit,
        seed: int,
        config: SparseConfig,
        precision: PrecisionByScore,
    ) -> None:
        self.population, self.limit, self.seed, self.config = population, limit, seed, config
        self.space = Space(population.visual, population.textual, config.visual_weight, config.text_weight)
        self.weights = limit.weights(population)
        self.kept = 1.0 - population.scores[:, None] * (1.0 - population.scales)
        self.cost = 1.0 + config.cost_discount * (population.tokens / _mean_tokens(population))
        self.precisions = [precision.at(float(score)) for score in population.scores]
        source = random.Random(f"sparse/{seed}")
        self.first_anchor = int(source.random() * config.num_anchors)
        ranked = permuted(range(len(population)), source)
        ranked.sort(key=lambda index: -population.scores[index])
        self.rank = {index: place for place, index in enumerate(ranked)}

    def epoch(self, number: int) -> PlannedEpoch:
        """Return the batches of epoch ``number``, counted from 0: every sample exactly ``repeats`` times."""
        return _Epoch(self, number).plan() if len(self.population) else ()

    def place(self, row: int, column: int) -> Place:
        """Return sample ``row`` in its configuration ``column``."""
        return Place(row, float(self.population.scales[row, column]), self.precisions[row])


def _mean_tokens(population: Population) -> float:
    return int(population.tokens[:, 0].sum()) / len(population) if len(population) else 1.0


class _Epoch:
    """One epoch while it is planned."""

    def __init__(self, ground: SparsePlanner, number: int) -> None:
        self._ground, self._number = ground, number
        self._source = random.Random(f"sparse/{ground.seed}/{number}")
        self._pool = _Pool(ground)
        self._batches: list[PlannedBatch] = []
        self._batch: list[tuple[int, int]] = []
        self._left = ground.limit.capacity
        self._unseen: set[int] = set()
        self._queue: Iterator[int] = iter(())

    def plan(self) -> PlannedEpoch:
        for turn in spread_turns(self._ground.population.repeats.tolist(), self._source):
            self._plan_turn(turn)
        self._close()
        return tuple(self._batches)

    def _plan_turn(self, turn: Sequence[int]) -> None:
        """Show every sample of ``turn`` once. The first batch may have begun in the turn before."""
        self._unseen = set(turn)
        self._queue = iter(permuted(turn, self._source))
        anchors = _Anchors(self._ground, turn)
        while self._unseen:
            if self._batch:
                self._add_or_close()
            else:
                self._fill()
                row = anchors.next(self._unseen, self._number + len(self._batches))
                self._add(row, self._anchor_column(row))

    def _add_or_close(self) -> None:
        if len(self._batch) == self._ground.limit.max_count:
            self._close()
            return
        if self._pool.is_empty:
            self._fill()
        best = self._pool.best(self._left)
        if best is None:
            self._close()
        else:
            self._add(*best)

    def _fill(self) -> None:
        """Fill the pool with samples that are not shown yet."""
        fresh: list[int] = []
        # One at a time: what is taken from the queue must find a place.
        while len(fresh) < self._pool.room:
            row = next(self._queue, _EMPTY)
            if row == _EMPTY:
                break
            if row in self._unseen:
                fresh.append(row)
        self._pool.fill(fresh, self._batch)

    def _anchor_column(self, row: int) -> int:
        ground = self._ground
        fitting = np.flatnonzero(ground.weights[row] <= ground.limit.capacity)
        if not len(fitting):
            return int(ground.weights[row].argmin())
        return int(fitting[(ground.kept[row, fitting] / ground.cost[row, fitting]).argmax()])

    def _add(self, row: int, column: int) -> None:
        self._batch.append((row, column))
        self._left -= int(self._ground.weights[row, column])
        self._unseen.discard(row)
        self._pool.drop(row)
        self._pool.meet(row, column)

    def _close(self) -> None:
        if self._batch:
            self._batches.append(tuple(self._ground.place(*member) for member in self._batch))
        self._batch, self._left = [], self._ground.limit.capacity
        self._pool.forget()


class _Anchors:
    """The hardest samples of a turn that are not shown yet."""

    def __init__(self, ground: SparsePlanner, turn: Sequence[int]) -> None:
        self._hardest = iter(sorted(turn, key=ground.rank.__getitem__))
        self._first, self._number = ground.first_anchor, ground.config.num_anchors
        self._window: list[int] = []

    def next(self, unseen: set[int], moved: int) -> int:
        """Return one of the ``num_anchors`` hardest of ``unseen``, ``moved`` places on from the first."""
        self._window = [row for row in self._window if row in unseen]
        while len(self._window) < self._number:
            row = next(self._hardest, _EMPTY)
            if row == _EMPTY:
                break
            if row in unseen:
                self._window.append(row)
        return self._window[(self._first + moved) % len(self._window)]


class _Pool:
    """The samples that may come next, in numbered slots; a slot is empty or holds one of them."""

    def __init__(self, ground: SparsePlanner) -> None:
        population = ground.population
        slots = np.zeros(min(ground.config.pool_size, len(population)), dtype=np.int64)
        self._ground = ground
        self._rows = np.full(len(slots), _EMPTY, dtype=np.int64)
        self._slot_of: dict[int, int] = {}
        self._held: Held = ground.space.hold(slots)
        # Distance from the nearest sample of the batch; below 0 in an empty slot, so that it is never the best.
        self._nearest: NDArray[np.float32] = np.full(len(slots), _EMPTY, dtype=np.float32)
        self._kept, self._cost = ground.kept[slots], ground.cost[slots]
        self._weights, self._shapes = ground.weights[slots], population.shape_ids[slots]
        self._is_new = np.ones(self._shapes.shape, dtype=np.float64)
        self._new_shape = ground.config.cost_discount * ground.config.new_shape_cost
        self._heaviest = int(ground.weights.max())

    @property
    def is_empty(self) -> bool:
        return not self._slot_of

    @property
    def room(self) -> int:
        """Number of empty slots."""
        return len(self._rows) - len(self._slot_of)

    def fill(self, rows: Sequence[int], batch: Sequence[tuple[int, int]]) -> None:
        """Put ``rows`` into empty slots; ``batch`` is what they have to be unlike."""
        if not rows:
            return
        slots = np.flatnonzero(self._rows == _EMPTY)[: len(rows)]
        new = np.array(rows, dtype=np.int64)
        self._rows[slots] = new
        self._slot_of.update(zip(rows, slots.tolist(), strict=True))
        ground = self._ground
        self._held.put(slots, ground.space, new)
        self._kept[slots], self._cost[slots] = ground.kept[new], ground.cost[new]
        self._weights[slots], self._shapes[slots] = ground.weights[new], ground.population.shape_ids[new]
        self._nearest[slots], self._is_new[slots] = np.inf, 1.0
        # Distances of slots that were full before do not change: the nearest of the batch is known there.
        for row, column in batch:
            self.meet(row, column)

    def drop(self, row: int) -> None:
        """Empty the slot of ``row``, if it has one."""
        slot = self._slot_of.pop(row, None)
        if slot is not None:
            self._rows[slot] = _EMPTY
            self._nearest[slot] = _EMPTY

    def meet(self, row: int, column: int) -> None:
        """Take notice that ``row`` is in the batch now."""
        np.minimum(self._nearest, self._ground.space.apart(self._held, row), out=self._nearest)
        self._is_new[self._shapes == self._ground.population.shape_ids[row, column]] = 0.0

    def forget(self) -> None:
        """Begin a new batch."""
        self._nearest[self._rows != _EMPTY] = np.inf
        self._is_new[:] = 1.0

    def best(self, left: int) -> tuple[int, int] | None:
        """Return the sample and configuration of the largest value that fits into ``left``; None if none does."""
        gain = self._nearest.astype(np.float64) + _LEAST_GAIN
        value = gain[:, None] * self._kept / (self._cost + self._new_shape * self._is_new)
        if self._heaviest > left:
            value[self._weights > left] = _EMPTY
        slot, column = divmod(int(value.argmax()), value.shape[1])
        return (int(self._rows[slot]), column) if value[slot, column] > 0.0 else None
