"""Score a picture against a scene, from the picture alone.

A thing is found by its hue, since the colours of a scene differ and its background has none. What is found is then
compared with what was asked: its area (colour), its centre (place) and which outline covers it best (shape). ``clean``
holds if the rest of the picture is the background that was asked for and nothing else. ``strict`` holds only if all of
these hold for every thing. Every score is a share in [0, 1]; a scene with two things counts each by half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import ndimage

from . import draw, scenes
from .scenes import Scene, Thing

HUE_TOLERANCE = 27.0
"""Degrees; the closest two colours of the world lie 50 apart."""
LEAST_SATURATION, LEAST_VALUE = 0.4, 0.25
AREA_RANGE = (0.4, 2.2)
"""Found area over asked area that still counts as the colour asked for; sizes differ by 1.5 in area at least."""
PLACE_TOLERANCE = 7.0
"""Units along x and along y from the centre that the place names; the places lie 14 apart."""
RELATION_MARGIN = 8.0
UNIT = scenes.SIDE / scenes.WORLD
"""Pixels per unit of the world."""
LEAST_AREA = 24 * UNIT**2
"""Pixels; the smallest thing of the world has 150 times the square of the unit."""
MOST_STRAY = 0.01
"""Share of the picture that may be something else than the background without being a thing: specks."""
LEAST_OVERLAP = 0.6
"""Intersection over union with the best outline, below which nothing is drawn that has a shape."""
LEAST_PATTERN = 0.5
"""Correlation with the best pattern."""
NEAR = 45
"""Greatest difference of a channel, of 255, between a pixel and its background; white and sand lie 60 apart."""
EVERY_SHAPE = (*scenes.SHAPES, *scenes.NEW_SHAPES, *scenes.LOOKALIKES)
EVERY_PATTERN = (*scenes.TEXTURES[1:], scenes.NEW_TEXTURE)


@dataclass(frozen=True)
class Score:
    """Shares of a scene's things that are right, each in [0, 1]; one picture's ``clean`` and ``strict`` are 0 or 1."""

    colour: float
    place: float
    shape: float
    texture: float
    clean: float
    strict: float


def score(picture: np.ndarray, scene: Scene) -> Score:
    """Return the score of a picture, uint8 ``[96, 96, 3]``, against the scene it should show."""
    found = [find(picture, thing.colour) for thing in scene.things]
    placed = _placed(found, scene)
    parts = [
        (_coloured(area, thing), at, shape_of(area) == thing.shape, texture_of(picture, area) == thing.texture)
        for area, thing, at in zip(found, scene.things, placed, strict=True)
    ]
    shares = (sum(part[i] for part in parts) / len(parts) for i in range(4))
    clean = is_clean(picture, scene, found)
    strict = clean and all(colour and place and shape for colour, place, shape, _ in parts)
    return Score(*shares, clean=float(clean), strict=float(strict))


def mean(scores: Sequence[Score]) -> Score:
    """Return the mean of each share."""
    return Score(*(float(np.mean([getattr(one, name) for one in scores])) for name in Score.__annotations__))


def scored(pictures: Sequence[np.ndarray], wanted: Sequence[Scene]) -> Score:
    """Return the mean score of pictures against the scenes they should show, in order."""
    return mean([score(picture, scene) for picture, scene in zip(pictures, wanted, strict=True)])


def find(picture: np.ndarray, colour: str) -> np.ndarray:
    """Return the largest connected area of a colour: bool, ``[96, 96]``; all False if there is none to speak of."""
    hue, saturation, value = _hsv(picture)
    off = np.abs((hue - scenes.COLOURS[colour] + 180) % 360 - 180)
    painted = (off < HUE_TOLERANCE) & (saturation > LEAST_SATURATION) & (value > LEAST_VALUE)
    pieces, count = ndimage.label(painted, np.ones((3, 3)))
    if not count:
        return painted
    sizes = np.bincount(pieces.ravel())[1:]
    largest = np.asarray(pieces == 1 + int(sizes.argmax()))
    return largest if largest.sum() >= LEAST_AREA else np.zeros_like(largest)


def shape_of(area: np.ndarray) -> str:
    """Return the shape whose outline, as large as the area and on its centre, covers it best; "" if none does."""
    if not area.any():
        return ""
    overlaps = {shape: _overlap(area, shape) for shape in EVERY_SHAPE}
    best = max(overlaps, key=lambda shape: overlaps[shape])
    return best if overlaps[best] >= LEAST_OVERLAP else ""


def texture_of(picture: np.ndarray, area: np.ndarray) -> str:
    """Return the texture of an area: the pattern that its brightness follows best, solid if it hardly varies."""
    inside = ndimage.binary_erosion(area)
    value = _hsv(picture)[2][inside]
    if value.size < 12 or float(value.std()) < 0.08:
        return "solid" if value.size else ""
    x, y = _centre(area)
    likeness = {name: _correlation(value, inside, name, x, y) for name in EVERY_PATTERN}
    best = max(likeness, key=lambda name: likeness[name])
    return best if likeness[best] >= LEAST_PATTERN else ""


def is_clean(picture: np.ndarray, scene: Scene, found: Sequence[np.ndarray]) -> bool:
    """Whether the picture is the scene's background wherever nothing was found, but for specks and soft edges."""
    if not all(area.any() for area in found):
        return False
    rest = ~ndimage.binary_dilation(np.logical_or.reduce(found), iterations=3)
    away = picture - np.float32(scenes.BACKGROUNDS[scene.background])
    other = (np.abs(away).max(-1) > NEAR) & rest
    pieces, _ = ndimage.label(other)
    is_plain = bool((np.abs(np.median(away[rest], 0)) <= NEAR / 2).all()) and other.mean() <= MOST_STRAY
    return is_plain and bool((np.bincount(pieces.ravel())[1:] < LEAST_AREA / 2).all())


