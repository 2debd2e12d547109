"""Tensors as one run of numbers, and back with the strides they had."""

from __future__ import annotations

from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Return whether ``tensor`` fills one stretch of its storage, each number once, in whatever order of its axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flattened(tensor: Tensor) -> Tensor:
    """Return a dense tensor's numbers ``[N]`` as they lie in memory; no copy."""
    return tensor.as_strided((tensor.numel(),), (1,))


def placed(tensor: Tensor, like: Tensor, start: int) -> Tensor:
    """Return what lies in ``tensor``'s storage from ``start`` on, in the shape and strides of ``like``; no copy."""
    return tensor.as_strided(like.shape, like.stride(), start)
