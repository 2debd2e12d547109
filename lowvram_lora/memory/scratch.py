"""Memory that short-lived copies of weights share, so that the system need not map new pages for each."""

from __future__ import annotations

import torch
from torch import Tensor


class Buffer:
    """Memory to lend, and what it looks like as numbers of each type that it was lent as."""

    __slots__ = ("_typed", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._typed: dict[torch.dtype, Tensor] = {torch.uint8: torch.empty(-(-num_bytes // 16) * 16, dtype=torch.uint8)}

    def shaped(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return its beginning as a tensor."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._typed[torch.uint8].view(dtype)
        return typed.as_strided(shape, stride)


class ScratchPool:
    """Buffers that are used again. It holds about as much as was ever lent at one time."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []

    def lend(self, like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Buffer]:
        """Return ``like``'s numbers in ``dtype``, and the buffer to hand to ``take_back`` afterwards.

        Args:
            like: contiguous, or the copy is.
        """
        buffer = self._best_fit(like.numel() * dtype.itemsize)
        stride = like.stride() if like.is_contiguous() else torch.empty(like.shape, device="meta").stride()
        copy = buffer.shaped(like.shape, stride, dtype)
        copy.copy_(like)
        return copy, buffer

    def take_back(self, buffer: Buffer) -> None:
        """Make ``buffer`` free for the next."""
        self._free.append(buffer)

    def _best_fit(self, num_bytes: int) -> Buffer:
        free = self._free
        best, least = -1, 0
        for index, buffer in enumerate(free):
            if buffer.num_bytes >= num_bytes and (best < 0 or buffer.num_bytes < least):
                best, least = index, buffer.num_bytes
        if best >= 0:
            return free.pop(best)
        if free:
            # Too small for this, and about to be matched by the new one.
            free.pop(max(range(len(free)), key=lambda index: free[index].num_bytes))
        return Buffer(num_bytes)
