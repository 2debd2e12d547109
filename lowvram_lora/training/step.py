"""One optimizer step: batches to gradients to an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..config import OptimConfig
from ..data.batches import BatchRecipe
from ..data.cache import CacheEntry
from ..data.tiers import TieredCache
from ..errors import UnsupportedModelError
from ..memory.meter import Watch
from ..memory.random_state import forked
from ..ports import Cancel, Denoiser, Encoding
from . import objective

# A fresh network's weighted loss is around 1; six orders above it nothing is being learned any more.
DIVERGED_LOSS = 1e6
# fp16 gradients that overflow are repeated with half the scale; from 2 ** 16 this reaches 1.
MAX_REPEATS = 16


# A network halves its latents up to three times, and patches are two wide.
_SIDE_STEP = 8


def shrunk(latents: Tensor, scale: float) -> Tensor:
    """Return ``latents`` ``[C, ..., h, w]`` with sides of ``scale`` times theirs, in steps that networks take."""
    if scale == 1.0:
        return latents
    sides = [min(side, max(_SIDE_STEP, int(side * scale) // _SIDE_STEP * _SIDE_STEP)) for side in latents.shape[-2:]]
    planes = latents.reshape(1, -1, *latents.shape[-2:])
    smaller = nn.functional.interpolate(planes, sides, mode="bilinear", antialias=True)
    return smaller.view(*latents.shape[:-2], *sides)


class NotFiniteError(ArithmeticError):
    """The loss or the gradients of a step are not usable numbers. Internal: ``run`` turns it into a report."""


class Samples(Protocol):
    """Where a step's samples come from."""

    @property
    def seed(self) -> int:
        """The run's seed."""
        ...

    def window(self, step: int, accumulation: int) -> list[list[CacheEntry]]:
        """Return the batches of optimizer step ``step`` (0-based)."""
        ...

    def latents(self, entry: CacheEntry) -> Tensor: ...

    def conditioning(self, entry: CacheEntry) -> Encoding: ...


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The samples of a recipe, from its cache."""

    recipe: BatchRecipe
    cache: TieredCache
    seed: int
    latent_scale: float = 1.0

    def latents(self, entry: CacheEntry) -> Tensor:
        """Return the sample's latents ``[C, ...]``, made smaller where a lossy plan says so."""
        return shrunk(self.cache.latents(entry), self.latent_scale)

    def conditioning(self, entry: CacheEntry) -> Encoding:
        """Return the sample's encoded caption."""
        return self.cache.conditioning(entry)

    def window(self, step: int, accumulation: int) -> list[list[CacheEntry]]:
        """Return the batches of optimizer step ``step`` (0-based)."""
        entries = self.recipe.cache.entries
        first = step * accumulation
        return [[entries[i] for i in self.recipe.batch(k)] for k in range(first, first + accumulation)]


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """What stays the same from step to step.

    Attributes:
        begin: called before each pass through the network.
        micro_batch: samples that go through the network at once; 0 for the whole batch.
        read: gives a tensor's only number.
    """

    denoiser: Denoiser
    batches: Samples
    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    schedule: Any
    scaler: torch.amp.GradScaler
    config: OptimConfig
    cancel: Cancel
    watch: Watch
    begin: Callable[[], None]
    micro_batch: int = 0
    read: Callable[[Tensor], float] = float

    def gradients(self, step: int) -> tuple[float, float]:
        """Fill the parameters' gradients for ``step``; return mean loss and gradient norm before clipping.

        Raises:
            NotFiniteError: the loss is not a number or absurd, or the gradients are not finite.
        """
        for _ in range(MAX_REPEATS + 1):
            self.optimizer.zero_grad(set_to_none=True)
            loss = self._backward(step)
            self.scaler.unscale_(self.optimizer)
            norm = self.read(nn.utils.get_total_norm(self._gradients()))
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
        denoiser = self.denoiser
        generator = objective.generator_for(self.batches.seed, step, position)
        sigma_B = objective.draw_sigmas(denoiser.sigmas, len(batch), generator).to(denoiser.device)
        latents = torch.stack([self.batches.latents(entry) for entry in batch]).to(denoiser.device, torch.float32)
        latents = denoiser.scale_latents(latents)
        noise = objective.draw_noise(latents, generator)
        total = 0.0
        # What the network draws by itself depends on the run's seed too, and on nothing else.
        with forked(denoiser.device, generator.initial_seed()):
            for rows in self._parts(len(batch)):
                encodings = [self.batches.conditioning(batch[row]) for row in rows]
                for places, conditioning in denoiser.condition(encodings, noise[rows]):
                    chosen = [rows[place] for place in places]
                    total += self._pass(latents[chosen], noise[chosen], sigma_B[chosen], conditioning, num_samples)
        return total

    def _parts(self, num: int) -> list[list[int]]:
        size = self.micro_batch or num
        return [list(range(num))[first : first + size] for first in range(0, num, size)]

    def _pass(
        self, latents: Tensor, noise: Tensor, sigma_B: Tensor, conditioning: dict[str, Any], num_samples: int
    ) -> float:
        """Go once through the network and back; return the samples' share of the loss."""
        denoiser = self.denoiser
        self.begin()
        self.watch.phase("forward")
        noised = denoiser.add_noise(latents, noise, sigma_B)
        with torch.enable_grad():
            predicted = denoiser.predict_x0(noised, sigma_B, conditioning)
            losses = objective.loss_per_sample(predicted, latents, denoiser.loss_weight(sigma_B))
            loss = losses.sum() / num_samples
            scaled = self.scaler.scale(loss)
        del predicted, losses
        self.watch.phase("backward")
        scaled.backward()  # type: ignore[no-untyped-call]
        return self.read(loss.detach())

    def update(self, norm: float) -> float:
        """Clip, step the optimizer and the schedule; return the learning rate that was used."""
        self.watch.phase("optimizer")
        limit = self.config.max_grad_norm
        if limit and norm > limit:
            torch._foreach_mul_(self._gradients(), limit / norm)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return learning_rate
