"""Which samples make each batch: decided by the seed alone, so that any batch can be had at any time."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from ..config import SamplerConfig
from ..errors import DatasetError
from .bucketed import Bucketed
from .dataset import digest_of
from .draw import EMPTY_CAPTION, Batch, Draw, Epoch
from .index import CacheIndex
from .planned import Planned


class Planner(Protocol):
    """A strategy: the cache's samples to batches, from the settings alone, so that any can be had at any time.

    Entries, scales and precisions are decided here; which variants are read is not. Each epoch shows each sample
    ``repeats`` times.
    """

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of the first epoch; others may have more or fewer."""
        ...

    def epoch(self, n: int) -> Epoch:
        """Return the batches of epoch ``n``, counted from 0."""
        ...

    def batch(self, k: int) -> Batch:
        """Return the ``k``-th batch, counted from 0 across epochs."""
        ...

    def largest(self) -> Batch:
        """Return draws of one latent shape that need at least as much as any that go through the network together."""
        ...

    def lines(self) -> Iterable[str]:
        """Return what an epoch looks like, in words."""
        ...

    def determining(self) -> tuple[Any, ...]:
        """Return, as plain data, what decides the batches beside the settings and the encodings."""
        ...


def planner_for(cache: CacheIndex, config: SamplerConfig) -> Planner:
    """Return what plans ``config.strategy``."""
    if config.strategy in ("shuffle", "ordered") and not config.adaptive_batch:
        return Bucketed(cache, config)
    return Planned(cache, config)


@dataclass(frozen=True)
class BatchRecipe:
    """A cache and the order in which its samples are drawn: a handle that holds no tensor.

    Every epoch shows each sample exactly ``repeats`` times.

    Raises:
        DatasetError: the cache has no entries.
    """

    cache: CacheIndex
    config: SamplerConfig

    def __post_init__(self) -> None:
        if not self.cache.entries:
            raise DatasetError(["the cache holds no samples; connect a dataset to Build Tiered Cache"])

    @cached_property
    def planner(self) -> Planner:
        """What decides who goes with whom."""
        return planner_for(self.cache, self.config)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of the first epoch."""
        return self.planner.batches_per_epoch

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything here that decides training."""
        config = self.config
        more = self.planner.determining()
        return digest_of(self.cache.fingerprint, config.batch_size, config.strategy, config.seed, *more)

    def epoch(self, n: int) -> Epoch:
        """Return the planned batches of epoch ``n``, counted from 0, without the choice of variants."""
        return self.planner.epoch(n)

    def batch(self, k: int) -> Batch:
        """Return the ``k``-th batch, counted from 0 across epochs, as it is read."""
        batch = self.planner.batch(k)
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
