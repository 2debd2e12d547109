"""The strategies that plan an epoch from what is known of each sample, as a recipe of batches asks for them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from ..config import SamplerConfig
from .draw import Batch, Draw, Epoch
from .epochs import EpochConfig, EpochPlanner, PlannedStrategy
from .features import Features
from .groups import latents_at_once
from .index import CacheEntry, CacheIndex
from .outlook import Outlook, gain_line
from .place import PlannedBatch
from .population import Candidate, Configuration, Population, Shape
from .tokens import MOST_TIMES_BASE, Limit, budget_of, by_count, by_memory, by_tokens, latent_tokens
from .traits import unpacked

# Raise it when the same settings and samples give other batches.
PLAN_VERSION = 1
# What a sample without a score counts as: nothing is known of it, so nothing of it is given up.
_UNSCORED = 1.0

_STRATEGIES: MappingProxyType[str, PlannedStrategy] = MappingProxyType(
    {
        "shuffle": "bucketed",
        "bucketed": "bucketed",
        "sparse": "sparse",
        "sequential": "sequential",
        "random": "random",
        "curriculum": "curriculum",
    }
)


def population_of(cache: CacheIndex) -> Population:
    """Return the samples that are trained on, as planning sees them. Reads no file."""
    visual = _features([entry.visual for entry in cache.entries])
    textual = _features([entry.textual for entry in cache.entries])
    return Population.of(
        [
            Candidate(
                score=_UNSCORED if entry.complexity_score is None else entry.complexity_score,
                repeats=entry.repeats,
                configurations=_configurations(entry),
                visual=visual[index],
                textual=textual[index],
            )
            for index, entry in enumerate(cache.entries)
        ]
    )


@dataclass(frozen=True)
class Member:
    """What an epoch may bring together of one latent shape.

    Attributes:
        draw: one of them.
        count: how many there are.
    """

    draw: Draw
    count: int


def limit_of(population: Population, config: SamplerConfig, sizes: Mapping[Shape, int] | None = None) -> Limit:
    """Return when a batch is full: by count, or with ``adaptive_batch`` by memory, as far as that is known.

    Args:
        sizes: what fits, by latent shape; without it a batch is full at the tokens that ``batch_size`` of the dearest
            samples have.
    """
    if not config.adaptive_batch:
        return by_count(config.batch_size)
    if sizes:
        return by_memory(lambda shape: sizes.get(shape, config.batch_size), config.batch_size)
    return by_tokens(budget_of(population, config.batch_size), config.batch_size)


class Planned:
    """Plans a cache's epochs as ``epochs`` does. Precision is left to the cache's own schedule.

    Args:
        sizes: with ``adaptive_batch``, how many samples of each latent shape fit a batch, where that is known.
    """

    def __init__(self, cache: CacheIndex, config: SamplerConfig, sizes: Mapping[Shape, int] | None = None) -> None:
        self._config = config
        self._sizes = sizes or {}
        self._population = population_of(cache)
        self._is_scored = any(entry.complexity_score is not None for entry in cache.entries)
        self._strategy = _STRATEGIES[config.strategy]
        self._limit = limit_of(self._population, config, sizes)
        self._planner = EpochPlanner(
            self._population, self._limit, EpochConfig(strategy=self._strategy, seed=config.seed)
        )

    @cached_property
    def batches_per_epoch(self) -> int:
        """Number of batches of the first epoch; with ``adaptive_batch`` others may have more or fewer."""
        return len(self._planner.epoch(0))

    def epoch(self, n: int) -> Epoch:
        """Return the batches of epoch ``n``, counted from 0."""
        return tuple(_drawn(batch) for batch in self._planner.epoch(n))

    def batch(self, k: int) -> Batch:
        """Return the ``k``-th batch, counted from 0 across epochs."""
        return _drawn(self._planner.batch(k))

    def largest(self, at_most: int | None = None) -> Batch:
        """Return the draws of one latent shape that have the most latents of all that could meet in a batch.

        Who meets differs from epoch to epoch. So this is a bound: as many of one shape as there are, or as fit.
        """
        shapes = self._population.shapes
        groups = [(shape, self._most_of(shape_id)) for shape_id, shape in enumerate(shapes)]
        return max(groups, key=lambda found: latents_at_once(found[0], found[1], at_most))[1]

    def members(self) -> dict[Shape, Member]:
        """Return what can be drawn in an epoch, by latent shape."""
        found = {}
        for shape_id, shape in enumerate(self._population.shapes):
            places = self._places_of(shape_id)
            if places:
                _, row, scale = places[0]
                count = sum(int(self._population.repeats[row]) for row in {row for _, row, _ in places})
                found[shape] = Member(Draw(row, scale), count)
        return found

    def lines(self) -> Iterator[str]:
        """Yield what the first epoch looks like, counted from the plan itself."""
        outlook = Outlook(self._population, self._planner.epoch(0))
        base = self._config.batch_size
        if self._config.adaptive_batch and not self._sizes:
            yield (
                f"LoRA Train decides how many samples of each size make a batch, {base} to {MOST_TIMES_BASE * base}: "
                "as many as fit into its VRAM budget. Where it has no VRAM to plan, and in what follows:"
            )
        if not self._is_scored and self._strategy in ("sparse", "curriculum"):
            yield f"No sample has a complexity score, so {self._strategy} takes all of them for equally hard"
        yield f"A batch is full at {self._limit.label}"
        yield from outlook.details()
        if self._strategy == "sparse":
            yield gain_line(outlook.gain(self._planner.sparse.space, self._config.seed))

    def determining(self) -> tuple[Any, ...]:
        """Return what decides the batches beside the settings and the encodings."""
        found: dict[str, Any] = {"version": PLAN_VERSION, "limit": (self._limit.max_count, self._limit.capacity)}
        population, is_sparse = self._population, self._strategy == "sparse"
        if is_sparse or self._strategy == "curriculum":
            found["scores"] = population.scores.tolist()
        if is_sparse or self._config.adaptive_batch:
            found["tokens"] = population.tokens.tolist()
        if self._sizes:
            found["sizes"] = sorted(self._sizes.items())
        if is_sparse:
            found["sparse"] = asdict(self._planner.config.sparse)
            found["features"] = _digest_of(population.visual), _digest_of(population.textual)
        return (found,)

    def _places_of(self, shape_id: int) -> list[tuple[int, int, float]]:
        """Return weight, sample and scale of all that can be drawn in a latent shape, the lightest first."""
        population, weights = self._population, self._planner.weights
        # All other strategies take the largest scale.
        width = population.shape_ids.shape[1] if self._strategy == "sparse" else 1
        rows, columns = np.nonzero(population.shape_ids[:, :width] == shape_id)
        return sorted(
            {
                (int(weights[row, column]), int(row), float(population.scales[row, column]))
                for row, column in zip(rows, columns, strict=True)
            }
        )

    def _most_of(self, shape_id: int) -> Batch:
        found: list[Draw] = []
        load = 0
        for weight, row, scale in self._places_of(shape_id):
            for _ in range(int(self._population.repeats[row])):
                is_full = len(found) == self._limit.max_count or load + weight > self._limit.capacity
                if found and is_full:
                    return tuple(found)
                found.append(Draw(row, scale))
                load += weight
        return tuple(found)


def _configurations(entry: CacheEntry) -> tuple[Configuration, ...]:
    return tuple(
        Configuration(encoded.scale, encoded.latent_shape, latent_tokens(encoded.latent_shape) + entry.text_tokens)
        for encoded in entry.scales
    )


def _features(packed: list[bytes]) -> list[Features]:
    """Return features of one length; where some are missing, as of a damaged file, those of nothing in particular."""
    length = max(map(len, packed), default=0)
    neutral = np.full(length // 2, 1.0 / math.sqrt(max(length // 2, 1)), dtype=np.float32)
    return [unpacked(each) if len(each) == length else neutral for each in packed]


def _drawn(batch: PlannedBatch) -> Batch:
    return tuple(Draw(place.entry, place.scale, precision=place.precision) for place in batch)


def _digest_of(features: Features) -> str:
    return hashlib.sha256(features.astype("<f4").tobytes()).hexdigest()
