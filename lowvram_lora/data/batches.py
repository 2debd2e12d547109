"""Which samples make each batch: decided by the seed alone, so that any batch can be had at any time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from ..config import SamplerConfig
from ..errors import DatasetError
from ..units import counted
from .bucketed import Bucketed
from .dataset import digest_of
from .draw import EMPTY_CAPTION, Batch, Draw, Epoch
from .index import CacheIndex
from .planned import Member, Planned
from .population import Shape
from .resolutions import label_of, resolution_of
from .tokens import preset_size


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

    def largest(self, at_most: int | None = None) -> Batch:
        """Return draws of one latent shape that need at least as much as any that go through the network together.

        Args:
            at_most: only so many of a batch do so; what is returned may be more, of which so many need the most.
        """
        ...

    def lines(self) -> Iterable[str]:
        """Return what an epoch looks like, in words."""
        ...

    def determining(self) -> tuple[Any, ...]:
        """Return, as plain data, what decides the batches beside the settings and the encodings."""
        ...


def planner_for(cache: CacheIndex, config: SamplerConfig, sizes: Mapping[Shape, int] | None = None) -> Planner:
    """Return what plans ``config.strategy``.

    Args:
        sizes: with ``adaptive_batch``, how many samples of each latent shape fit a batch, where that is known.
    """
    if config.strategy in ("shuffle", "ordered") and not config.adaptive_batch:
        return Bucketed(cache, config)
    return Planned(cache, config, sizes)


@dataclass(frozen=True)
class BatchRecipe:
    """A cache and the order in which its samples are drawn: a handle that holds no tensor.

    Every epoch shows each sample exactly ``repeats`` times.

    Attributes:
        config: with the preset in place of a ``batch_size`` of 0.
        sizes: with ``adaptive_batch``, latent shapes and how many samples of each fit a batch; empty until LoRA Train
            has asked the plan's memory model.

    Raises:
        DatasetError: the cache has no entries.
    """

    cache: CacheIndex
    config: SamplerConfig
    sizes: tuple[tuple[Shape, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.cache.entries:
            raise DatasetError(["the cache holds no samples; connect a dataset to Build Tiered Cache"])
        if not self.config.batch_size:
            preset = preset_size(resolution_of(self.cache.entries))
            object.__setattr__(self, "config", replace(self.config, batch_size=preset))

    @cached_property
    def planner(self) -> Planner:
        """What decides who goes with whom."""
        return planner_for(self.cache, self.config, dict(self.sizes))

    @property
    def asks_memory(self) -> bool:
        """Whether it is left to device memory how many samples make a batch."""
        return self.config.adaptive_batch and not self.sizes

    def members(self) -> dict[Shape, Member]:
        """Return what can be drawn in an epoch, by latent shape; of a recipe that asks memory."""
        return Planned(self.cache, self.config).members()

    def sizes_by_resolution(self) -> dict[str, int]:
        """Return how many samples of each size, in words, fit a batch; empty where that was not asked."""
        sizes, found = dict(self.sizes), {}
        for entry in self.cache.entries:
            for encoded in entry.scales:
                if encoded.latent_shape in sizes:
                    found[label_of(entry, encoded)] = sizes[encoded.latent_shape]
        return found

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
                f"{counted(len(self.cache.entries), 'image')}, {counted(num_draws, 'draw')} an epoch with repeats",
                f"{counted(self.batches_per_epoch, 'batch', 'batches')} an epoch, batch_size {self.config.batch_size}, "
                f"{self.config.strategy}, seed {self.config.seed}",
                *self.planner.lines(),
            )
        )
