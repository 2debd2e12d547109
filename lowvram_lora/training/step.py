"""One optimizer step: batches to gradients to an update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import OptimConfig
from ..data.batches import BatchRecipe
from ..data.cache import CacheEntry
from ..data.tiers import TieredCache
from ..errors import UnsupportedModelError
from ..memory.random_state import forked
from ..ports import Cancel, Denoiser
from . import objective

# A fresh network's weighted loss is around 1; six orders above it nothing is being learned any more.
DIVERGED_LOSS = 1e6
# fp16 gradients that overflow are repeated with half the scale; from 2 ** 16 this reaches 1.
MAX_REPEATS = 16


class NotFiniteError(ArithmeticError):
    """The loss or the gradients of a step are not usable numbers. Internal: ``run`` turns it into a report."""


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Where a step's samples come from."""

    recipe: BatchRecipe
    cache: TieredCache
    seed: int

    def window(self, step: int, accumulation: int) -> list[list[CacheEntry]]:
        """Return the batches of optimizer step ``step`` (0-based)."""
        entries = self.recipe.cache.entries
        first = step * accumulation
        return [[entries[i] for i in self.recipe.batch(k)] for k in range(first, first + accumulation)]


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """What stays the same from step to step."""

    denoiser: Denoiser
    batches: Batches
    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    schedule: Any
    scaler: torch.amp.GradScaler
    config: OptimConfig
    cancel: Cancel

    def gradients(self, step: int) -> tuple[float, float]:
        """Fill the parameters' gradients for ``step``; return mean loss and gradient norm before clipping.

        Raises:
            NotFiniteError: the loss is not a number or absurd, or the gradients are not finite.
        """
        for _ in range(MAX_REPEATS + 1):
            self.optimizer.zero_grad(set_to_none=True)
            loss = self._backward(step)
            self.scaler.unscale_(self.optimizer)
            norm = float(nn.utils.get_total_norm(self._gradients()))
            if math.isfinite(norm):
                return loss, norm
            if not self.scaler.is_enabled():
                break
            # The same step again: same batch, same noise, half the scale.
            self.scaler.update(self.scaler.get_scale() / 2)
        raise NotFiniteError(f"the loss is {loss:.4g}, but its gradients overflow")

    def _gradients(self) -> list[Tensor]:
        found = [p.grad for p in self.parameters if p.grad is not None]
        if not found:
            raise UnsupportedModelError(
                "No gradient reached the LoRA: nothing it adapts acts on the model's output.",
                "Choose other targets on LoRA Train (low-VRAM).",
            )
        return found

    def _backward(self, step: int) -> float:
        window = self.batches.window(step, self.config.accumulation)
        num_samples = sum(len(batch) for batch in window)
        total = 0.0
        for position, batch in enumerate(window):
            self.cancel.check()
            total += self._backward_batch(batch, step, position, num_samples)
        if not math.isfinite(total) or total > DIVERGED_LOSS:
            raise NotFiniteError(f"the loss is {total:.4g}")
        return total

    def _backward_batch(self, batch: Sequence[CacheEntry], step: int, position: int, num_samples: int) -> float:
        """Add one batch's share to the gradients; every sample of the step weighs the same."""
        denoiser, cache = self.denoiser, self.batches.cache
        generator = objective.generator_for(self.batches.seed, step, position)
        sigma_B = objective.draw_sigmas(denoiser.sigmas, len(batch), generator).to(denoiser.device)
        latents = torch.stack([cache.latents(entry) for entry in batch]).to(denoiser.device, torch.float32)
        latents = denoiser.scale_latents(latents)
        noise = objective.draw_noise(latents, generator)
        noised = denoiser.add_noise(latents, noise, sigma_B)
        weight_B = denoiser.loss_weight(sigma_B)
        total = 0.0
        groups = denoiser.condition([cache.conditioning(entry) for entry in batch], noise)
        # What the network draws by itself depends on the run's seed too, and on nothing else.
        with forked(denoiser.device, generator.initial_seed()):
            for rows, conditioning in groups:
                with torch.enable_grad():
                    predicted = denoiser.predict_x0(noised[rows], sigma_B[rows], conditioning)
                    losses = objective.loss_per_sample(predicted, latents[rows], weight_B[rows])
                    loss = losses.sum() / num_samples
                    scaled = self.scaler.scale(loss)
                scaled.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
        return total

    def update(self, norm: float) -> float:
        """Clip, step the optimizer and the schedule; return the learning rate that was used."""
        limit = self.config.max_grad_norm
        if limit and norm > limit:
            torch._foreach_mul_(self._gradients(), limit / norm)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return learning_rate
