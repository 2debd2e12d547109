"""Latents in two bands: a blurred copy at half precision, and what it lacks as 16-bit fixed-point numbers.

The low band is the mean of each block of 8 by 8 latent pixels, as float16. The high band is the latents less what the
low band stands for, so it holds the fine detail and mends the low band's rounding as well. That is 2.03 bytes a number,
against 4 of float32 and 2 of float16.

Why the high band is no float32: then both bands take 4.03 bytes, more than float32 itself, and nothing is won. With
the detail as float32 and only the means of 2 by 2 pixels rounded (3.5 bytes), the error stays that of float16. Why
blocks of 8: each halving of the block costs more bytes than its smaller detail is worth in exactness. ``dev.py bench
data --only encodings`` has all of these, and fixed-point numbers without a low band as well: they are as exact at 2
bytes. So what is won over float16 comes from fixed point, not from the split. With detail of 24 bits (3.03 bytes) the
error would be float32's own; float32 itself is then not far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .channels import along, peaks, powers_of_two, steps, to_float32

BLOCK = 8
_LARGEST = 2**15 - 1
_LOW_BITS = 15


def low_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the low band of latents of ``shape``: blocks at the far edges may be smaller."""
    *front, height, width = shape
    return (*front, -(-height // BLOCK), -(-width // BLOCK))


def split(latents: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the bands of finite float32 latents ``[C, ..., h, w]``.

    Returns:
        high: int16, of the latents' shape.
        step: float32 ``[C]``, the worth of 1 in ``high``.
        low: float16, of ``low_shape``.
        scale: float32 ``[C]``, the worth of 1 in ``low``; a power of two.
    """
    exact = latents.double()
    scale = powers_of_two(peaks(latents), _LOW_BITS)
    low = (_block_means(exact) / along(scale, exact)).to(torch.float16)
    rest = exact - _spread(low, scale, latents.shape)
    step = steps(peaks(rest), _LARGEST)
    high = (rest / along(step, rest)).round().clamp(-_LARGEST, _LARGEST).to(torch.int16)
    return high, step, low, scale


def join(high: Tensor, step: Tensor, low: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 latents that ``split`` made the bands of.

    A number is off by at most ``(d + p / 2048) / 65500 + |x| / 2**24 + 2**-126``: ``d`` is the greatest distance of a
    number of its channel from the mean of its block, ``p`` the channel's peak. As ``d`` is 2 ``p`` at most, that is
    ``p / 2**14.9`` or less, where float16 may be off by ``p / 2**12`` near the peak.
    """
    return to_float32(_spread(low, scale, high.shape) + high.double() * along(step, high))


def _block_means(exact: Tensor) -> Tensor:
    *front, height, width = exact.shape
    means = torch.nn.functional.avg_pool2d(exact.reshape(-1, 1, height, width), BLOCK, ceil_mode=True)
    return means.reshape(*front, *means.shape[-2:])


def _spread(low: Tensor, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return what the low band stands for, each mean over all of its block."""
    exact = low.double() * along(scale, low)
    return exact.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)[..., : shape[-2], : shape[-1]]
