"""A shipped stand-in for each port: deterministic, tiny, on the CPU."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from .config import AttentionLimit
from .data.encodings import pack, unpack
from .ports import EncodedPictures, Encoding, Weights


@dataclass(frozen=True)
class FakeCodec:
    """A ``LatentCodec`` of 4 channels at an eighth of the size: mean red, green, blue and grey, -1 to 1."""

    fingerprint: str = "fake codec"
    batch_limit: int = 1

    def encode(self, pixels_BHWC: Tensor) -> EncodedPictures:
        """Return latents ``[B, 4, H / 8, W / 8]``."""
        rgb = avg_pool2d(pixels_BHWC.movedim(-1, 1), 8)
        return EncodedPictures(torch.cat([rgb, rgb.mean(dim=1, keepdim=True)], dim=1) * 2.0 - 1.0)

    def encode_precisely(self, pixels_BHWC: Tensor) -> EncodedPictures | None:
        """Return None: it computes in float32."""
        return None


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
    """A ``StoredWeights`` that hands out a layer's own weights, and counts how often it did so itself."""

    def __init__(self) -> None:
        self.fetched: Counter[nn.Module] = Counter()

    @contextmanager
    def fetch(self, module: Any, like: Tensor) -> Iterator[Weights]:
        """Yield copies, which are not the layer's own after the context ends."""
        self.fetched[module] += 1
        weight, bias = module.weight, module.bias
        yield Weights(weight.to(like), None if bias is None else bias.to(like), True)

    def payload(self, module: Any) -> tuple[Tensor, ...]:
        """Return weight and bias, not copied."""
        return tuple(tensor.detach() for tensor in (module.weight, module.bias) if tensor is not None)

    def finish(self, module: Any, payload: Sequence[Tensor], like: Tensor) -> Weights:
        """Return ``payload`` in the dtype of ``like``."""
        weight, bias = (*payload, None)[:2]
        assert weight is not None
        return Weights(weight.to(like.dtype), None if bias is None else bias.to(like.dtype), True)


@dataclass(eq=False)
class _LateCopy:
    """One copy: its targets are NaN but while they are read.

    Attributes:
        readers: how many read the targets now.
        is_over: another copy has taken a part of the targets.
    """

    targets: list[Tensor]
    sources: list[Tensor]
    readers: int = 0
    is_over: bool = False

    def spans(self) -> list[tuple[int, int]]:
        return [(target.data_ptr(), target.data_ptr() + target.nbytes) for target in self.targets]

    def spoil(self) -> None:
        for target in self.targets:
            target.reshape(-1).view(torch.uint8).fill_(0xFF)


