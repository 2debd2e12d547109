"""Draws of one latent shape: what goes through the network together."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .draw import Batch
from .index import CacheIndex


def by_shape(cache: CacheIndex, batch: Batch) -> dict[tuple[int, ...], Batch]:
    """Return a batch's draws by latent shape, in the order in which each shape comes."""
    groups: dict[tuple[int, ...], Batch] = {}
    for draw in batch:
        shape = cache.image_of(draw).latent_shape
        groups[shape] = (*groups.get(shape, ()), draw)
    return groups


def heaviest(cache: CacheIndex, batches: Iterable[Batch]) -> Batch:
    """Return the draws of one shape in one of ``batches`` that have the most latents together."""
    most: dict[tuple[int, ...], Batch] = {}
    for batch in batches:
        for shape, group in by_shape(cache, batch).items():
            most[shape] = max(most.get(shape, ()), group, key=len)
    return max(most.items(), key=lambda found: len(found[1]) * math.prod(found[0]))[1]
