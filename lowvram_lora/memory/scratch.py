"""Memory that short-lived copies of weights share, so that the system need not map new pages for each."""

import torch
from torch import Tensor


class ScratchPool:
    """Buffers that are used again. It holds about as much as was ever lent at one time."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def lend(self, like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return ``like``'s numbers in ``dtype``, contiguous, and the buffer to hand to ``take_back`` afterwards."""
        num_bytes = like.numel() * dtype.itemsize
        buffer = self._best_fit(num_bytes)
        copy = buffer[:num_bytes].view(dtype).view(like.shape)
        copy.copy_(like)
        return copy, buffer

    def take_back(self, buffer: Tensor) -> None:
        """Make ``buffer`` free for the next."""
        self._free.append(buffer)

    def _best_fit(self, num_bytes: int) -> Tensor:
        fitting = [i for i, buffer in enumerate(self._free) if buffer.numel() >= num_bytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: self._free[i].numel()))
        if self._free:
            # Too small for this, and about to be matched by the new one.
            self._free.pop(max(range(len(self._free)), key=lambda i: self._free[i].numel()))
        return torch.empty(num_bytes, dtype=torch.uint8)
