"""A lesson in the toy world through ComfyUI's API: its graph, and the pictures that come out of it.

The demo and the tests train with the same settings and draw with the same nodes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from tests.harness import graph
from tests.harness.host import Event, HostProcess

from . import base, exam, scenes
from .scenes import Scene
from .task import ALPHA, BATCH, RANK, TARGETS

CONCEPT = "heart"
STEPS, RATE = 300, 2e-3

Drawn = dict[str, list[np.ndarray]]
"""Pictures, uint8 ``[96, 96, 3]``, by the part of the questions that they answer."""


def questions(count: int) -> dict[str, list[Scene]]:
    """Return scenes to draw from their captions, none of which is trained on: ``count`` of the exam's a part.

    ``new`` has the new shape; ``old`` has what the base model knows, one thing and two things in turn.
    """
    asked = exam.papers()
    old = [scene for both in zip(asked["single"], asked["pair"], strict=False) for scene in both]
    return {"new": asked[CONCEPT][:count], "old": old[:count]}


def loaders() -> graph.Loaders:
    """Return the nodes that load the toy world's base model (``base.offer_base`` makes its files known)."""
    return graph.sd3_loaders(base.MODEL, base.CLIP, base.VAE)


def options(folder: str, **changes: Any) -> graph.GraphOptions:
    """Return the settings of a lesson from a folder of ComfyUI's input; ``changes`` are other fields."""
    settings: dict[str, Any] = {
        "loaders": loaders(),
        "folder": folder,
        "steps": STEPS,
        "resolution": scenes.SIDE,
        # The side must be a multiple of it, or Load Dataset scales the pictures.
        "dataset": {"bucket_step": 32},
        "batch_size": BATCH,
        "learning_rate": RATE,
        "rank": RANK,
        "train": {"alpha": ALPHA, "targets": TARGETS},
        "sampling_steps": base.STEPS,
        "guidance": base.GUIDANCE,
        "scheduler": base.SCHEDULER,
        "with_loader": False,
    }
    return graph.GraphOptions(**settings | changes)


def sitting(
    name: str, model: graph.Link, asked: Mapping[str, Sequence[Scene]], wanted: graph.GraphOptions
) -> graph.Prompt:
    """Return the nodes that draw all that is asked with ``model``; ``drawn`` finds the pictures by the same name."""
    prompt: graph.Prompt = {}
    for part, part_scenes in asked.items():
        texts = graph.encoded_texts(part, [scene.caption() for scene in part_scenes], wanted)
        prompt |= texts | graph.gallery(f"{part}_{name}", model, texts, wanted)
    return prompt


def drawn(host: HostProcess, entry: Event, name: str, asked: Mapping[str, Sequence[Scene]]) -> Drawn:
    """Return what the sitting of this name drew."""
    return {part: pictures(host, entry, f"save_{part}_{name}") for part in asked}


def pictures(host: HostProcess, entry: Event, node_id: str) -> list[np.ndarray]:
    """Return the pictures that a node of the run shows: uint8 ``[H, W, 3]`` each."""
    files = (host.view(image) for image in entry["outputs"][node_id]["images"])
    return [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in files]
