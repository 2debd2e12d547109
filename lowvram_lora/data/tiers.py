"""Reads a built cache: from RAM what is held there, from disk the rest. The device holds the current batch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import CacheMissError
from ..ports import Encoding
from ..units import format_bytes
from . import precision
from .cache import STRUCTURE
from .draw import AS_STORED, Draw
from .encodings import unpack
from .index import CacheIndex
from .lock import Lease
from .precision import LATENTS
from .ram import RamPolicy, TierCounters
from .store import Kind, Stored, UnreadableFileError, discard, invalidate, path_of, read

__all__ = ["TierCounters", "TieredCache", "describe"]

T = TypeVar("T")
File = tuple[Kind, str]


class TieredCache:
    """The encodings of ``index``. Holds at most ``index.ram_cache_bytes`` of tensors, encoded as they were asked for.

    What it returns is shared with later reads: don't write into it. ``close`` ends the thread that reads ahead, and
    lets other processes clean the files away.

    Attributes:
        counters: what it has done so far.
    """

    def __init__(self, index: CacheIndex, seed: int = 0) -> None:
        """Start with nothing in RAM.

        Args:
            seed: of what is let into RAM where not everything fits.
        """
        self._index = index
        self._policy = RamPolicy(index.ram_cache_bytes, seed)
        self.counters: TierCounters = self._policy.counters
        self._held: dict[str, Stored] = {}
        self._lease: Lease | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[File, Future[Stored]] = {}

    def latents(self, draw: Draw) -> Tensor:
        """Return the unscaled latents, float32 on the CPU, without a batch axis.

        Raises:
            CacheMissError: they are gone from disk, or damaged. Build Tiered Cache then runs at the next Queue.
        """
        shape, name = self._index.image_of(draw).latent_shape, draw.precision

        def encoded(stored: Stored) -> Stored:
            return Stored(*precision.convert(stored.tensors, stored.metadata, name))

        def decoded(stored: Stored) -> Tensor:
            return _shaped(precision.decode(stored.tensors, stored.metadata), shape)

        file: File = "latents", self._index.latents_key(draw)
        return self._read(file, draw, decoded, as_kept=encoded, suffix="" if name == AS_STORED else name)

    def mask(self, draw: Draw) -> Tensor | None:
        """Return the weights of the loss ``[1, ..., h, w]``, float32 on the CPU, or None without a mask.

        Raises:
            CacheMissError: as for ``latents``.
        """
        key = self._index.mask_key(draw)
        if key is None:
            return None
        shape = (1, *self._index.image_of(draw).latent_shape[1:])
        return self._read(("mask", key), draw, lambda stored: _shaped(stored.tensors[LATENTS], shape))

    def conditioning(self, draw: Draw) -> Encoding:
        """Return the caption's conditioning, on the CPU.

        Raises:
            CacheMissError: as for ``latents``.
        """
        return self._read(("text", self._index.text_key(draw)), draw, _to_encoding)

    def read_ahead(self, draws: Iterable[Draw]) -> None:
        """Start to read what ``draws`` need and RAM does not hold, in one thread; forget what was read for others.

        What goes wrong there shows when it is asked for.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="lowvram_lora_read_ahead")
        wanted = {}
        for ram_key, file in (pair for draw in draws for pair in self._files(draw)):
            if ram_key not in self._policy and file not in wanted:
                wanted[file] = self._ahead.get(file) or self._pool.submit(read, path_of(self._index.root, *file))
        for file in self._ahead.keys() - wanted.keys():
            self._ahead[file].cancel()
        self._ahead = wanted

    def close(self) -> None:
        """End the reading ahead, and say that no file is in use any more. What is asked for later is still read."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._lease is not None:
            self._lease.release()
        self._pool, self._lease, self._ahead = None, None, {}

    def _files(self, draw: Draw) -> Iterable[tuple[str, File]]:
        """Yield what ``draw`` needs, each with its key in RAM."""
        latents, mask = self._index.latents_key(draw), self._index.mask_key(draw)
        yield _ram_key(latents, "" if draw.precision == AS_STORED else draw.precision), ("latents", latents)
        if mask is not None:
            yield _ram_key(mask, ""), ("mask", mask)
        text = self._index.text_key(draw)
        yield _ram_key(text, ""), ("text", text)

    def _read(
        self,
        file: File,
        draw: Draw,
        part: Callable[[Stored], T],
        as_kept: Callable[[Stored], Stored] = lambda stored: stored,
        suffix: str = "",
    ) -> T:
        ram_key = _ram_key(file[1], suffix)
        if self._policy.read(ram_key):
            return part(self._held[ram_key])
        entry = self._index.entries[draw.entry]
        try:
            kept = as_kept(self._from_disk(file))
            value = part(kept)
        except (UnreadableFileError, KeyError, ValueError, TypeError) as error:
            discard(path_of(self._index.root, *file))
            invalidate(self._index.root)
            raise CacheMissError(entry.name) from error
        admission = self._policy.offer(ram_key, kept.num_bytes, entry.complexity_score)
        for evicted in admission.evicted:
            del self._held[evicted]
        if admission.kept:
            self._held[ram_key] = kept
        return value

    def _from_disk(self, file: File) -> Stored:
        if self._lease is None:
            self._lease = Lease(self._index.root, self._index.file_names())
        coming = self._ahead.pop(file, None)
        stored = read(path_of(self._index.root, *file)) if coming is None else coming.result()
        self.counters.count_disk_read(stored.num_bytes)
        return stored


def describe(counters: TierCounters, cap_bytes: int) -> list[str]:
    """Return what the tiers did, in lines of text."""
    reads = counters.hits + counters.misses
    if not reads:
        return []
    return [
        f"Cache: {counters.hits} of {reads} reads from RAM ({counters.hits / reads:.0%}); {counters.disk_reads} files "
        f"({format_bytes(counters.disk_bytes)}) from disk; {counters.evictions} evictions; RAM held "
        f"{format_bytes(counters.ram_bytes)} of {format_bytes(cap_bytes)}.",
        f"Batches to the device: {counters.device_transfers} ({format_bytes(counters.device_bytes)}).",
    ]


def _ram_key(key: str, suffix: str) -> str:
    return f"{key}/{suffix}" if suffix else key


def _shaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape or tensor.dtype is not torch.float32:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} in place of {shape}")
    return tensor


def _to_encoding(stored: Stored) -> Encoding:
    encoding = Encoding(dict(stored.tensors), stored.metadata[STRUCTURE])
    unpack(encoding)  # raises if the two do not fit together
    return encoding
