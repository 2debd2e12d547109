"""Pictures to learn a new shape from, as a folder that Load Dataset reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from . import draw, scenes
from .scenes import Scene

NUM_PICTURES, SEED = 24, 11


def lesson_scenes(shape: str, count: int = NUM_PICTURES, seed: int = SEED) -> list[Scene]:
    """Return scenes with one thing of the shape; none of the exam's captions is among them."""
    return scenes.scenes(np.random.default_rng(seed), count, scenes.Words(shapes=(shape,)), pairs=0.0)


def write(folder: Path, wanted: Sequence[Scene]) -> Path:
    """Write each scene's picture and caption to ``folder``, ``001.png`` and ``001.txt``; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, scene in enumerate(wanted, start=1):
        file = folder / f"{number:03}.png"
        Image.fromarray(draw.picture(scene)).save(file)
        file.with_suffix(".txt").write_text(scene.caption(), encoding="utf-8")
    return folder
