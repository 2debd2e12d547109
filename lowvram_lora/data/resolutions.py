"""The sizes of a cache's pictures in pixels, as far as they are known."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .index import CacheEntry, EncodedScale

# Pixels of a latent's side where the cache does not tell: those of the usual VAEs.
_USUAL_FACTOR = 8


def resolution_of(entries: Iterable[CacheEntry]) -> int:
    """Return the side of the square that is as large as the largest picture, in pixels rounded up."""
    return max(math.isqrt(math.prod(_pixels(entry)) - 1) + 1 for entry in entries)


def label_of(entry: CacheEntry, encoded: EncodedScale) -> str:
    """Return width x height of ``encoded``, one of the sizes of ``entry``, in words."""
    height, width = encoded.latent_shape[-2:]
    if entry.bucket_px is None:
        return f"latents {width}x{height}"
    tall, wide = (side // latent for side, latent in zip(entry.bucket_px, entry.latent_shape[-2:], strict=True))
    return f"{width * wide}x{height * tall}"


def _pixels(entry: CacheEntry) -> tuple[int, int]:
    if entry.bucket_px is not None:
        return entry.bucket_px
    height, width = entry.latent_shape[-2:]
    return height * _USUAL_FACTOR, width * _USUAL_FACTOR
