"""Which samples make each batch: decided by the seed alone, so that any batch can be had at any time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..config import SamplerConfig
from ..errors import DatasetError
from .cache import CacheEntry, CacheIndex
from .dataset import digest_of

Batch = tuple[int, ...]
Epoch = tuple[Batch, ...]


@dataclass(frozen=True)
class BatchRecipe:
    """A cache and the order in which its samples are drawn: a handle that holds no tensor.

    Every epoch shows each sample exactly ``repeats`` times and has ``batches_per_epoch`` batches. The samples
    of a batch have one latent shape; a bucket with too few for a full batch gives a smaller one.

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
    def batches_per_epoch(self) -> int:
        """Number of batches, the same in every epoch."""
        return sum(-(-_num_draws(turns) // self.config.batch_size) for turns in self._buckets.values())

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything here that decides training."""
        config = self.config
        return digest_of(self.cache.fingerprint, config.batch_size, config.strategy, config.seed)

    def epoch(self, n: int) -> Epoch:
        """Return the batches of epoch ``n``, counted from 0, as indices into ``cache.entries``."""
        drawn = self._drawn.get(n)
        if drawn is None:
            drawn = self._draw(n)
            # Training asks for batch after batch of one epoch; only that one is kept.
            self._drawn.clear()
            self._drawn[n] = drawn
        return drawn

    def batch(self, k: int) -> Batch:
        """Return the ``k``-th batch, counted from 0 across epochs."""
        n, position = divmod(k, self.batches_per_epoch)
        return self.epoch(n)[position]

    def report(self) -> str:
        """Return what an epoch looks like, in words."""
        num_draws = sum(entry.repeats for entry in self.cache.entries)
        return "\n".join(
            (
                f"{len(self.cache.entries)} images, {num_draws} draws an epoch with repeats",
                f"{self.batches_per_epoch} batches an epoch, batch_size {self.config.batch_size}, "
                f"{self.config.strategy}, seed {self.config.seed}",
                *self._bucket_lines(),
            )
        )

    @cached_property
    def _buckets(self) -> dict[tuple[int, ...], list[Batch]]:
        """The draws of an epoch by latent shape, in turns: every entry once, then again those with more repeats."""
        entries = self.cache.entries
        shapes = dict.fromkeys(entry.latent_shape for entry in entries)
        return {shape: _turns(entries, shape) for shape in shapes}

    def _draw(self, n: int) -> Epoch:
        # Text seeds are hashed by Python itself, the same on every version and machine.
        source = random.Random(f"{self.config.seed}/{n}")
        is_shuffled = self.config.strategy == "shuffle"
        batches: list[Batch] = []
        for turns in self._buckets.values():
            # Shuffled turn by turn, so that a batch holds one image twice only where it can't be helped.
            order = [index for turn in turns for index in (source.sample(turn, len(turn)) if is_shuffled else turn)]
            batches += _chunks(order, self.config.batch_size)
        if is_shuffled:
            source.shuffle(batches)
        return tuple(batches)

    def _bucket_lines(self) -> Iterator[str]:
        yield "Buckets (width x height):"
        size = self.config.batch_size
        for turns in self._buckets.values():
            label = _label(self.cache.entries[turns[0][0]])
            num_images, num_draws = len(turns[0]), _num_draws(turns)
            last = num_draws % size
            held = f"{num_draws}" if num_draws < size else f"{size}, the last {last}" if last else f"{size}"
            yield f"  {label}: {num_images} images, {num_draws} draws, {-(-num_draws // size)} batches of {held}"
            if num_draws < size:
                kind = "images" if num_draws == num_images else "draws an epoch"
                yield (
                    f"batch_size {size}, but bucket {label} holds only {num_draws} {kind}: its batches hold {num_draws}"
                )


def _turns(entries: Sequence[CacheEntry], shape: tuple[int, ...]) -> list[Batch]:
    members = [(index, entry.repeats) for index, entry in enumerate(entries) if entry.latent_shape == shape]
    most = max(repeats for _, repeats in members)
    return [tuple(index for index, repeats in members if repeats > turn) for turn in range(most)]


def _num_draws(turns: Sequence[Batch]) -> int:
    return sum(len(turn) for turn in turns)


def _chunks(order: Sequence[int], size: int) -> list[Batch]:
    return [tuple(order[start : start + size]) for start in range(0, len(order), size)]


def _label(entry: CacheEntry) -> str:
    height, width = entry.bucket_px or entry.latent_shape[-2:]
    return f"{width}x{height}" if entry.bucket_px else f"latents {width}x{height}"
