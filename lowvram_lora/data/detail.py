"""What there is to see in one picture, as numbers from 0 to 1. All are taken from one copy of bounded size.

So a measure costs the same for a photo of any size, and pictures are compared at one scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from .pixels import flatten

WORKING_PX = 512

# What the blur leaves out is detail finer than about five pixels.
_BLUR_PX = 2.0
# A picture of white noise has about this deviation of its greys, 0 to 1.
_STRONG_DETAIL = 0.25
_EDGE = 0.1
_COLOUR_LEVELS = 16
_COLOUR_SHARE = 1e-4


def small_copy(image: Image.Image, background: str, long_side_px: int = WORKING_PX) -> Image.Image:
    """Return ``image`` as RGB without transparency, its long side at most ``long_side_px``.

    Args:
        background: ``#rrggbb``, the colour under transparent pixels.
    """
    # Flattened first: a palette, or a colour that stands for transparency, can't be averaged.
    flat = flatten(image, background)
    if max(flat.size) > long_side_px:
        flat.thumbnail((long_side_px, long_side_px), Image.Resampling.BOX)
    if flat.mode == "F":
        return Image.fromarray((np.clip(np.asarray(flat), 0.0, 1.0) * 255.0).round().astype(np.uint8)).convert("RGB")
    return flat


def grey_entropy(image: Image.Image) -> float:
    """Return the Shannon entropy of the 256-bin grey histogram of ``image`` over its maximum of 8 bits."""
    counts = np.asarray(image.convert("L").histogram(), dtype=np.float64)
    shares = counts[counts > 0] / counts.sum()
    return float(max(0.0, -(shares * np.log2(shares)).sum() / 8.0))


def high_frequency(image: Image.Image) -> float:
    """Return the root mean square of the greys (0 to 1) less their Gaussian blur of radius 2 pixels, times 4.

    At most 1, which grey white noise has; a flat colour or a smooth gradient has 0.
    """
    grey = image.convert("L")
    fine = _unit(grey) - _unit(grey.filter(ImageFilter.GaussianBlur(_BLUR_PX)))
    return min(1.0, float(np.sqrt(np.square(fine).mean())) / _STRONG_DETAIL)


def edge_density(image: Image.Image) -> float:
    """Return the share of pixels where the Sobel gradient of the greys is above 0.1.

    The gradient is scaled so that a straight border between black and white gives 1.
    """
    padded = np.pad(_unit(image.convert("L")), 1, mode="edge")
    down = padded[2:] - padded[:-2]
    right = padded[:, 2:] - padded[:, :-2]
    gradient_y = (down[:, :-2] + 2 * down[:, 1:-1] + down[:, 2:]) / 4
    gradient_x = (right[:-2] + 2 * right[1:-1] + right[2:]) / 4
    return float((np.hypot(gradient_y, gradient_x) > _EDGE).mean())


def colour_count(image: Image.Image) -> float:
    """Return the logarithm of the number of colours over that of 4096, the most there can be; one colour gives 0.

    Each channel is cut to 16 levels. A colour counts if 1 of 10,000 pixels has it, so that the noise of a lossy file
    doesn't.
    """
    levels = np.asarray(image.convert("RGB"), dtype=np.int64) // (256 // _COLOUR_LEVELS)
    codes = (levels[..., 0] * _COLOUR_LEVELS + levels[..., 1]) * _COLOUR_LEVELS + levels[..., 2]
    counts = np.bincount(codes.ravel())
    num_colours = int((counts >= max(1.0, codes.size * _COLOUR_SHARE)).sum())
    return float(np.log2(max(1, num_colours)) / np.log2(_COLOUR_LEVELS**3))


ENTROPY, FREQUENCY, EDGES, COLOURS = "entropy", "frequency", "edges", "colours"

# Each takes a small copy.
MEASURES: Mapping[str, Callable[[Image.Image], float]] = {
    ENTROPY: grey_entropy,
    FREQUENCY: high_frequency,
    EDGES: edge_density,
    COLOURS: colour_count,
}


def _unit(grey: Image.Image) -> npt.NDArray[np.float32]:
    return np.asarray(grey, dtype=np.float32) / 255.0