def blueprint(picture: np.ndarray) -> float:
    """Return how far a picture is in the new style: the share of pixels that are its dark blue or its white."""
    pixels = picture.reshape(-1, 3).astype(np.float32)
    near = [np.abs(pixels - np.float32(colour)).max(1) < 48 for colour in (draw.PAPER, (draw.INK,) * 3)]
    # White paper with a blue thing on it has both colours as well, but hardly any blue.
    return float((near[0] | near[1]).mean()) if near[0].mean() > 0.5 else 0.0


def _coloured(area: np.ndarray, thing: Thing) -> bool:
    asked = np.pi * (scenes.SIZES[thing.size] * UNIT) ** 2
    low, high = AREA_RANGE
    return bool(low * asked <= area.sum() <= high * asked)


def _placed(found: Sequence[np.ndarray], scene: Scene) -> list[bool]:
    """Whether each thing is where the caption says."""
    if not all(area.any() for area in found):
        # What is there is in no relation to what is not.
        return [False] * len(found)
    centres = [_centre(area) for area in found]
    if len(centres) == 1:
        asked = np.array(scenes.PLACES[scene.where])
        return [bool((np.abs(centres[0] - asked) <= PLACE_TOLERANCE).all())]
    first, second = centres if scene.where in scenes.RELATIONS else centres[::-1]
    along = 1 if scenes.OPPOSITES.get(scene.where, scene.where) == "above" else 0
    gap = second - first
    right = gap[along] >= RELATION_MARGIN and abs(gap[1 - along]) <= gap[along]
    return [bool(right)] * 2


def _centre(area: np.ndarray) -> np.ndarray:
    """The area's centre in units of the world, x and y."""
    return (np.array(ndimage.center_of_mass(area))[::-1] + 0.5) / UNIT


def _overlap(area: np.ndarray, shape: str) -> float:
    """Intersection over union of the area and the shape, best over a few sizes and shifts round the centre."""
    y, x = ndimage.center_of_mass(area)
    radius = float(np.sqrt(area.sum() / np.pi)) / UNIT
    best = 0.0
    for scale in (0.94, 1.0, 1.06):
        template = _template(shape, round(radius * scale * 4) / 4)
        for down in (-1, 0, 1):
            for across in (-1, 0, 1):
                moved = _moved(template, round(y) + down, round(x) + across)
                union = (area | moved).sum()
                best = max(best, float((area & moved).sum() / union))
    return best


@lru_cache(maxsize=512)
def _template(shape: str, radius: float) -> np.ndarray:
    """The shape in the middle of a field twice as large as a scene: bool, ``[192, 192]``."""
    # Its centre in the middle of a pixel, as that of an area is given.
    middle = scenes.WORLD / 2 + 0.5 / UNIT
    field = np.zeros((2 * scenes.SIDE, 2 * scenes.SIDE), bool)
    low = scenes.SIDE // 2
    field[low : low + scenes.SIDE, low : low + scenes.SIDE] = draw.mask(shape, middle, middle, radius) > 0.5
    return field


def _moved(template: np.ndarray, y: int, x: int) -> np.ndarray:
    top, left = scenes.SIDE - y, scenes.SIDE - x
    return template[top : top + scenes.SIDE, left : left + scenes.SIDE]


def _correlation(value: np.ndarray, inside: np.ndarray, texture: str, x: float, y: float) -> float:
    """The best correlation of the brightness with a pattern, over shifts of the pattern."""
    shifts = (-2.0, -1.0, 0.0, 1.0, 2.0)
    patterns = (draw.pattern_of(texture, x + across, y + down) for across in shifts for down in shifts)
    return max((_likeness(value, pattern[inside]) for pattern in patterns if pattern is not None), default=0.0)


def _likeness(value: np.ndarray, pattern: np.ndarray) -> float:
    if pattern.all() or not pattern.any():
        return 0.0
    return float(np.corrcoef(value, pattern.astype(np.float32))[0, 1])


def _hsv(picture: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hue in degrees, saturation and value in [0, 1], as ``colorsys`` has them, for every pixel."""
    red, green, blue = np.moveaxis(picture.astype(np.float32) / 255, -1, 0)
    value = np.maximum(np.maximum(red, green), blue)
    span = value - np.minimum(np.minimum(red, green), blue)
    safe = np.where(span > 0, span, 1)
    hue = np.select(
        [value == red, value == green], [(green - blue) / safe % 6, (blue - red) / safe + 2], (red - green) / safe + 4
    )
    return hue * 60, np.where(value > 0, span / np.where(value > 0, value, 1), 0), value
