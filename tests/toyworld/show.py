"""Show what a LoRA learned: one sheet of pictures beside the truth, and a table of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from . import draw, scenes, score
from .lesson import Drawn
from .scenes import Scene

ENLARGED = 3
SIDE_PX, GAP_PX, MARGIN_PX = ENLARGED * scenes.SIDE, 12, 16
HEADING_PX, CAPTION_PX = 24, 19
PAPER, INK, FAINT = (255, 255, 255), (30, 30, 30), (225, 225, 225)


@dataclass(frozen=True)
class Row:
    """A caption and its pictures, uint8 ``[96, 96, 3]``, one a column; None leaves a place empty."""

    caption: str
    pictures: Sequence[np.ndarray | None]


def row(scene: Scene, before: np.ndarray, after: np.ndarray) -> Row:
    """Return a scene's row: what the base model drew, what the LoRA drew, and the truth."""
    return Row(scene.caption(), (before, after, draw.picture(scene)))


def sheet(headings: Sequence[str], rows: Sequence[Row]) -> Image.Image:
    """Return the rows as one picture, each under its caption, enlarged without smoothing."""
    heading, caption = ImageFont.load_default(HEADING_PX), ImageFont.load_default(CAPTION_PX)
    lefts = [MARGIN_PX + column * (SIDE_PX + GAP_PX) for column in range(len(headings))]
    head_px, row_px = 2 * HEADING_PX, CAPTION_PX + 2 * GAP_PX + SIDE_PX
    size = (lefts[-1] + SIDE_PX + MARGIN_PX, head_px + len(rows) * row_px + MARGIN_PX)
    page = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(page)
    for left, text in zip(lefts, headings, strict=True):
        pen.text((left, MARGIN_PX), text, INK, heading)
    for number, row in enumerate(rows):
        top = head_px + number * row_px
        text = _shortened(row.caption, caption, size[0] - 2 * MARGIN_PX)
        pen.text((MARGIN_PX, top + GAP_PX // 2), text, INK, caption)
        for left, picture in zip(lefts, row.pictures, strict=True):
            place = (left, top + CAPTION_PX + GAP_PX)
            if picture is not None:
                page.paste(_enlarged(picture), place)
                pen.rectangle((*place, place[0] + SIDE_PX - 1, place[1] + SIDE_PX - 1), outline=FAINT)
    return page


def _shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """The text, cut where it would leave the page."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"


def _enlarged(picture: np.ndarray) -> Image.Image:
    return Image.fromarray(picture).resize((SIDE_PX, SIDE_PX), Image.Resampling.NEAREST)


def table(concept: str, asked: Mapping[str, Sequence[Scene]], before: Drawn, after: Drawn) -> str:
    """Return the scores of the base model and of the LoRA, and the drift: the old strict score that was lost."""
    new, old = ([score.scored(drawn[part], asked[part]) for drawn in (before, after)] for part in ("new", "old"))
    lines = [f"{'share of unseen captions drawn right':<44}{'base':>8}{'LoRA':>8}"]
    lines.append(_line(f"{concept}, {len(asked['new'])} captions: shape", [each.shape for each in new]))
    lines.append(_line(f"{concept}: strict (colour, place, shape, clean)", [each.strict for each in new]))
    lines.append(_line(f"old shapes, {len(asked['old'])} captions: strict", [each.strict for each in old]))
    lines.append(f"{'drift (strict score that the old lost)':<52}{old[0].strict - old[1].strict:>8.2f}")
    return "\n".join(lines)


def _line(text: str, values: Sequence[float]) -> str:
    return f"{text:<44}" + "".join(f"{value:>8.2f}" for value in values)