def _overlap(ones: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    return any(start < stop and begin < end for begin, stop in ones for start, end in others)


class LateTransfers:
    """``Transfers`` between CPU memory and CPU memory that show every mistake in their use.

    A copy is made when it is waited for, not before, and its targets are NaN whenever nobody may read them. A copy over
    something that may still be read, or that does not wait for the last reading to end, is an ``AssertionError``.

    Attributes:
        num_copies, num_bytes: of all copies to the device so far.
        on_device: addresses of tensors that are taken to be on the device already.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.num_copies = 0
        self.num_bytes = 0
        self.on_device: set[int] = set()
        self.is_closed = False
        self._copies: WeakSet[_LateCopy] = WeakSet()
        # Where reading has ended, and the number of the fence that says so.
        self._ended: list[tuple[tuple[int, int], int]] = []
        self._num_fences = 0

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` was said to be on the device."""
        return tensor.data_ptr() in self.on_device

    def empty(self, num_bytes: int) -> Tensor:
        """Return memory full of NaN."""
        made = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
        span = (made.data_ptr(), made.data_ptr() + num_bytes)
        self._ended = [(old, fence) for old, fence in self._ended if not _overlap([old], [span])]
        return made

    def copy_in(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Any] = ()) -> _LateCopy:
        """Check that the copy may be made, spoil its targets, and leave it for later."""
        copy = _LateCopy(list(targets), list(sources))
        for other in self._copies:
            if _overlap(other.spans(), copy.spans()):
                assert not other.readers, "a copy over weights in use"
                other.is_over = True
        for span, fence in self._ended:
            if _overlap([span], copy.spans()):
                assert max(after, default=-1) >= fence, "a copy that does not wait for the last use to end"
        copy.spoil()
        self._copies.add(copy)
        self.num_copies += 1
        self.num_bytes += sum(source.nbytes for source in sources)
        return copy

    def wait(self, copy: _LateCopy) -> None:
        """Make the copy."""
        assert not copy.is_over, "weights that were copied over"
        if not copy.readers:
            for target, source in zip(copy.targets, copy.sources, strict=True):
                target.copy_(source)
        copy.readers += 1

    def released(self, copy: _LateCopy) -> int:
        """Spoil what the copy brought; return a fence."""
        copy.readers -= 1
        if not copy.readers:
            copy.spoil()
        self._num_fences += 1
        self._ended = [(old, fence) for old, fence in self._ended if old not in copy.spans()]
        self._ended += [(span, self._num_fences) for span in copy.spans()]
        return self._num_fences

    def to_ram(self, tensor: Tensor) -> Any:
        """Return the numbers, not as a tensor: they take no device memory."""
        return tensor.shape, tensor.dtype, tensor.detach().reshape(-1).view(torch.uint8).numpy().copy()

    def from_ram(self, kept: Any, room: Tensor | None = None) -> Tensor:
        """Return a new tensor of them, or ``room`` with them."""
        shape, dtype, numbers = kept
        made = torch.from_numpy(numbers).clone().view(dtype).view(shape)
        return made if room is None else room.detach().copy_(made)

    def close(self) -> None:
        """Remember that it was called."""
        self.is_closed = True


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

    def condition(
        self, encodings: Sequence[Encoding], noise: Tensor, cuts_padding: bool = False
    ) -> list[tuple[list[int], dict[str, Any]]]:
        """Return one group with the mean of each caption's tokens as context."""
        tokens = [unpack(encoding)[0][0].mean(dim=1, keepdim=True) for encoding in encodings]
        return [(list(range(len(tokens))), {"context": torch.cat(tokens)})]

    def predict_x0(
        self, noised: Tensor, sigma_B: Tensor, conditioning: dict[str, Any], limit: AttentionLimit | None = None
    ) -> Tensor:
        """Return ``noised - sigma * network(noised)``; the network attends to nothing that could be limited."""
        sigma = sigma_B.view(-1, 1, 1, 1)
        scaled = noised / (sigma**2 + 1).sqrt()
        return noised - sigma * self.network(scaled, **conditioning)  # type: ignore[no-any-return]

    def load(self, room: int | None = None) -> None:
        """Do nothing: the network is where it computes."""

    @contextmanager
    def training(self, dtype: torch.dtype) -> Iterator[None]:
        """Do nothing: the network is a plain one."""
        yield

    @contextmanager
    def simulating(self, dtype: torch.dtype, attention: Callable[..., Tensor]) -> Iterator[None]:
        """Do nothing: the network attends to nothing and looks no timestep up."""
        yield


@dataclass
class FakeHardware:
    """A ``Hardware`` whose RAM grows by one byte a sample; there is a device if it is given bytes.

    Attributes:
        caps: the ceilings that are in force.
        past_caps: all that were.
        num_releases: how often cached memory was given back.
    """

    ram: int = 0
    available_bytes: int | None = None
    total_bytes: int | None = None
    ram_available_bytes: int = 1 << 40
    caps: list[int] = field(default_factory=list)
    past_caps: list[int] = field(default_factory=list)
    num_releases: int = 0

    def sample(self) -> dict[str, int]:
        """Return the next count."""
        self.ram += 1
        return {"ram": self.ram}

    def available(self) -> int | None:
        """Return ``available_bytes``."""
        return self.available_bytes

    def total(self) -> int | None:
        """Return ``total_bytes``."""
        return self.total_bytes

    def ram_available(self) -> int:
        """Return ``ram_available_bytes``."""
        return self.ram_available_bytes

    @contextmanager
    def capped(self, num_bytes: int) -> Iterator[None]:
        """Hold ``num_bytes`` in ``caps`` until the context ends."""
        self.caps.append(num_bytes)
        self.past_caps.append(num_bytes)
        try:
            yield
        finally:
            self.caps.remove(num_bytes)

    def release_cached(self) -> None:
        """Count."""
        self.num_releases += 1


@dataclass
class FakeCancel:
    """A ``Cancel`` pressed at the ``at``-th check; 0 is never."""

    at: int = 0

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` when it is time."""
        self.at -= 1
        if self.at == 0:
            raise KeyboardInterrupt
