"""What the core asks of its host, as small protocols. ``fakes.py`` ships a stand-in for each."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .config import AttentionLimit


@dataclass(frozen=True)
class Encoding:
    """A text encoder's output in the host's own layout.

    Attributes:
        tensors: by name; CPU.
        structure: JSON text that says where each tensor and each plain value goes.
    """

    tensors: dict[str, Tensor]
    structure: str


@dataclass(frozen=True)
class EncodedPictures:
    """A codec's output.

    Attributes:
        latents: unscaled, ``[B, C, h, w]`` or ``[B, C, 1, h, w]``, float32 on the CPU; not finite where the codec's
            arithmetic overflowed.
        in_tiles: device memory was too small for a picture, which was encoded piece by piece; not quite the same.
    """

    latents: Tensor
    in_tiles: bool = False


class LatentCodec(Protocol):
    """Pixels to latents: the host's VAE."""

    @property
    def fingerprint(self) -> str:
        """Hex digest that changes when the weights do."""
        ...

    @property
    def batch_limit(self) -> int:
        """How many pictures of one size are worth encoding at once, 1 or more."""
        ...

    def encode(self, pixels_BHWC: Tensor) -> EncodedPictures:
        """Return the latents of pictures of one size.

        Args:
            pixels_BHWC: RGB in 0..1, float32; ``batch_limit`` pictures at most.
        """
        ...

    def encode_precisely(self, pixels_BHWC: Tensor) -> EncodedPictures | None:
        """Return the latents computed in float32; None where ``encode`` does so already."""
        ...


class TextEncoder(Protocol):
    """Captions to conditioning: the host's CLIP."""

    @property
    def fingerprint(self) -> str:
        """Hex digest that changes when the weights, patches or the chosen layer do."""
        ...

    def encode(self, caption: str) -> Encoding:
        """Return the conditioning of ``caption``, tensors on the CPU."""
        ...


class Weights(NamedTuple):
    """One layer's weight and bias on the compute device, in the compute dtype, for one use.

    ``stable`` is True when the tensors may be kept past that use: nobody will write over them.
    """

    weight: Tensor
    bias: Tensor | None
    stable: bool


class WeightSource(Protocol):
    """Where a frozen layer's weight comes from: the only way the core reads one."""

    def fetch(self, module: nn.Module, like: Tensor) -> AbstractContextManager[Weights]:
        """Yield the weights of ``module`` on ``like.device`` in ``like.dtype``, valid inside the context."""
        ...


class StoredWeights(WeightSource, Protocol):
    """Weights as the host keeps them in RAM, for whoever moves them to the device itself."""

    def payload(self, module: nn.Module) -> tuple[Tensor, ...]:
        """Return everything that must be on the device to use ``module``: weight, bias, scales of a quantised weight.

        Plain contiguous tensors, where the host keeps them; not to be written to. The same number of tensors, shapes
        and types at every call of a run.
        """
        ...

    def finish(self, module: nn.Module, payload: Sequence[Tensor], like: Tensor) -> Weights:
        """Return the weights made of ``payload``, which is on ``like.device`` by now: dequantised, patched, cast.

        May alias ``payload``; ``stable`` says nothing here.
        """
        ...


