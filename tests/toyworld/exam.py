"""The base model's exam: what it draws of captions that it never saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .scenes import NEW_SHAPES, Scene, Words, scenes
from .score import Score, scored
from .studio import Studio, drawn_scenes

SEED, COUNT, BATCH = 77, 192, 48


def papers(count: int = COUNT, seed: int = SEED) -> dict[str, list[Scene]]:
    """Return the scenes to draw, the same every time: ``count`` with one thing, half as many with two things, and a
    quarter as many with one of each held-out shape.
    """
    rng = np.random.default_rng(seed)
    asked = {
        "single": scenes(rng, count, pairs=0, unseen=True),
        "pair": scenes(rng, count // 2, pairs=1, unseen=True),
    }
    for shape in NEW_SHAPES:
        asked[shape] = scenes(rng, count // 4, Words(shapes=(shape,)), pairs=0, unseen=True)
    return asked


def marked(studio: Studio, asked: Sequence[Scene], seed: int = SEED, model: Any = None) -> Score:
    """Draw the scenes, ``BATCH`` at a time, and return the mean score."""
    parts = [asked[start : start + BATCH] for start in range(0, len(asked), BATCH)]
    pictures = [picture for i, part in enumerate(parts) for picture in drawn_scenes(part, studio, seed + i, model)]
    return scored(pictures, asked)
