"""One optimizer step: batches to gradients to an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..config import OptimConfig
from ..data.batches import BatchRecipe
from ..data.draw import AS_STORED, Batch, Draw
from ..data.tiers import TieredCache, describe
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

    def window(self, step: int, accumulation: int) -> list[Batch]:
        """Return the batches of optimizer step ``step`` (0-based)."""
        ...

    def shape(self, draw: Draw) -> tuple[int, ...]:
        """Return what tells latents that can be stacked from others; nothing is read for it."""
        ...

    def latents(self, draw: Draw) -> Tensor: ...

    def mask(self, draw: Draw) -> Tensor | None:
        """Return the weights of the loss ``[1, ..., h, w]`` at the latents' size, if the sample has any."""
        ...

    def conditioning(self, draw: Draw) -> Encoding: ...

    def sent(self, num_bytes: int) -> None:
        """Take note that samples of so many bytes went to the device."""
        ...


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The samples of a recipe, from its cache.

    Attributes:
        steps: of the run, for what changes in its course; 0 where that is not known.
    """

    recipe: BatchRecipe
    cache: TieredCache
    seed: int
    latent_scale: float = 1.0
    steps: int = 0

    def shape(self, draw: Draw) -> tuple[int, ...]:
        """Return the shape of the latents on disk."""
        return self.recipe.cache.image_of(draw).latent_shape

    def latents(self, draw: Draw) -> Tensor:
        """Return the sample's latents ``[C, ...]``, made smaller where a lossy plan says so."""
        return shrunk(self.cache.latents(draw), self.latent_scale)

    def mask(self, draw: Draw) -> Tensor | None:
        """Return the sample's mask, made smaller with the latents."""
        mask = self.cache.mask(draw)
        return None if mask is None else shrunk(mask, self.latent_scale)

    def conditioning(self, draw: Draw) -> Encoding:
        """Return the sample's encoded caption."""
        return self.cache.conditioning(draw)

    def window(self, step: int, accumulation: int) -> list[Batch]:
        """Return the batches of optimizer step ``step`` (0-based); the next ones may be read from disk from now on."""
        window = self._window(step, accumulation)
        if self.recipe.cache.predictive and (not self.steps or step + 1 < self.steps):
            coming = self._window(step + 1, accumulation)
            self.cache.read_ahead(draw for batch in (*window, *coming) for draw in batch)
        return window

    def _window(self, step: int, accumulation: int) -> list[Batch]:
        first = step * accumulation
        return [self._at_precision(self.recipe.batch(k), step) for k in range(first, first + accumulation)]

    def _at_precision(self, batch: Batch, step: int) -> Batch:
        """Return ``batch`` as dynamic precision reads it; what the planner has chosen stays."""
        schedule, entries = self.recipe.cache.schedule, self.recipe.cache.entries
        if schedule is None or not self.steps:
            return batch
        return tuple(
            replace(draw, precision=schedule.precision(entries[draw.entry].complexity_score, step, self.steps))
            if draw.precision == AS_STORED
            else draw
            for draw in batch
        )

    def sent(self, num_bytes: int) -> None:
        """Count it."""
        self.cache.counters.count_device_transfer(num_bytes)

    def report(self) -> tuple[str, ...]:
        """Return what the tiers of the cache did, in lines of text."""
        return tuple(describe(self.cache.counters, self.recipe.cache.ram_cache_bytes))

    def close(self) -> None:
        """End what the cache has going, such as reading ahead."""
        self.cache.close()


def _by_shape(samples: Samples, batch: Batch) -> list[list[int]]:
    """Return the places of a batch's draws whose latents can be stacked, in the order in which each shape comes."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, draw in enumerate(batch):
        groups.setdefault(samples.shape(draw), []).append(place)
    return list(groups.values())


class _Rows(NamedTuple):
    """Samples that go through the network at once, on the device."""

    latents: Tensor
    noise: Tensor
    sigmas: Tensor
    mask: Tensor | None


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

    def _backward_batch(self, batch: Batch, step: int, position: int, num_samples: int) -> float:
        """Add one batch's share to the gradients; every sample of the step weighs the same."""
        generator = objective.generator_for(self.batches.seed, step, position)
        sigma_B = objective.draw_sigmas(self.denoiser.sigmas, len(batch), generator).to(self.denoiser.device)
        groups = _by_shape(self.batches, batch)
        # In a batch of several shapes each sample draws for itself, so that it doesn't depend on the others' shapes.
        sources = (
            [generator]
            if len(groups) == 1
            else [objective.generator_for(self.batches.seed, step, position, place) for place in range(len(batch))]
        )
        # What the network draws by itself depends on the run's seed too, and on nothing else.
        with forked(self.denoiser.device, generator.initial_seed()):
            return sum(self._backward_group(batch, rows, sigma_B, sources, num_samples) for rows in groups)

    def _backward_group(
        self,
        batch: Batch,
        rows: Sequence[int],
        sigma_B: Tensor,
        sources: Sequence[torch.Generator],
        num_samples: int,
    ) -> float:
        """Go through the network with the draws at ``rows``, whose latents have one shape.

        Args:
            sigma_B: those of the whole batch, on the device.
        """
        denoiser = self.denoiser
        draws = [batch[row] for row in rows]
        latents = torch.stack([self.batches.latents(draw) for draw in draws]).to(denoiser.device, torch.float32)
        mask = self._masks(draws, latents)
        self.batches.sent(latents.nbytes + (0 if mask is None else mask.nbytes))
        latents = denoiser.scale_latents(latents)
        if len(sources) == 1:
            noise = objective.draw_noise(latents, sources[0])
        else:
            drawn = [objective.draw_noise(latents[i : i + 1], sources[row]) for i, row in enumerate(rows)]
            noise = torch.cat(drawn)
        total = 0.0
        for part in self._parts(len(draws)):
            encodings = [self.batches.conditioning(draws[i]) for i in part]
            for places, conditioning in denoiser.condition(encodings, noise[part]):
                chosen = [part[place] for place in places]
                chosen_mask = None if mask is None else mask[chosen]
                sigma = sigma_B[[rows[i] for i in chosen]]
                # Held by nobody here, so that this pass's rows are gone before the next one's are made.
                total += self._pass(
                    _Rows(latents[chosen], noise[chosen], sigma, chosen_mask), conditioning, num_samples
                )
                del sigma, chosen_mask
        return total

    def _masks(self, draws: Sequence[Draw], latents: Tensor) -> Tensor | None:
        """Return the weights of the loss ``[B, 1, ..., h, w]``, or None if no sample has any."""
        found = [self.batches.mask(draw) for draw in draws]
        if all(mask is None for mask in found):
            return None
        whole = torch.ones(1, *latents.shape[2:])
        return torch.stack([whole if mask is None else mask for mask in found]).to(latents.device)

    def _parts(self, num: int) -> list[list[int]]:
        size = self.micro_batch or num
        return [list(range(num))[first : first + size] for first in range(0, num, size)]

    def _pass(self, rows: _Rows, conditioning: dict[str, Any], num_samples: int) -> float:
        """Go once through the network and back; return the samples' share of the loss."""
        denoiser = self.denoiser
        self.begin()
        self.watch.phase("forward")
        noised = denoiser.add_noise(rows.latents, rows.noise, rows.sigmas)
        with torch.enable_grad():
            predicted = denoiser.predict_x0(noised, rows.sigmas, conditioning)
            weight_B = denoiser.loss_weight(rows.sigmas)
            losses = objective.loss_per_sample(predicted, rows.latents, weight_B, rows.mask)
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