class Transfers(Protocol):
    """Copies between RAM and one device, beside the computation.

    Computation and copies each run in the order they were issued; nothing else is ordered but by ``wait`` and by the
    fences that ``released`` gives. Copies and fences are opaque.
    """

    @property
    def device(self) -> torch.device: ...

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is on the device already."""
        ...

    def empty(self, num_bytes: int) -> Tensor:
        """Return ``num_bytes`` of device memory, ``uint8``."""
        ...

    def copy_in(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Any] = ()) -> Any:
        """Start to copy ``sources`` (RAM) into ``targets`` (parts of what ``empty`` gave) once all ``after`` passed.

        Returns:
            The copy. Its targets can be read from ``wait`` to ``released``, as often as wanted, until they are part of
            another copy.
        """
        ...

    def wait(self, copy: Any) -> None:
        """Let computation that is issued from now on wait for ``copy``. Raises what went wrong in it."""
        ...

    def released(self, copy: Any) -> Any:
        """End the reading that ``wait`` began; return a fence that passes when what was issued so far is done."""
        ...

    def to_ram(self, tensor: Tensor) -> Any:
        """Return a copy of ``tensor`` in RAM that ``from_ram`` takes once, in order with the computation."""
        ...

    def from_ram(self, kept: Any, room: Tensor | None = None) -> Tensor:
        """Return a device copy of what ``to_ram`` was given, in order with the computation.

        Args:
            room: device memory of the same shape and type to make it in; None takes new memory.
        """
        ...

    def close(self) -> None:
        """Let go of everything; copies under way are finished first."""
        ...


class Denoiser(Protocol):
    """A loaded model, ready to be trained on."""

    @property
    def network(self) -> nn.Module:
        """The module tree that is trained on; never changed."""
        ...

    @property
    def weights(self) -> StoredWeights: ...

    @property
    def device(self) -> torch.device:
        """Where the network computes."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex digest of the base: weights, the patches already on them, the noise schedule."""
        ...

    @property
    def base_name(self) -> str:
        """The base in the words of file metadata, e.g. ``sd_v1``."""
        ...

    @property
    def sigmas(self) -> Tensor:
        """The model's own noise levels, ascending, float32 ``[T]``."""
        ...

    def file_name(self, path: str) -> str:
        """Return the flattened kohya name (``lora_unet_...``) of the layer at ``path`` of the network."""
        ...

    @property
    def prediction(self) -> str:
        """What the network predicts, in the words of file metadata: ``epsilon``, ``v`` or ``flow``."""
        ...

    def supports(self, dtype: torch.dtype) -> bool:
        """Return whether the device can compute in ``dtype`` at all."""
        ...

    def prefers(self, dtype: torch.dtype) -> bool:
        """Return whether the host would compute in ``dtype`` by itself."""
        ...

    def problems(self, latent_shapes: Sequence[tuple[int, ...]]) -> list[str]:
        """Return what in the model, or between it and these latents, makes training impossible."""
        ...

    def notes(self) -> list[str]:
        """Return what on the MODEL only affects sampling and is left out of training."""
        ...

    def scale_latents(self, latents: Tensor) -> Tensor:
        """Return VAE latents at the model's scale."""
        ...

    def add_noise(self, latents: Tensor, noise: Tensor, sigma_B: Tensor) -> Tensor: ...

    def loss_weight(self, sigma_B: Tensor) -> Tensor:
        """Return the weight ``[B]`` that turns the squared x0 error into the model's usual loss."""
        ...

    def condition(
        self, encodings: Sequence[Encoding], noise: Tensor, cuts_padding: bool = False
    ) -> list[tuple[list[int], dict[str, Any]]]:
        """Return the network's keyword arguments for these captions, one each, in the fewest groups.

        A group's captions are as long as its longest one, and give what each gives by itself.

        Args:
            encodings: one per sample.
            noise: ``[B, C, h, w]``, for its shape and device.
            cuts_padding: leave out the padding behind a caption also where the network sees it.

        Returns:
            ``(indices, kwargs)`` pairs; samples whose conditioning can't be stacked land in different groups.
        """
        ...

    def predict_x0(
        self, noised: Tensor, sigma_B: Tensor, conditioning: dict[str, Any], limit: AttentionLimit | None = None
    ) -> Tensor:
        """Return the network's estimate of the clean latents, float32, with gradients when enabled.

        Args:
            limit: where self-attention sees windows; None for nowhere.
        """
        ...

    def load(self, room: int | None = None) -> None:
        """Bring the model to where it is trained on; only then ``network`` is what will be.

        Args:
            room: device bytes that are needed beside the model, whose weights stay in RAM; others are asked to leave.
                None leaves it to the host where the weights are.
        """
        ...

    def training(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Hold the host in a state fit for training with ``dtype`` arithmetic; undo it on every way out."""
        ...

    def simulating(self, dtype: torch.dtype, attention: Callable[..., Tensor]) -> AbstractContextManager[None]:
        """Hold the host so that ``predict_x0`` runs on tensors that have no data; undo it on every way out.

        Nothing is loaded or moved. Timesteps are not looked up; wherever the network attends, ``attention(q, k, v,
        mask)`` is called with ``[B, heads, N, head_dim]`` and gives the same shape as ``q``.
        """
        ...


class Hardware(Protocol):
    """The process and its device: what they use, what they have, and the ceiling on it."""

    def sample(self) -> dict[str, int]:
        """Return byte counts: ``ram``, ``device_allocated``, ``device_reserved``, ``device_total`` ..."""
        ...

    def available(self) -> int | None:
        """Return the device bytes this run may take: what is free, less the host's reserve. None without a device."""
        ...

    def total(self) -> int | None:
        """Return the device's memory in bytes, or None without a device."""
        ...

    def ram_available(self) -> int:
        """Return the RAM in bytes that can be taken without paging."""
        ...

    def capped(self, num_bytes: int) -> AbstractContextManager[None]:
        """Let the process's allocator raise out-of-memory until the context ends.

        Args:
            num_bytes: what may be taken beside what the process has on the device now.
        """
        ...

    def release_cached(self) -> None:
        """Give memory that the allocator holds for later back to the device."""
        ...


class Cancel(Protocol):
    """The user's stop button."""

    def check(self) -> None:
        """Raise the host's interrupt if the user has asked to stop."""
        ...
