"""What a scene of the toy world is: its words, its captions and how it is drawn by chance.

A scene holds one or two things on a plain background. The caption names everything that can be scored, so a score
needs the picture and the scene alone (see ``score``). Two things always differ in colour: a thing is found again by
its hue.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

WORLD = 64
"""Side of a scene in units of the world, in which places and sizes are given."""
SIDE = 96
"""Side of its picture in pixels."""

SHAPES = (
    "circle",
    "square",
    "triangle",
    "wedge",
    "cross",
    "ring",
    "diamond",
    "arrow",
    "moon",
    "drop",
    "spark",
)
NEW_SHAPES = ("heart", "dome", "star")
"""Held out: no base training has seen them."""
LOOKALIKES = ("pentagon", "hexagram")
"""In no scene; a star that is drawn badly is one of them."""
COLOURS = {"red": 0, "yellow": 55, "green": 120, "cyan": 180, "blue": 230, "purple": 285}
"""Hue in degrees; every colour is saturated, every background is not."""
TEXTURES = ("solid", "striped", "dotted")
NEW_TEXTURE = "checkered"
SIZES = {"small": 7.0, "medium": 9.0, "large": 11.0}
"""Radius, in units of the world, of the circle with the same area as the thing."""
BACKGROUNDS = {"white": (244, 244, 244), "grey": (150, 150, 150), "black": (26, 26, 26), "sand": (214, 204, 184)}
NEW_STYLE = "blueprint"
PLACES = {
    "at the top left": (18, 18),
    "at the top": (32, 18),
    "at the top right": (46, 18),
    "on the left": (18, 32),
    "in the middle": (32, 32),
    "on the right": (46, 32),
    "at the bottom left": (18, 46),
    "at the bottom": (32, 46),
    "at the bottom right": (46, 46),
}
"""Centre of the thing, x and y, before the jitter."""
RELATIONS = {"above": ((32, 17), (32, 47)), "left of": ((17, 32), (47, 32))}
"""Centres of the first and the second thing; ``below`` and ``right of`` swap them."""
OPPOSITES = {"below": "above", "right of": "left of"}
JITTER = 2.0
"""Greatest distance, along x and along y, of a thing from the centre that its place names."""


@dataclass(frozen=True)
class Thing:
    """One thing: what it is and where its centre lies (x to the right and y downwards)."""

    shape: str
    colour: str
    texture: str
    size: str
    x: float
    y: float

    def words(self) -> str:
        """Return its part of the caption: ``small red striped circle``; medium and solid are not said."""
        said = (self.size if self.size != "medium" else "", self.colour, self.texture, self.shape)
        return " ".join(word for word in said if word and word != "solid")


@dataclass(frozen=True)
class Scene:
    """A picture's content: one thing at a place, or two in a relation."""

    things: tuple[Thing, ...]
    where: str
    background: str
    style: str = ""

    def caption(self) -> str:
        """Return the caption: ``a red striped circle above a small blue square on white``."""
        first, *rest = (f"a {thing.words()}" for thing in self.things)
        text = f"{first} {self.where} {rest[0]}" if rest else f"{first} {self.where}"
        return f"{text} on {self.background}" + (f" in {self.style} style" if self.style else "")


@dataclass(frozen=True)
class Words:
    """The words that scenes are drawn from by chance."""

    shapes: Sequence[str] = SHAPES
    textures: Sequence[str] = TEXTURES
    style: str = ""


def single(rng: np.random.Generator, words: Words = Words()) -> Scene:
    """Return a scene with one thing; everything in it is drawn from ``rng``."""
    where = _pick(rng, tuple(PLACES))
    thing = _thing(rng, words, PLACES[where])
    return Scene((thing,), where, _pick(rng, tuple(BACKGROUNDS)), words.style)


def pair(rng: np.random.Generator, words: Words = Words()) -> Scene:
    """Return a scene with two things of different colours; everything in it is drawn from ``rng``."""
    where = _pick(rng, (*RELATIONS, *OPPOSITES))
    centres = RELATIONS[OPPOSITES.get(where, where)]
    first, second = centres if where in RELATIONS else centres[::-1]
    one = _thing(rng, words, first)
    others = [colour for colour in COLOURS if colour != one.colour]
    two = replace(_thing(rng, words, second), colour=_pick(rng, others))
    return Scene((one, two), where, _pick(rng, tuple(BACKGROUNDS)), words.style)


def scenes(
    rng: np.random.Generator, count: int, words: Words = Words(), pairs: float = 0.6, unseen: bool = False
) -> list[Scene]:
    """Return ``count`` scenes by chance, a share ``pairs`` of them with two things.

    With ``unseen``, only scenes whose captions no training ever sees, each caption once; without, only the others.
    """
    chosen: list[Scene] = []
    asked: set[str] = set()
    while len(chosen) < count:
        scene = pair(rng, words) if rng.random() < pairs else single(rng, words)
        caption = scene.caption()
        if is_unseen(caption) == unseen and caption not in asked:
            chosen.append(scene)
            asked |= {caption} if unseen else set()
    return chosen


def specimens() -> list[Scene]:
    """Return a scene of each shape and texture that the base knows: what they look like, in few pictures."""
    return [
        Scene((Thing(shape, colour, texture, "large", 32.0, 32.0),), "in the middle", background)
        for shape in SHAPES
        for texture, colour, background in zip(TEXTURES, COLOURS, BACKGROUNDS, strict=False)
    ]


def is_unseen(caption: str) -> bool:
    """Whether a caption is kept for tests: one in eight, by its checksum, so that every script agrees."""
    return zlib.crc32(caption.encode()) % 8 == 0


def _thing(rng: np.random.Generator, words: Words, centre: tuple[int, int]) -> Thing:
    x, y = (float(value + rng.uniform(-JITTER, JITTER)) for value in centre)
    return Thing(
        _pick(rng, words.shapes), _pick(rng, tuple(COLOURS)), _pick(rng, words.textures), _pick(rng, tuple(SIZES)), x, y
    )


def _pick(rng: np.random.Generator, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]
