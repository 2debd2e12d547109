"""Arithmetic by channel for the encodings of latents.

It is float64 on purpose: a stored number times a float32 is exact there, so that what an encoding stands for is
rounded at most twice, once at a sum and once to float32, and comes out the same on each machine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The least step of a fixed-point number: the smallest normal float32. Some machines take smaller ones for 0.
LEAST_STEP = 2.0**-126


def all_finite(values: Tensor) -> bool:
    """Return whether no number of a floating-point tensor is NaN or infinite.

    The extremes tell: a NaN among the numbers is both of them. That takes a tenth of the time of asking each number.
    """
    return values.numel() == 0 or all(math.isfinite(float(extreme)) for extreme in values.aminmax())


def along(values_C: Tensor, latents: Tensor) -> Tensor:
    """Return one number a channel as float64, in a shape that fits ``latents``, whose first axis is the channels."""
    return values_C.double().reshape(-1, *(1,) * (latents.ndim - 1))


def peaks(latents: Tensor) -> Tensor:
    """Return the largest magnitude of each channel: ``[C]``."""
    return latents.flatten(1).abs().amax(1)


def powers_of_two(peaks_C: Tensor, bits: int) -> Tensor:
    """Return a float32 scale a channel that brings its peak to ``2**(bits-1)`` up to ``2**bits``: ``[C]``.

    Powers of two, so that a floating-point format loses nothing by them. Not below ``LEAST_STEP``.
    """
    exponents = (math.frexp(peak)[1] - bits for peak in peaks_C.tolist())
    return torch.tensor([max(LEAST_STEP, math.ldexp(1.0, exponent)) for exponent in exponents], dtype=torch.float32)


def steps(spans_C: Tensor, num_steps: int) -> Tensor:
    """Return the float32 width of one of ``num_steps`` equal steps of each span: ``[C]``, not below ``LEAST_STEP``."""
    return (spans_C.double() / num_steps).clamp_min(LEAST_STEP).float()


def to_float32(values: Tensor) -> Tensor:
    """Return float64 values as float32. What rounding carried past the largest float32 becomes that."""
    largest = torch.finfo(torch.float32).max
    return values.clamp(-largest, largest).float()
