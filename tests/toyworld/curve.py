"""Draw loss curves as a picture, on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

SIZE, MARGIN = (480, 220), 28
LEAST = 1e-12
"""A loss of zero has no place on a logarithmic scale; it is drawn here."""


def smoothed(curve: Sequence[tuple[int, float]], points: int = 200) -> list[tuple[int, float]]:
    """Return at most ``points`` means over equal parts of a curve of (step, loss)."""
    span = max(1, math.ceil(len(curve) / points))
    parts = [curve[start : start + span] for start in range(0, len(curve), span)]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts]


def write(file: Path, curves: dict[str, Sequence[tuple[int, float]]]) -> None:
    """Write one panel for each curve of (step, loss), one under another, as a PNG."""
    width, height = SIZE
    whole = Image.new("RGB", (width, height * len(curves)), "white")
    for number, (title, curve) in enumerate(curves.items()):
        whole.paste(_panel(title, curve), (0, number * height))
    whole.save(file, optimize=True)


def _panel(title: str, curve: Sequence[tuple[int, float]]) -> Image.Image:
    width, height = SIZE
    panel = Image.new("RGB", SIZE, "white")
    pen = ImageDraw.Draw(panel)
    logs = [math.log(max(loss, LEAST)) for _, loss in curve]
    low, high, last = min(logs), max(logs), curve[-1][0]
    points = [
        (
            MARGIN + (width - 2 * MARGIN) * step / max(last, 1),
            height - MARGIN - (height - 2 * MARGIN) * (value - low) / max(high - low, 1e-9),
        )
        for (step, _), value in zip(curve, logs, strict=True)
    ]
    pen.rectangle((MARGIN, MARGIN, width - MARGIN, height - MARGIN), outline=(190, 190, 190))
    pen.line(points, fill=(40, 90, 200), width=2)
    pen.text((MARGIN, 8), f"{title}: {math.exp(high):.3g} to {math.exp(low):.3g}", fill="black")
    pen.text((width - MARGIN - 70, height - 20), f"step {last + 1}", fill="black")
    return panel
