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


def heaviest(cache: CacheIndex, batches: Iterable[Batch], at_most: int | None = None) -> Batch:
    """Return the draws of one shape in one of ``batches`` that have the most latents together.

    Args:
        at_most: so many of them go through the network at once; the latents of no more than these count.
    """
    most: dict[tuple[int, ...], Batch] = {}
    for batch in batches:
        for shape, group in by_shape(cache, batch).items():
            most[shape] = max(most.get(shape, ()), group, key=len)
    return max(most.items(), key=lambda found: latents_at_once(found[0], found[1], at_most))[1]


def latents_at_once(shape: tuple[int, ...], group: Batch, at_most: int | None) -> int:
    """Return the numbers in the latents of ``group``, all of one ``shape``, of which ``at_most`` are taken at once."""
    return min(len(group), at_most or len(group)) * math.prod(shape)
