"""Draw a scene at any size, edges smoothed by drawing four times as large."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from . import scenes
from .scenes import Scene, Thing

FINE = 4
"""Drawn pixels per pixel, along a side."""
PAPER, INK = (22, 42, 110), 235
"""The blueprint style: dark blue, and the white of its lines."""

Points = Sequence[tuple[float, float]]


def picture(scene: Scene, side: int = scenes.SIDE) -> np.ndarray:
    """Return the scene as it should look: uint8, ``[side, side, 3]``."""
    canvas = np.empty((side, side, 3), np.float32)
    canvas[:] = scenes.BACKGROUNDS[scene.background]
    if scene.style == scenes.NEW_STYLE:
        return _blueprint(scene, side)
    for thing in scene.things:
        covered = mask(thing.shape, thing.x, thing.y, scenes.SIZES[thing.size], side)[..., None]
        canvas = canvas * (1 - covered) + paint(thing, side) * covered
    return canvas.round().astype(np.uint8)


def mask(shape: str, x: float, y: float, radius: float, side: int = scenes.SIDE) -> np.ndarray:
    """Return how much of each pixel the shape covers: float32 in [0, 1], ``[side, side]``.

    ``radius`` is that of the circle with the same area, so that shapes of one size are equally large.
    """
    return cover(outlines(shape, radius), x, y, side)


def cover(shapes: Sequence[Points], x: float, y: float, side: int = scenes.SIDE) -> np.ndarray:
    """Return the pixels that the first outline covers without those of the others: float32, ``[side, side]``."""
    fine = Image.new("L", (side * FINE, side * FINE))
    pen = ImageDraw.Draw(fine)
    scale = FINE * side / scenes.WORLD
    for fill, points in zip((255, 0, 0), shapes, strict=False):
        pen.polygon([((x + px) * scale, (y + py) * scale) for px, py in points], fill=fill)
    small = fine.reduce(FINE)
    return np.asarray(small, np.float32) / 255


def outlines(shape: str, radius: float) -> list[Points]:
    """Return the shape's outlines round the origin: the outer one, then its hole if it has one."""
    if shape == "ring":
        # Inside half as wide as outside; the area that is left is that of the circle.
        outer = radius / math.sqrt(1 - 0.5**2)
        return [_round(outer), _round(outer / 2)]
    points = _OUTLINES[shape]()
    scale = radius * math.sqrt(math.pi / _area(points))
    middle_x, middle_y = _centroid(points)
    return [[((px - middle_x) * scale, (py - middle_y) * scale) for px, py in points]]


def paint(thing: Thing, side: int = scenes.SIDE) -> np.ndarray:
    """Return the thing's colour at each pixel: float32 in [0, 255], ``[side, side, 3]`` or ``[3]``."""
    bright, dark = (shade(thing.colour, value) for value in (0.95, 0.45))
    pattern = pattern_of(thing.texture, thing.x, thing.y, side)
    return bright if pattern is None else np.where(pattern[..., None], bright, dark)


def shade(colour: str, value: float) -> np.ndarray:
    """Return a colour of the world at a brightness in [0, 1]: float32 in [0, 255], ``[3]``."""
    return np.array(colorsys.hsv_to_rgb(scenes.COLOURS[colour] / 360, 0.9, value), np.float32) * 255


def pattern_of(texture: str, x: float, y: float, side: int = scenes.SIDE) -> np.ndarray | None:
    """Return where a texture is bright, ``[side, side]``; it lies fast on the thing's centre. Solid has none."""
    middles = (np.mgrid[:side, :side].astype(np.float32) + 0.5) * (scenes.WORLD / side)
    across, down = middles[1] - x, middles[0] - y
    if texture == "striped":
        return np.floor((down + 1.5) / 3) % 2 == 0
    if texture == "dotted":
        return (across + 3) % 6 * ((across + 3) % 6 - 6) + (down + 3) % 6 * ((down + 3) % 6 - 6) > -14
    if texture == "checkered":
        return (np.floor((across + 2) / 4) + np.floor((down + 2) / 4)) % 2 == 0
    return None


def _blueprint(scene: Scene, side: int) -> np.ndarray:
    """White outlines on dark blue, whatever the colours."""
    canvas = np.empty((side, side, 3), np.float32)
    canvas[:] = PAPER
    for thing in scene.things:
        radius = scenes.SIZES[thing.size]
        outer = mask(thing.shape, thing.x, thing.y, radius, side)
        inner = mask(thing.shape, thing.x, thing.y, radius - 2.5, side)
        line = (outer - np.minimum(inner, outer))[..., None]
        canvas = canvas * (1 - line) + np.float32(INK) * line
    return canvas.round().astype(np.uint8)


