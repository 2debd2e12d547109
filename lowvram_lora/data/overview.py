"""The picture of Score Complexity: how the scores are spread, the simplest samples and the hardest."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from .complexity import extremes
from .contact import contact_sheet
from .dataset import Dataset
from .histogram import histogram_picture
from .lettering import font

COLUMNS = 6

_HEADING_PX = 22
_PAPER, _INK = (250, 250, 250), (40, 40, 40)

Pixels = npt.NDArray[np.uint8]


def overview(dataset: Dataset) -> Pixels:
    """Return a picture of a scored dataset: RGB ``[H, W, 3]``, W always the same.

    The rows show what the report names as simplest and hardest, in that order. Only these pictures are read; one that
    can't be is crossed out.
    """
    return np.concatenate(list(_parts(dataset)))


def _parts(dataset: Dataset) -> Iterator[Pixels]:
    rows = [(name, row) for name, row in zip(("simplest", "hardest"), extremes(dataset, COLUMNS), strict=True) if row]
    sheets = [(name, contact_sheet(row, dataset.config.background, columns=COLUMNS)) for name, row in rows]
    width = contact_sheet([], dataset.config.background, columns=COLUMNS).shape[1]
    yield histogram_picture([s.complexity.score for s in dataset.samples if s.complexity is not None], width)
    for name, sheet in sheets:
        yield _heading(name, width)
        yield sheet


def _heading(text: str, width: int) -> Pixels:
    line = Image.new("RGB", (width, _HEADING_PX), _PAPER)
    ImageDraw.Draw(line).text((4, 6), text, fill=_INK, font=font(14))
    return np.asarray(line)
