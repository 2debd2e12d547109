"""How scores are spread, as lines of text and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from .lettering import font

_BINS = 8
_BAR_WIDTH = 30
# Equal but for rounding.
_SAME = 1e-6

_PICTURE_BINS = 20
_HEIGHT_PX = 240
_MARGIN_PX = 28
_PAPER, _INK, _BAR = (250, 250, 250), (40, 40, 40), (70, 120, 190)


def bars(scores: Sequence[float]) -> Iterator[str]:
    """Yield lines of text: a bar for each of 8 ranges between the least and the greatest of ``scores``."""
    low, high = min(scores), max(scores)
    if high - low < _SAME:
        yield f"  {low:.3f}: all of them"
        return
    counts, edges = np.histogram(scores, bins=_BINS, range=(low, high))
    for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True):
        bar = "#" * round(_BAR_WIDTH * int(count) / int(counts.max()))
        yield f"  {left:.3f} to {right:.3f} {bar:<{_BAR_WIDTH}} {count}"


def histogram_picture(scores: Sequence[float], width_px: int) -> npt.NDArray[np.uint8]:
    """Return a picture of how many of ``scores`` are in each of 20 ranges from 0 to 1.

    Returns:
        RGB ``[240, width_px, 3]``. A range that holds any score has a bar of at least one pixel.
    """
    counts, edges = np.histogram(np.clip(scores, 0.0, 1.0), bins=_PICTURE_BINS, range=(0.0, 1.0))
    picture = Image.new("RGB", (width_px, _HEIGHT_PX), _PAPER)
    draw, letters = ImageDraw.Draw(picture), font(12)
    base, full = _HEIGHT_PX - _MARGIN_PX, _HEIGHT_PX - 2 * _MARGIN_PX
    span = width_px - 2 * _MARGIN_PX
    most = max(1, int(counts.max(initial=0)))
    for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True):
        if count:
            height = max(1, round(full * int(count) / most))
            x0, x1 = _MARGIN_PX + round(span * left) + 1, _MARGIN_PX + round(span * right) - 1
            draw.rectangle((x0, base - height, max(x0, x1), base - 1), fill=_BAR)
    draw.line((_MARGIN_PX, base, _MARGIN_PX + span, base), fill=_INK)
    for tenth in range(0, 11, 2):
        draw.text((_MARGIN_PX + span * tenth / 10 - 8, base + 6), f"{tenth / 10:.1f}", fill=_INK, font=letters)
    draw.text((_MARGIN_PX, 6), f"samples by score; highest bar: {int(counts.max(initial=0))}", fill=_INK, font=letters)
    return np.array(picture)
