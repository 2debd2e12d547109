"""Any batch of any epoch, for every strategy: planned from seed and epoch number alone."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from ..config import require
from . import order
from .place import Place, PlannedBatch, PlannedEpoch, PrecisionByScore
from .population import Population
from .sparse import SparseConfig, SparsePlanner
from .tokens import Limit, cut

PlannedStrategy = Literal["sparse", "bucketed", "sequential", "random", "curriculum"]


@dataclass(frozen=True, kw_only=True)
class EpochConfig:
    """Which samples go together.

    Attributes:
        strategy: ``sparse``: see ``sparse``. ``bucketed``: batches of one latent shape, random. ``sequential``: as the
            samples come. ``random``: any samples together. ``curriculum``: from simple to hard, in each turn through
            the samples. All but ``bucketed`` may mix latent shapes; all but ``sparse`` take the largest scale.
        seed: decides all that is random.
        precision: which encoding each sample's latents get.
        sparse: for the strategy of that name.
    """

    strategy: PlannedStrategy = "sparse"
    seed: int = 0
    precision: PrecisionByScore = field(default_factory=PrecisionByScore)
    sparse: SparseConfig = field(default_factory=SparseConfig)

    def __post_init__(self) -> None:
        choices = get_args(PlannedStrategy)
        require(self.strategy in choices, "strategy", self.strategy, "one of " + ", ".join(map(repr, choices)))


class EpochPlanner:
    """Plans the epochs of ``population``.

    Each shows every sample exactly ``repeats`` times. By count, all epochs have equally many batches; by tokens or by
    memory their number may differ from epoch to epoch.

    Attributes:
        weights: of each configuration; see ``tokens.Limit``.
    """

    def __init__(self, population: Population, limit: Limit, config: EpochConfig) -> None:
        self.population, self.limit, self.config = population, limit, config
        self.weights = limit.weights(population)
        self._precisions = [config.precision.at(float(score)) for score in population.scores]
        self._planned: dict[int, PlannedEpoch] = {}
        self._ends: list[int] = []

    @cached_property
    def sparse(self) -> SparsePlanner:
        """What plans sparse batches."""
        config = self.config
        return SparsePlanner(self.population, self.limit, config.seed, config.sparse, config.precision)

    def epoch(self, number: int) -> PlannedEpoch:
        """Return the batches of epoch ``number``, counted from 0."""
        planned = self._planned.get(number)
        if planned is None:
            planned = self._plan(number)
            # Training asks for batch after batch of one epoch, and perhaps for the next one ahead.
            self._planned = {other: kept for other, kept in self._planned.items() if abs(other - number) == 1}
            self._planned[number] = planned
        return planned

    def batch(self, k: int) -> PlannedBatch:
        """Return the ``k``-th batch, counted from 0 across epochs.

        Where epochs differ in length, those before it are planned too, each once.

        Raises:
            IndexError: there are no samples.
        """
        if not len(self.population):
            raise IndexError("a population without samples has no batches")
        number, start = self._place_of(k)
        return self.epoch(number)[k - start]

    def _place_of(self, k: int) -> tuple[int, int]:
        """Return the epoch that holds batch ``k``, and the number of batches before that epoch."""
        if not self._ends:
            self._ends.append(len(self.epoch(0)))
        # Where all samples weigh the same, all epochs are equally long.
        if self.weights.min() == self.weights.max():
            number = k // self._ends[0]
            return number, number * self._ends[0]
        while self._ends[-1] <= k:
            self._ends.append(self._ends[-1] + len(self.epoch(len(self._ends))))
        number = bisect_right(self._ends, k)
        return number, self._ends[number - 1] if number else 0

    def _plan(self, number: int) -> PlannedEpoch:
        if self.config.strategy == "sparse":
            return self.sparse.epoch(number)
        if self.config.strategy == "bucketed":
            return self._bucketed(number)
        return tuple(self._cut(self._order(number)))

    def _order(self, number: int) -> list[int]:
        source = random.Random(f"{self.config.strategy}/{self.config.seed}/{number}")
        repeats = self.population.repeats.tolist()
        if self.config.strategy == "sequential":
            return order.sequential(repeats)
        if self.config.strategy == "random":
            return order.shuffled(repeats, source)
        return order.curriculum(self.population.scores.tolist(), repeats, source)

    def _bucketed(self, number: int) -> PlannedEpoch:
        # Seed and draws are those of the strategy "shuffle": by count, both give the same batches.
        source = random.Random(f"{self.config.seed}/{number}")
        kinds = self.population.shape_ids[:, 0].tolist()
        orders = order.bucketed(kinds, self.population.repeats.tolist(), source)
        batches = [batch for members in orders for batch in self._cut(members)]
        source.shuffle(batches)
        return tuple(batches)

    def _cut(self, members: Sequence[int]) -> list[PlannedBatch]:
        scales = self.population.scales[:, 0]
        places = [Place(index, float(scales[index]), self._precisions[index]) for index in members]
        return cut(places, self.weights[members, 0].tolist(), self.limit)
