"""Which samples make each batch: decided by the seed alone, so that any batch can be had at any time."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from ..config import SamplerConfig
from ..errors import DatasetError
from .bucketed import Bucketed
from .dataset import digest_of
from .draw import EMPTY_CAPTION, Batch, Draw, Epoch
from .index import CacheIndex


class Planner(Protocol):
    """A strategy: the cache's samples to epochs of batches."""

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches, the same in every epoch."""
        ...

    def epoch(self, n: int) -> Epoch:
        """Return the batches of epoch ``n``, counted from 0: each sample ``repeats`` times.

        Entries, scales and precisions are decided here; which variants are read is not. Depends on the cache, the
        settings and ``n`` alone.
        """
        ...

    def lines(self) -> Iterable[str]:
        """Return what an epoch looks like, in words."""
        ...


def planner_for(cache: CacheIndex, config: SamplerConfig) -> Planner:
    """Return what plans ``config.strategy``."""
    return Bucketed(cache, config)


@dataclass(frozen=True)
class BatchRecipe:
    """A cache and the order in which its samples are drawn: a handle that holds no tensor.

    Every epoch shows each sample exactly ``repeats`` times and has ``batches_per_epoch`` batches.

    Raises:
        DatasetError: the cache has no entries.
    """

    cache: CacheIndex
    config: SamplerConfig
    _drawn: dict[int, Epoch] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.cache.entries:
            raise DatasetError(["the cache holds no samples; connect a dataset to Build Tiered Cache"])

    @cached_property
    def planner(self) -> Planner:
        """What decides who goes with whom."""
        return planner_for(self.cache, self.config)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches, the same in every epoch."""
        return self.planner.batches_per_epoch

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything here that decides training."""
        config = self.config
        return digest_of(self.cache.fingerprint, config.batch_size, config.strategy, config.seed)

    def epoch(self, n: int) -> Epoch:
        """Return the planned batches of epoch ``n``, counted from 0, without the choice of variants."""
        drawn = self._drawn.get(n)
        if drawn is None:
            drawn = self.planner.epoch(n)
            # Training asks for batch after batch of one epoch, and perhaps for the next one ahead.
            for old in [kept for kept in self._drawn if abs(kept - n) > 1]:
                del self._drawn[old]
            self._drawn[n] = drawn
        return drawn

    def batch(self, k: int) -> Batch:
        """Return the ``k``-th batch, counted from 0 across epochs, as it is read."""
        n, position = divmod(k, self.batches_per_epoch)
        batch = self.epoch(n)[position]
        if not self._has_choice:
            return batch
        return tuple(self._chosen(draw, f"{k}/{place}") for place, draw in enumerate(batch))

    @cached_property
    def _has_choice(self) -> bool:
        several = any(entry.num_images > 1 or len(entry.text_keys) > 1 for entry in self.cache.entries)
        return several or self.cache.caption_dropout > 0

    def _chosen(self, draw: Draw, where: str) -> Draw:
        """Return ``draw`` with variants of picture and caption, drawn from the seed and its place alone."""
        source, entry = random.Random(f"{self.config.seed}/variant/{where}"), self.cache.entries[draw.entry]
        # All three are drawn in any case: changing one setting leaves what the others decide.
        image, caption = source.randrange(entry.num_images), source.randrange(len(entry.text_keys))
        is_dropped = source.random() < self.cache.caption_dropout
        return replace(draw, image=image, caption=EMPTY_CAPTION if is_dropped else caption)

    def report(self) -> str:
        """Return what an epoch looks like, in words."""
        num_draws = sum(entry.repeats for entry in self.cache.entries)
        return "\n".join(
            (
                f"{len(self.cache.entries)} images, {num_draws} draws an epoch with repeats",
                f"{self.batches_per_epoch} batches an epoch, batch_size {self.config.batch_size}, "
                f"{self.config.strategy}, seed {self.config.seed}",
                *self.planner.lines(),
            )
        )