def _round(radius: float) -> Points:
    return [(radius * math.cos(turn), radius * math.sin(turn)) for turn in _turns()]


def _turns() -> np.ndarray:
    return np.linspace(0, 2 * math.pi, 48, endpoint=False)


def _regular(corners: int, inner: float = 0.0) -> Points:
    """A polygon with one corner upwards; with ``inner``, a star whose notches lie at that share of the radius."""
    radii = (1.0, inner) if inner else (1.0,)
    count = corners * len(radii)
    turns = [(2 * math.pi * i / count - math.pi / 2, radii[i % len(radii)]) for i in range(count)]
    return [(radius * math.cos(angle), radius * math.sin(angle)) for angle, radius in turns]


def _cross() -> Points:
    arm, half = 1.0, 0.36
    quarter = [(half, -half), (half, -arm), (-half, -arm)]
    turned: list[tuple[float, float]] = []
    for _ in range(4):
        turned += quarter
        quarter = [(py, -px) for px, py in quarter]
    return turned


def _arrow() -> Points:
    """An arrow that points upwards."""
    return [(0, -1), (0.85, 0), (0.33, 0), (0.33, 1), (-0.33, 1), (-0.33, 0), (-0.85, 0)]


def _moon() -> Points:
    """A crescent, open to the right: a disc without one a little smaller, whose centre lies to the right of its own."""
    outer, inner, apart = 1.0, 0.8, 0.55
    across = (outer**2 - inner**2 + apart**2) / (2 * apart)
    first = math.atan2(math.sqrt(outer**2 - across**2), across)
    last = math.atan2(math.sqrt(outer**2 - across**2), across - apart)
    there = [(math.cos(turn), math.sin(turn)) for turn in np.linspace(first, 2 * math.pi - first, 40)]
    back = [
        (apart + inner * math.cos(turn), inner * math.sin(turn)) for turn in np.linspace(2 * math.pi - last, last, 40)
    ]
    return [*there, *back[1:-1]]


def _drop() -> Points:
    """A drop that falls: round below and pointed above."""
    return [(math.sin(turn) * math.sin(turn / 2) ** 1.6, -math.cos(turn) * 1.2) for turn in _turns()]


def _heart() -> Points:
    """The curve x = 16 sin³ t, y = 13 cos t - 5 cos 2t - 2 cos 3t - cos 4t."""
    turns = _turns()
    x = 16 * np.sin(turns) ** 3
    y = 13 * np.cos(turns) - 5 * np.cos(2 * turns) - 2 * np.cos(3 * turns) - np.cos(4 * turns)
    return [(float(px), float(-py)) for px, py in zip(x, y, strict=True)]


def _area(points: Points) -> float:
    """The shoelace formula, without the sign."""
    pairs = zip(points, [*points[1:], points[0]], strict=True)
    return abs(sum(ax * by - bx * ay for (ax, ay), (bx, by) in pairs)) / 2


def _centroid(points: Points) -> tuple[float, float]:
    """The centroid of the polygon's area."""
    x = y = twice = 0.0
    for (ax, ay), (bx, by) in zip(points, [*points[1:], points[0]], strict=True):
        part = ax * by - bx * ay
        twice += part
        x += (ax + bx) * part
        y += (ay + by) * part
    return x / (3 * twice), y / (3 * twice)


_OUTLINES = {
    "circle": lambda: _round(1.0),
    "square": lambda: [(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)],
    "triangle": lambda: _regular(3),
    "wedge": lambda: [(x, -y) for x, y in _regular(3)],
    "cross": _cross,
    "diamond": lambda: [(0.0, -1.0), (0.7, 0.0), (0.0, 1.0), (-0.7, 0.0)],
    "pentagon": lambda: _regular(5),
    "arrow": _arrow,
    "moon": _moon,
    "drop": _drop,
    "spark": lambda: _regular(4, 0.4),
    "star": lambda: _regular(5, 0.382),
    "heart": _heart,
    "dome": lambda: [(x, y) for x, y in _round(1.0) if y <= 1e-9],
    "hexagram": lambda: _regular(6, 0.58),
}
