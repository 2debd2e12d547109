"""A shipped stand-in for each port: deterministic, tiny, on the CPU."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from .data.encodings import pack, unpack
from .ports import Encoding, Weights


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


class FakeBlock(nn.Module):
    """A small residual block with the layer names presets look for; adds in place, as the Flux family does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"to_v": nn.Linear(width, width)})
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor, context: Tensor) -> Tensor:
        """Return ``tokens`` ``[B, N, width]`` changed by ``context`` ``[B, 1, width]``."""
        tokens = tokens * 1.0
        tokens += self.attn["to_v"](self.norm(tokens) + context)
        tokens += self.mlp(tokens)
        return tokens


class FakeNetwork(nn.Module):
    """A network of two blocks over the pixels of 4-channel latents."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.proj_in = nn.Linear(4, width)
        self.blocks = nn.ModuleList(FakeBlock(width) for _ in range(2))
        self.proj_out = nn.Linear(width, 4)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Return a prediction like ``x`` ``[B, 4, h, w]``."""
        tokens = self.proj_in(x.flatten(2).transpose(1, 2))
        for block in self.blocks:
            tokens = block(tokens, context)
        return self.proj_out(tokens).transpose(1, 2).view_as(x)  # type: ignore[no-any-return]


class FakeWeights:
    """A ``WeightSource`` that hands out a layer's own weights, and counts how often."""

    def __init__(self) -> None:
        self.fetched: Counter[nn.Module] = Counter()

    @contextmanager
    def fetch(self, module: Any, like: Tensor) -> Iterator[Weights]:
        """Yield copies, which are not the layer's own after the context ends."""
        self.fetched[module] += 1
        weight, bias = module.weight, module.bias
        yield Weights(weight.to(like), None if bias is None else bias.to(like), True)


class FakeDenoiser:
    """A ``Denoiser`` of an epsilon model with a ``FakeNetwork``."""

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = FakeNetwork().requires_grad_(False)
        self.weights = FakeWeights()
        self.device = torch.device("cpu")
        self.fingerprint = f"fake denoiser {seed}"
        self.base_name = "fake"
        self.prediction = "epsilon"
        self.sigmas = torch.linspace(0.03, 14.6, 1000)

    def file_name(self, path: str) -> str:
        """Return the flattened path."""
        return f"lora_unet_{path.replace('.', '_')}"

    def supports(self, dtype: torch.dtype) -> bool:
        """Return True: the CPU computes in anything."""
        return True

    def prefers(self, dtype: torch.dtype) -> bool:
        """Return False: float32 by itself."""
        return False

    def problems(self, latent_shapes: Sequence[tuple[int, ...]]) -> list[str]:
        """Return the shapes that do not have 4 channels."""
        return [f"latents of {shape[0]} channels" for shape in latent_shapes if shape[0] != 4]

    def notes(self) -> list[str]:
        """Return nothing."""
        return []

    def scale_latents(self, latents: Tensor) -> Tensor:
        """Return half the latents."""
        return latents * 0.5

    def add_noise(self, latents: Tensor, noise: Tensor, sigma_B: Tensor) -> Tensor:
        """Return ``latents + sigma * noise``."""
        return latents + sigma_B.view(-1, 1, 1, 1) * noise

    def loss_weight(self, sigma_B: Tensor) -> Tensor:
        """Return the epsilon loss's weight."""
        return 1.0 / sigma_B**2

    def condition(self, encodings: Sequence[Encoding], noise: Tensor) -> list[tuple[list[int], dict[str, Any]]]:
        """Return one group with the mean of each caption's tokens as context."""
        tokens = [unpack(encoding)[0][0].mean(dim=1, keepdim=True) for encoding in encodings]
        return [(list(range(len(tokens))), {"context": torch.cat(tokens)})]

    def predict_x0(self, noised: Tensor, sigma_B: Tensor, conditioning: dict[str, Any]) -> Tensor:
        """Return ``noised - sigma * network(noised)``."""
        sigma = sigma_B.view(-1, 1, 1, 1)
        scaled = noised / (sigma**2 + 1).sqrt()
        return noised - sigma * self.network(scaled, **conditioning)  # type: ignore[no-any-return]

    def load(self) -> None:
        """Do nothing: the network is where it computes."""

    @contextmanager
    def training(self, dtype: torch.dtype) -> Iterator[None]:
        """Do nothing: the network is a plain one."""
        yield


@dataclass
class FakeHardware:
    """A ``Hardware`` whose RAM grows by one byte a sample."""

    ram: int = 0

    def sample(self) -> dict[str, int]:
        """Return the next count."""
        self.ram += 1
        return {"ram": self.ram}


@dataclass
class FakeCancel:
    """A ``Cancel`` pressed at the ``at``-th check; 0 is never."""

    at: int = 0

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` when it is time."""
        self.at -= 1
        if self.at == 0:
            raise KeyboardInterrupt
