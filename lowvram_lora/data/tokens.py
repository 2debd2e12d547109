"""How much goes into a batch: so many samples, so many tokens, or what a memory model says.

A limit gives every configuration of a sample a weight, and a batch a capacity. All numbers are whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..config import require
from .population import Population, Shape

T = TypeVar("T")

# Batch size to begin with, by resolution in pixels.
PRESETS = {512: 8, 768: 4, 1024: 2, 1536: 1}
# A batch by tokens or by memory holds at most so many times the base size.
MOST_TIMES_BASE = 4
# A sample's share of a batch is counted in this many parts.
_PARTS = 1 << 40


@dataclass(frozen=True)
class Limit:
    """When a batch is full.

    A batch takes one more sample where it then holds at most ``max_count`` samples whose weights sum to at most
    ``capacity``. An empty batch takes any sample: one that is heavier than ``capacity`` is alone in its batch.

    Attributes:
        weigh: latent shape and tokens of a configuration to its weight, 0 or more.
        label: what it is, for reports.
    """

    max_count: int
    capacity: int
    weigh: Callable[[Shape, int], int]
    label: str

    def weights(self, population: Population) -> NDArray[np.int64]:
        """Return the weight of each configuration; shape as ``population.tokens``."""
        pairs = zip(population.shape_ids.flat, population.tokens.flat, strict=True)
        known: dict[tuple[int, int], int] = {}
        found = []
        for pair in pairs:
            shape_id, tokens = key = (int(pair[0]), int(pair[1]))
            if key not in known:
                known[key] = self.weigh(population.shapes[shape_id], tokens)
            found.append(known[key])
        return np.array(found, dtype=np.int64).reshape(population.tokens.shape)


def by_count(batch_size: int) -> Limit:
    """Return the limit of ``batch_size`` samples, whatever they are.

    Raises:
        ConfigError: ``batch_size`` is below 1.
    """
    require(batch_size >= 1, "batch_size", batch_size, "1 or more")
    return Limit(batch_size, batch_size, lambda shape, tokens: 1, f"batch_size {batch_size}")


def by_tokens(budget: int, base_size: int) -> Limit:
    """Return the limit of ``budget`` tokens, and of 4 x ``base_size`` samples.

    Raises:
        ConfigError: ``budget`` or ``base_size`` is below 1.
    """
    require(base_size >= 1, "batch_size", base_size, "1 or more")
    require(budget >= 1, "token budget", budget, "1 or more")
    most = MOST_TIMES_BASE * base_size
    return Limit(most, budget, lambda shape, tokens: tokens, f"{budget} tokens a batch, at most {most} samples")


def by_memory(size_for: Callable[[Shape], int], base_size: int) -> Limit:
    """Return the limit of a memory model.

    Args:
        size_for: latent shape to the number of samples of it that fit a batch; asked once for each shape. What it says
            is brought into 1 to 4 x ``base_size``.

    A batch of one shape holds exactly that many samples. In a batch of several shapes, a sample whose shape fits s
    times takes 1/s of it, counted in 2^40ths and rounded down.

    Raises:
        ConfigError: ``base_size`` is below 1.
    """
    require(base_size >= 1, "batch_size", base_size, "1 or more")
    most = MOST_TIMES_BASE * base_size
    sizes: dict[Shape, int] = {}

    def weigh(shape: Shape, tokens: int) -> int:
        if shape not in sizes:
            sizes[shape] = min(max(size_for(shape), base_size), most)
        return _PARTS // sizes[shape]

    return Limit(most, _PARTS, weigh, f"a memory model, {base_size} to {most} samples a batch")


def budget_of(population: Population, base_size: int) -> int:
    """Return the tokens of ``base_size`` times the dearest configuration; 1 for no samples.

    No batch under this budget costs more tokens than a batch of ``base_size`` samples may cost, and none holds fewer
    than ``base_size`` samples unless the samples, or those of its bucket, have run out.
    """
    return max(base_size * int(population.tokens.max(initial=1)), 1)


def preset_size(resolution: int) -> int:
    """Return the batch size to begin with at ``resolution`` pixels: that of the preset at or above it, else 1."""
    return next((size for preset, size in sorted(PRESETS.items()) if resolution <= preset), 1)


def latent_tokens(latent_shape: Shape, patch: int = 1) -> int:
    """Return the positions of ``latent_shape`` (channels first, no batch axis), ``patch`` x ``patch`` to a token.

    Frames of a video are not put together. A network pads sides that are no multiple of ``patch``.
    """
    *frames, height, width = latent_shape[1:]
    return math.prod(frames) * -(-height // patch) * -(-width // patch)


def cut(order: Sequence[T], weights: Sequence[int], limit: Limit) -> list[tuple[T, ...]]:
    """Return ``order`` in batches: each takes the next ones as long as ``limit`` allows. Nothing is lost or moved.

    Args:
        weights: of each place of ``order``.
    """
    batches: list[tuple[T, ...]] = []
    start = load = 0
    for position, weight in enumerate(weights):
        is_full = position - start == limit.max_count or load + weight > limit.capacity
        if position > start and is_full:
            batches.append(tuple(order[start:position]))
            start, load = position, 0
        load += weight
    if start < len(order):
        batches.append(tuple(order[start:]))
    return batches
