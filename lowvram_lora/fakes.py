"""A shipped stand-in for each port: deterministic, tiny, on the CPU."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from .data.encodings import Encoding, pack


@dataclass(frozen=True)
class FakeCodec:
    """A ``LatentCodec`` of 4 channels at an eighth of the size: mean red, green, blue and grey, -1 to 1."""

    fingerprint: str = "fake codec"

    def encode(self, pixels_HWC: Tensor) -> Tensor:
        """Return latents ``[4, H / 8, W / 8]``."""
        rgb = avg_pool2d(pixels_HWC.movedim(-1, 0), 8)
        return torch.cat([rgb, rgb.mean(dim=0, keepdim=True)]) * 2.0 - 1.0


@dataclass(frozen=True)
class FakeTextEncoder:
    """A ``TextEncoder`` whose numbers depend on the caption alone."""

    fingerprint: str = "fake text encoder"
    num_tokens: int = 8
    width: int = 16

    def encode(self, caption: str) -> Encoding:
        """Return conditioning ``[1, num_tokens, width]`` with a ``pooled_output`` of ``[1, width]``."""
        digest = hashlib.sha256(caption.encode("utf-8")).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        tokens = torch.randn(1, self.num_tokens, self.width, generator=generator)
        return pack([[tokens, {"pooled_output": tokens.mean(dim=1)}]])
