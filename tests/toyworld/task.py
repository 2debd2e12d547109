"""What the judge gives every trainer, and what it takes from each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import base, draw
from .dataset import lesson_scenes
from .studio import Studio

RANK, ALPHA = 16, 8.0
TARGETS = "attention + feed-forward"
"""The node's default. With adapters before the blocks as well, what blocks share has a gradient, and recompute adds its
parts in another order: then it is not exact to the bit."""
BATCH = 8
SAMPLES = 1600
"""Pictures that each trainer sees, in batches of whatever size: 200 steps of 8, or 1600 of 1."""


@dataclass(frozen=True)
class Task:
    """The same pictures for every trainer, as the host's own VAE gives them, with what its CLIP says of the captions.

    Attributes:
        latents: unscaled, ``[N, 16, 12, 12]``.
        texts: the host's CONDITIONING of each picture's caption.
        samples: pictures to see in all.
    """

    latents: torch.Tensor
    texts: Sequence[Any]
    samples: int = SAMPLES


@dataclass(frozen=True)
class Taught:
    """What a training gave.

    Attributes:
        lora: as the host's own loader takes it.
        losses: of each step; what is averaged differs between trainers.
        step_s: median seconds of a step.
    """

    lora: dict[str, torch.Tensor]
    losses: tuple[float, ...]
    step_s: float


Trainer = Callable[[Task, float, int], Taught]
"""Takes a task, a learning rate and a seed."""


def fresh_model() -> Any:
    """Return the base as a MODEL of its own: what a trainer leaves on it reaches nobody else."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(base.FOLDER / base.MODEL))


def task(studio: Studio, concept: str, samples: int = SAMPLES) -> Task:
    """Return the task of learning ``concept``, a shape that the base can't draw."""
    wanted = lesson_scenes(concept)
    texts = [studio.conditioning([scene.caption()]) for scene in wanted]
    return Task(studio.encode([draw.picture(scene) for scene in wanted]).clone(), texts, samples)
