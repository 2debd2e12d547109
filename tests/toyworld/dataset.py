"""Pictures to learn a new shape from, as a folder that Load Dataset reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from . import draw, scenes
from .scenes import Scene

NUM_PICTURES, SEED = 128, 11


def lesson_scenes(shape: str, count: int = NUM_PICTURES, seed: int = SEED) -> list[Scene]:
    """Return scenes to learn a shape from; none of the exam's captions is among them.

    A quarter has the shape alone, a quarter has it beside something old, and half of them are old: a LoRA that sees
    nothing but the new shape soon draws nothing else.
    """
    rng = np.random.default_rng(seed)
    alone = scenes.scenes(rng, count // 4, scenes.Words(shapes=(shape,)), pairs=0.0)
    old = scenes.scenes(rng, count - 2 * (count // 4))
    beside: list[Scene] = []
    while len(beside) < count // 4:
        scene = _with(shape, int(rng.integers(2)), scenes.scenes(rng, 1, pairs=1.0)[0])
        if not scenes.is_unseen(scene.caption()):
            beside.append(scene)
    return [*alone, *beside, *old]


def _with(shape: str, place: int, scene: Scene) -> Scene:
    """The scene with the shape in one of its places."""
    things = list(scene.things)
    things[place] = replace(things[place], shape=shape)
    return replace(scene, things=tuple(things))


def write(folder: Path, wanted: Sequence[Scene]) -> Path:
    """Write each scene's picture and caption to a new folder, ``001.png`` and ``001.txt``; return it.

    Raises:
        FileExistsError: there is such a folder; what it holds would be learned as well.
    """
    folder.mkdir(parents=True)
    for number, scene in enumerate(wanted, start=1):
        file = folder / f"{number:03}.png"
        Image.fromarray(draw.picture(scene)).save(file)
        file.with_suffix(".txt").write_text(scene.caption(), encoding="utf-8")
    return folder
