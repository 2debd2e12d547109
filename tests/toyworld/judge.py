"""Judge a LoRA of the toy world by its loss on unseen scenes and by what the host draws with it.

Loss: the squared error of the velocity on held-out scenes, with noise and noise levels that never change. Shape and
strict: of unseen captions with the new concept. Drift: what the strict score of unseen captions without it has lost.
The LoRA is put on the model by the host's own loader; every LoRA draws from the same noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import draw, scenes, studio
from .scenes import Scene, Words
from .score import scored
from .studio import Studio

COUNT = 48
"""Captions of each kind; with as many, one picture is 0.02."""
SCENES_SEED, DRAWING_SEED, LOSS_SEED = 22, 5, 6
LEVELS = 4
"""Noise levels at which each held-out scene is looked at."""


@dataclass(frozen=True)
class Marks:
    """What a LoRA is worth; ``loss`` and ``drift`` should be low, the others high."""

    loss: float
    shape: float
    strict: float
    drift: float


@dataclass(frozen=True)
class Judge:
    """An exam on one concept.

    Attributes:
        new: unseen scenes with the concept.
        old: unseen scenes without it.
        latents: of the new ones, unscaled.
        old_strict: the base's strict score of the captions without the concept.
    """

    studio: Studio
    new: Sequence[Scene]
    old: Sequence[Scene]
    latents: torch.Tensor
    old_strict: float

    def marks(self, lora: dict[str, torch.Tensor], strength: float = 1.0) -> Marks:
        """Return the marks of a LoRA at a strength."""
        import comfy.sd

        model = comfy.sd.load_lora_for_models(self.studio.model, None, lora, strength, 0.0)[0]
        return Marks(self.loss(model), *self._new(model), self.old_strict - old_strict(self.studio, self.old, model))

    def base_marks(self) -> Marks:
        """Return the marks of the base model, whose drift is 0."""
        return Marks(self.loss(self.studio.model), *self._new(None), 0.0)

    def _new(self, model: Any) -> tuple[float, float]:
        """Shape and strict of the concept."""
        pictures = studio.drawn_scenes(self.new, self.studio, DRAWING_SEED, model)
        marks = scored(pictures, self.new)
        return marks.shape, marks.strict

    def loss(self, model: Any) -> float:
        """Return the validation loss of a MODEL."""
        import comfy.model_management

        generator = torch.Generator().manual_seed(LOSS_SEED)
        table = model.model.model_sampling.sigmas
        count = len(self.latents) * LEVELS
        noise = torch.randn(count, *self.latents.shape[1:], generator=generator)
        # Evenly spread over the table, in an order that has nothing to do with the scenes.
        places = torch.randperm(count, generator=generator) * len(table) // count
        sigmas = table.cpu()[places].clamp(min=1e-3)
        share = sigmas[:, None, None, None]
        [[context, extra]] = self.studio.conditioning([scene.caption() for scene in self.new])
        with torch.inference_mode():
            comfy.model_management.load_models_gpu([model])
            clean = model.model.process_latent_in(self.latents).repeat(LEVELS, 1, 1, 1)
            noised = (1 - share) * clean + share * noise
            predicted = model.model.apply_model(
                noised,
                sigmas,
                c_crossattn=context.repeat(LEVELS, 1, 1),
                y=extra["pooled_output"].repeat(LEVELS, 1),
            )
            return float(((predicted - clean) / share).square().mean())


def judge(opened: Studio, concept: str, count: int = COUNT) -> Judge:
    """Return the exam on ``concept``, a shape, with ``count`` captions of each kind."""
    rng = np.random.default_rng(SCENES_SEED)
    new = scenes.scenes(rng, count, Words(shapes=(concept,)), pairs=0, unseen=True)
    old = scenes.scenes(rng, count, pairs=0.5, unseen=True)
    latents = opened.encode([draw.picture(scene) for scene in new])
    return Judge(opened, new, old, latents, old_strict(opened, old, None))


def old_strict(opened: Studio, wanted: Sequence[Scene], model: Any) -> float:
    """Return the strict score of the scenes as ``model`` draws them, or the base where it is None."""
    return scored(studio.drawn_scenes(wanted, opened, DRAWING_SEED, model), wanted).strict
