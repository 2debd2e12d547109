"""A contact sheet: small copies of samples, each with its number, bucket and score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from ..errors import PathError
from .dataset import Sample
from .detail import small_copy
from .lettering import font
from .pixels import decode

TILE_PX = 160

_LABEL_PX = 18
_GAP_PX = 4
_PAPER, _INK, _FAULT = (250, 250, 250), (40, 40, 40), (190, 60, 60)


def contact_sheet(
    samples: Sequence[Sample], background: str, *, columns: int = 6, first_number: int = 1
) -> npt.NDArray[np.uint8]:
    """Return small copies of ``samples``, row by row. All of them: take the first ones of a large dataset.

    Under each stands its number, its bucket (width x height) and its score if it has one. File names are left to the
    text beside it, since the letters for them may be missing. A picture that can't be read is crossed out.

    Args:
        background: ``#rrggbb``, the colour under transparent pixels.
        columns: pictures in a row.

    Returns:
        RGB ``[H, W, 3]``; W is that of ``columns`` pictures however many there are.
    """
    cell_width, cell_height = TILE_PX + _GAP_PX, TILE_PX + _LABEL_PX + _GAP_PX
    num_rows = max(1, -(-len(samples) // columns))
    sheet = Image.new("RGB", (columns * cell_width + _GAP_PX, num_rows * cell_height + _GAP_PX), _PAPER)
    draw, letters = ImageDraw.Draw(sheet), font(12)
    for place, sample in enumerate(samples):
        row, column = divmod(place, columns)
        left, top = column * cell_width + _GAP_PX, row * cell_height + _GAP_PX
        tile = _tile(sample, background)
        sheet.paste(tile, (left + (TILE_PX - tile.width) // 2, top + (TILE_PX - tile.height) // 2))
        draw.text((left, top + TILE_PX + 2), _label(first_number + place, sample), fill=_INK, font=letters)
    return np.array(sheet)


def legend(samples: Sequence[Sample], first_number: int = 1) -> list[str]:
    """Return the names that the numbers on a contact sheet stand for, one line each."""
    return [f"  {number}: {sample.name}" for number, sample in enumerate(samples, first_number)]


def _tile(sample: Sample, background: str) -> Image.Image:
    try:
        return small_copy(decode(sample.image.read_bytes(), sample.image, TILE_PX).image, background, TILE_PX)
    except (OSError, PathError):
        return _crossed_out()


def _crossed_out() -> Image.Image:
    tile = Image.new("RGB", (TILE_PX, TILE_PX), _PAPER)
    draw = ImageDraw.Draw(tile)
    for line in ((0, 0, TILE_PX - 1, TILE_PX - 1), (0, TILE_PX - 1, TILE_PX - 1, 0)):
        draw.line(line, fill=_FAULT, width=3)
    return tile


def _label(number: int, sample: Sample) -> str:
    height, width = sample.bucket_px
    score = "" if sample.complexity is None else f"  {sample.complexity.score:.2f}"
    return f"{number}  {width}x{height}{score}"
