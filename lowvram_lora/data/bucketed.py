"""The strategies that know no more of a sample than its size: samples of one latent shape go together."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from ..config import SamplerConfig
from ..units import counted
from .draw import Batch, Draw, Epoch
from .groups import heaviest
from .index import CacheEntry, CacheIndex

Turn = tuple[int, ...]


class Bucketed:
    """Plans ``shuffle`` (a new order each epoch) and ``ordered`` (that of the dataset), all at full size.

    A bucket with too few samples for a full batch gives a smaller one.
    """

    def __init__(self, cache: CacheIndex, config: SamplerConfig) -> None:
        self._cache = cache
        self._entries = cache.entries
        self._config = config
        self._planned: dict[int, Epoch] = {}

    @cached_property
    def batches_per_epoch(self) -> int:
        """Number of batches, the same in every epoch."""
        return sum(-(-_num_draws(turns) // self._config.batch_size) for turns in self._buckets.values())

    @cached_property
    def _buckets(self) -> dict[tuple[int, ...], list[Turn]]:
        """The draws of an epoch by latent shape, in turns: every entry once, then again those with more repeats."""
        members: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for index, entry in enumerate(self._entries):
            members.setdefault(entry.latent_shape, []).append((index, entry.repeats))
        return {shape: _turns(found) for shape, found in members.items()}

    def epoch(self, n: int) -> Epoch:
        """Return the batches of epoch ``n``, counted from 0."""
        planned = self._planned.get(n)
        if planned is None:
            planned = self._plan(n)
            # Training asks for batch after batch of one epoch, and perhaps for the next one ahead.
            self._planned = {other: kept for other, kept in self._planned.items() if abs(other - n) == 1}
            self._planned[n] = planned
        return planned

    def batch(self, k: int) -> Batch:
        """Return the ``k``-th batch, counted from 0 across epochs."""
        n, position = divmod(k, self.batches_per_epoch)
        return self.epoch(n)[position]

    def largest(self, at_most: int | None = None) -> Batch:
        """Return the batch with the most latents; each epoch has one like it."""
        return heaviest(self._cache, self.epoch(0), at_most)

    def determining(self) -> tuple[Any, ...]:
        """Return nothing: settings and encodings decide all."""
        return ()

    def _plan(self, n: int) -> Epoch:
        # Text seeds are hashed by Python itself, the same on every version and machine.
        source = random.Random(f"{self._config.seed}/{n}")
        is_shuffled = self._config.strategy == "shuffle"
        batches: list[Turn] = []
        for turns in self._buckets.values():
            # Shuffled turn by turn, so that a batch holds one image twice only where it can't be helped.
            order = [index for turn in turns for index in (source.sample(turn, len(turn)) if is_shuffled else turn)]
            batches += _chunks(order, self._config.batch_size)
        if is_shuffled:
            source.shuffle(batches)
        return tuple(tuple(Draw(index) for index in batch) for batch in batches)

    def lines(self) -> Iterator[str]:
        """Yield what the buckets look like, in words."""
        yield "Buckets (width x height):"
        size = self._config.batch_size
        for turns in self._buckets.values():
            label = _label(self._entries[turns[0][0]])
            num_images, num_draws = len(turns[0]), _num_draws(turns)
            last = num_draws % size
            held = f"{num_draws}" if num_draws < size else f"{size}, the last {last}" if last else f"{size}"
            batches = counted(-(-num_draws // size), "batch", "batches")
            images, draws = counted(num_images, "image"), counted(num_draws, "draw")
            yield f"  {label}: {images}, {draws}, {batches} of {held}"
            if num_draws < size:
                kind = "images" if num_draws == num_images else "draws an epoch"
                yield (
                    f"batch_size {size}, but bucket {label} holds only {num_draws} {kind}: its batches hold {num_draws}"
                )


def _turns(members: Sequence[tuple[int, int]]) -> list[Turn]:
    most = max(repeats for _, repeats in members)
    return [tuple(index for index, repeats in members if repeats > turn) for turn in range(most)]


def _num_draws(turns: Sequence[Turn]) -> int:
    return sum(len(turn) for turn in turns)


def _chunks(order: Sequence[int], size: int) -> list[Turn]:
    return [tuple(order[start : start + size]) for start in range(0, len(order), size)]


def _label(entry: CacheEntry) -> str:
    height, width = entry.bucket_px or entry.latent_shape[-2:]
    return f"{width}x{height}" if entry.bucket_px else f"latents {width}x{height}"
