"""Reads a built cache: from RAM what fits there, from disk the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from ..errors import CacheMissError
from ..ports import Encoding
from .cache import LATENTS, STRUCTURE
from .draw import Draw
from .encodings import unpack
from .index import CacheIndex
from .store import Kind, Stored, UnreadableFileError, discard, invalidate, path_of, read

T = TypeVar("T")


@dataclass
class TierStats:
    """What a ``TieredCache`` has done so far.

    Attributes:
        hits: reads answered from RAM.
        misses: reads that went to disk.
        ram_bytes: tensor bytes held in RAM now.
    """

    hits: int = 0
    misses: int = 0
    ram_bytes: int = 0

    def sent(self, num_bytes: int) -> None:
        """Count what went to the device."""


@dataclass(frozen=True)
class _Held(Generic[T]):
    value: T
    num_bytes: int


class TieredCache:
    """The encodings of ``index``. Holds at most ``index.ram_cache_bytes`` of tensors, the last used ones.

    What it returns is shared with later reads: don't write into it.
    """

    def __init__(self, index: CacheIndex) -> None:
        self.stats = TierStats()
        self._index = index
        self._held: OrderedDict[str, _Held[Stored]] = OrderedDict()

    def latents(self, draw: Draw) -> Tensor:
        """Return the unscaled latents, float32 on the CPU, without a batch axis.

        Raises:
            CacheMissError: they are gone from disk, or damaged. Build Tiered Cache then runs at the next Queue.
        """
        shape = self._index.image_of(draw).latent_shape
        return self._read("latents", self._index.latents_key(draw), draw, lambda stored: _to_latents(stored, shape))

    def mask(self, draw: Draw) -> Tensor | None:
        """Return the weights of the loss ``[1, ..., h, w]``, float32 on the CPU, or None without a mask.

        Raises:
            CacheMissError: as for ``latents``.
        """
        key = self._index.mask_key(draw)
        if key is None:
            return None
        shape = (1, *self._index.image_of(draw).latent_shape[1:])
        return self._read("mask", key, draw, lambda stored: _to_latents(stored, shape))

    def conditioning(self, draw: Draw) -> Encoding:
        """Return the caption's conditioning, on the CPU.

        Raises:
            CacheMissError: as for ``latents``.
        """
        return self._read("text", self._index.text_key(draw), draw, _to_encoding)

    def _read(self, kind: Kind, key: str, draw: Draw, part: Callable[[Stored], T]) -> T:
        held = self._held.get(key)
        if held is not None:
            self._held.move_to_end(key)
            self.stats.hits += 1
            return part(held.value)
        self.stats.misses += 1
        path = path_of(self._index.root, kind, key)
        try:
            stored = read(path)
            value = part(stored)
        except (UnreadableFileError, KeyError, ValueError, TypeError) as error:
            discard(path)
            invalidate(self._index.root)
            raise CacheMissError(self._index.entries[draw.entry].name) from error
        self._hold(key, stored)
        return value

    def _hold(self, key: str, stored: Stored) -> None:
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in stored.tensors.values())
        if num_bytes > self._index.ram_cache_bytes:
            return
        while self.stats.ram_bytes + num_bytes > self._index.ram_cache_bytes:
            _, oldest = self._held.popitem(last=False)
            self.stats.ram_bytes -= oldest.num_bytes
        self._held[key] = _Held(stored, num_bytes)
        self.stats.ram_bytes += num_bytes


def _to_latents(stored: Stored, shape: tuple[int, ...]) -> Tensor:
    latents = stored.tensors[LATENTS]
    if tuple(latents.shape) != shape:
        raise ValueError(f"latents of shape {tuple(latents.shape)} in place of {shape}")
    return latents


def _to_encoding(stored: Stored) -> Encoding:
    encoding = Encoding(stored.tensors, stored.metadata[STRUCTURE])
    unpack(encoding)  # raises if the two do not fit together
    return encoding
