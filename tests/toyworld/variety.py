"""Pictures of no particular world: random outlines, colours and patterns.

The picture encoder learns from them beside the scenes. Without them it could only show what the base model draws, and
would cap what a LoRA can learn.
"""

from __future__ import annotations

import math

import numpy as np

from . import draw, scenes


def picture(rng: np.random.Generator, side: int = scenes.SIDE) -> np.ndarray:
    """Return one to three random things on a random background: uint8, ``[side, side, 3]``."""
    canvas = np.empty((side, side, 3), np.float32)
    canvas[:] = _colour(rng)
    for _ in range(rng.integers(1, 4)):
        radius = rng.uniform(6, 16)
        x, y = rng.uniform(8, scenes.WORLD - 8, 2)
        outline = _outline(rng, radius)
        holes = [[(px * share, py * share) for px, py in outline] for share in (rng.uniform(0.3, 0.85),)]
        covered = draw.cover([outline, *holes] if rng.random() < 0.3 else [outline], x, y, side)[..., None]
        pattern = draw.pattern_of(str(rng.choice(("solid", *scenes.TEXTURES, scenes.NEW_TEXTURE))), x, y, side)
        fill = _colour(rng) if pattern is None else np.where(pattern[..., None], _colour(rng), _colour(rng))
        canvas = canvas * (1 - covered) + fill * covered
    return canvas.round().astype(np.uint8)


def _colour(rng: np.random.Generator) -> np.ndarray:
    """Any colour, or one of the world's, or a grey."""
    kind = rng.random()
    if kind < 0.5:
        return draw.shade(str(rng.choice(tuple(scenes.COLOURS))), float(rng.uniform(0.3, 1.0)))
    if kind < 0.7:
        return np.full(3, rng.uniform(10, 250), np.float32)
    return rng.uniform(0, 255, 3).astype(np.float32)


def _outline(rng: np.random.Generator, radius: float) -> draw.Points:
    """A smooth blob, or a polygon whose corners lie at random distances; star-like where these alternate."""
    turn = rng.uniform(0, 2 * math.pi)
    if rng.random() < 0.3:
        angles = np.linspace(0, 2 * math.pi, 40, endpoint=False)
        waves = sum(rng.uniform(-0.2, 0.2) * np.cos(k * angles + rng.uniform(0, 6.3)) for k in (2, 3, 4, 5))
        radii = radius * (1 + waves)
    else:
        corners = int(rng.integers(3, 9))
        inner = rng.uniform(0.35, 1.0)
        radii = np.array([radius * share for _ in range(corners) for share in (1.0, inner)])
        radii *= rng.uniform(0.85, 1.15, len(radii))
        angles = np.linspace(0, 2 * math.pi, len(radii), endpoint=False)
    return [(r * math.cos(a + turn), r * math.sin(a + turn)) for r, a in zip(radii, angles, strict=True)]
