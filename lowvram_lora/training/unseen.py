"""The loss on held-out pictures in the course of a run: the same pictures, noise and sigmas each time.

So two figures differ by what was learned between them alone, where the losses of steps differ by what each happened to
draw. It falls while what is learned holds for other pictures too, and rises where the training pictures are learned by
heart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.draw import Draw
from ..memory.meter import Watch
from ..memory.random_state import forked
from ..ports import Cancel, Denoiser
from . import objective
from .step import Samples

# Passes through the network of one figure.
NUM_DRAWS = 16
# Figures between the first and the last, and the steps that are between two of them at the least.
TIMES = 10
LEAST_APART = 50


def is_due(done: int, steps: int) -> bool:
    """Return whether held-out pictures are looked at after ``done`` of ``steps`` steps."""
    return done == steps or done % max(-(-steps // TIMES), LEAST_APART) == 0


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """Held-out pictures.

    Attributes:
        num_entries: how many; where they are more than ``NUM_DRAWS``, some are taken, evenly spread.
        begin: called before each pass through the network.
    """

    denoiser: Denoiser
    samples: Samples
    num_entries: int
    cancel: Cancel
    watch: Watch
    begin: Callable[[], None]

    def loss(self) -> float:
        """Return the mean loss of ``NUM_DRAWS`` draws, weighted as in training.

        One at a time and without gradients, so that it takes less memory than a step does. Sigmas are spread evenly
        over the model's table; the caption is the one that was written, the picture the plain one.
        """
        self.watch.phase("validation")
        taken = min(self.num_entries, NUM_DRAWS)
        entries = [index * self.num_entries // taken for index in range(taken)]
        total = 0.0
        for place, sigma in enumerate(spread_sigmas(self.denoiser.sigmas, NUM_DRAWS)):
            self.cancel.check()
            total += self._loss_of(Draw(entries[place % taken]), sigma, place)
        self.watch.phase("")
        return total / NUM_DRAWS

    def _loss_of(self, draw: Draw, sigma: Tensor, place: int) -> float:
        denoiser, samples = self.denoiser, self.samples
        generator = objective.generator_for(samples.seed, -1, place)
        sigma = sigma.reshape(1).to(denoiser.device)
        latents = samples.latents(draw).unsqueeze(0).to(denoiser.device, torch.float32)
        mask = samples.mask(draw)
        mask = None if mask is None else mask.unsqueeze(0).to(denoiser.device)
        latents = denoiser.scale_latents(latents)
        noise = objective.draw_noise(latents, generator)
        # What the network draws by itself is the same each time, and is not taken from the run.
        with torch.no_grad(), forked(denoiser.device, generator.initial_seed()):
            self.begin()
            ((_, conditioning),) = denoiser.condition([samples.conditioning(draw)], noise)
            predicted = denoiser.predict_x0(denoiser.add_noise(latents, noise, sigma), sigma, conditioning)
            loss = objective.loss_per_sample(predicted, latents, denoiser.loss_weight(sigma), mask)
        return float(loss)


def spread_sigmas(table: Tensor, num: int) -> Tensor:
    """Return ``num`` noise levels in the middle of so many equal parts of the model's ``table`` ``[T]``."""
    index = ((torch.arange(num) + 0.5) * (len(table) / num)).long()
    return table.cpu().float()[index].clamp(min=objective.MIN_SIGMA)
