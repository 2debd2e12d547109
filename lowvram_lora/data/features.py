"""What planning compares samples by: a few numbers of the picture and of the caption, the same on every machine.

Both are float32 and have length 1. Sums are made of whole numbers, so that no processor rounds them in an order of its
own: the same latents give the same bits everywhere.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .words import words

Features = NDArray[np.float32]

TEXT_FEATURES = 256
# So many channels at most for a grid of so many cells a side: up to 256 numbers for the latents in use today.
_GRIDS = ((16, 4), (64, 2))
_STEPS_PER_UNIT = 1 << 16
_LARGEST = float(1 << 40)


def visual_features(latents: Tensor) -> Features:
    """Return the means of ``latents`` over the cells of a grid, channel by channel, scaled to length 1.

    The grid has 4 x 4 cells up to 16 channels, 2 x 2 up to 64 and one cell beyond, so the result depends on the
    number of channels alone and pictures of all shapes compare. Cells are those of adaptive average pooling: row i of
    g goes from ``floor(i H / g)`` to ``ceil((i + 1) H / g)``. Values count in steps of 2^-16.

    Args:
        latents: finite, without a batch axis: (channels, height, width), or (channels, frames, height, width), whose
            frames are averaged. Of any floating type.

    Returns:
        Of shape (channels * cells,). Latents that are zero everywhere give equal numbers.
    """
    values = latents.detach().to("cpu", torch.float64).numpy()
    values = values.reshape(values.shape[0], -1, *values.shape[-2:])
    whole = np.rint(np.clip(values * _STEPS_PER_UNIT, -_LARGEST, _LARGEST)).astype(np.int64)
    channels, _, height, width = whole.shape
    grid = next((cells for most, cells in _GRIDS if channels <= most), 1)
    means = [
        cell.sum(axis=(1, 2, 3)) / (cell.size // channels)
        for rows in _windows(height, grid)
        for columns in _windows(width, grid)
        for cell in (whole[:, :, rows, columns],)
    ]
    return _unit(np.stack(means, axis=1).reshape(-1))


def text_features(caption: str) -> Features:
    """Return the caption's words as a hashed bag of words, scaled to length 1.

    A word is compared without case and in Unicode's form NFKC. Its hash names one of 256 places and a sign (Weinberger
    et al., Feature Hashing for Large Scale Multitask Learning, arXiv:0902.2206). The empty caption counts as one word
    of its own.

    Returns:
        Of shape (256,).
    """
    found = words(unicodedata.normalize("NFKC", caption).casefold())
    counts = _bag(found)
    # Words may cancel each other in the few places there are; what is left is then as good as no caption.
    return _unit(counts if counts.any() else _bag([""]))


def _windows(length: int, cells: int) -> list[slice]:
    return [slice(i * length // cells, -(-(i + 1) * length // cells)) for i in range(cells)]


def _bag(found: list[str]) -> NDArray[np.float64]:
    counts = np.zeros(TEXT_FEATURES)
    for word in found:
        hashed = int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
        counts[hashed % TEXT_FEATURES] += 1.0 if hashed >> 63 else -1.0
    return counts


def _unit(vector: NDArray[np.float64]) -> Features:
    length = math.sqrt(math.fsum(float(value) ** 2 for value in vector))
    if length == 0.0:
        return np.full(vector.shape, 1.0 / math.sqrt(vector.size), dtype=np.float32)
    return (vector / length).astype(np.float32)
