"""One objective for every architecture: the weighted squared error of the clean latents.

With the weight ``1 / sigma ** 2`` it is the usual epsilon loss (Ho et al., DDPM, arXiv:2006.11239) and the usual
velocity loss of rectified flow (Liu et al., arXiv:2209.03003); with ``(sigma ** 2 + s ** 2) / (sigma * s) ** 2`` the
v-prediction loss (Salimans and Ho, arXiv:2202.00512). All of it is float32: at small sigma the error is a small
difference of large numbers.
"""

import hashlib

import torch
from torch import Tensor

# A flow model's table starts at almost 0, where 1 / sigma ** 2 leaves float32's useful range.
MIN_SIGMA = 1e-3


def generator_for(seed: int, step: int, *place: int) -> torch.Generator:
    """Return the CPU generator of one batch of one step, or of one sample in it.

    It depends on nothing before it: a repeated or resumed step draws what the first one drew.

    Args:
        place: number of the batch in the step, and of the sample in the batch.
    """
    digest = hashlib.sha256("/".join(map(str, (seed, step, *place))).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def draw_sigmas(table: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """Draw ``num`` noise levels uniformly from the model's own ``table`` ``[T]``, schedule shift included."""
    index = torch.randint(len(table), (num,), generator=generator)
    return table.cpu().float()[index].clamp(min=MIN_SIGMA)


def draw_noise(latents: Tensor, generator: torch.Generator) -> Tensor:
    """Return unit normal noise like ``latents``, drawn on the CPU, so that a seed means the same everywhere."""
    return torch.randn(latents.shape, generator=generator).to(latents.device)


def loss_per_sample(predicted_x0: Tensor, latents: Tensor, weight_B: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the weighted mean squared error of each sample, ``[B]``, in float32 or above.

    Args:
        mask: ``[B, 1, ..., h, w]``, 0 or more: how much each place of the latents counts against the others of its
            sample. The sample as a whole counts as one without a mask; one whose mask is 0 everywhere has no loss.
    """
    dtype = torch.promote_types(predicted_x0.dtype, torch.float32)
    squared = (predicted_x0.to(dtype) - latents.to(dtype)).square()
    if mask is None:
        error = squared.flatten(1).mean(1)
    else:
        share = mask.to(squared).expand_as(squared).flatten(1)
        error = (squared.flatten(1) * share).sum(1) / share.sum(1).clamp(min=torch.finfo(dtype).tiny)
    return error * weight_B.to(error)
