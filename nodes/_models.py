"""The host's MODEL, CLIP and VAE as the core's ports. With ``_host.py`` the only host imports."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..lowvram_lora.data.encodings import Encoding, pack

SAMPLES_PER_TENSOR = 64


class HostVae:
    """The host's VAE as the core's ``LatentCodec``."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae
        self.fingerprint = patcher_digest(vae.patcher)

    def encode(self, pixels_HWC: Tensor) -> Tensor:
        """Return the unscaled latents of one picture, without the batch axis."""
        latents: Tensor = self._vae.encode(pixels_HWC.unsqueeze(0))
        return latents[0].float().cpu()


class HostClip:
    """The host's CLIP as the core's ``TextEncoder``."""

    def __init__(self, clip: Any) -> None:
        self._clip = clip
        options = (clip.layer_idx, sorted(clip.tokenizer_options.items()))
        self.fingerprint = _digest([patcher_digest(clip.patcher), repr(options)])

    def encode(self, caption: str) -> Encoding:
        """Return the conditioning the host's own CLIP Text Encode node gives for ``caption``."""
        return pack(self._clip.encode_from_tokens_scheduled(self._clip.tokenize(caption), show_pbar=False))


def _digest(parts: Iterable[str]) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode("utf-8"))
        state.update(b"\0")
    return state.hexdigest()


def patcher_digest(patcher: Any) -> str:
    """Return a digest of a model's weights as they are before patching, and of the patches on them."""
    return _digest(
        f"{name} {_describe(original)} {[_describe(patch) for patch in patches]}"
        for name, ((original, _), *patches) in sorted(patcher.get_key_patches().items())
    )


def _describe(value: Any) -> str:
    """Return text that stands for ``value``: tensors by shape, type and a strided sample of their numbers."""
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {[(n, _describe(b)) for n, b in value.state_dict().items()]}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_describe(item) for item in value)}]"
    if isinstance(value, dict):
        return str(sorted((str(key), _describe(item)) for key, item in value.items()))
    if value is None or isinstance(value, str | int | float | bool | torch.dtype | torch.device):
        return repr(value)
    # A weight adapter keeps its tensors in `weights`; anything else stands for itself by type.
    return f"{type(value).__qualname__} {_describe(getattr(value, 'weights', None))}"


def _describe_tensor(tensor: Tensor) -> str:
    numel = tensor.numel()
    picked = torch.linspace(0, max(numel - 1, 0), min(numel, SAMPLES_PER_TENSOR), dtype=torch.float64).long()
    flat = tensor.detach().reshape(-1)
    numbers = flat[picked.to(flat.device)].to("cpu", torch.float32).tolist() if numel else []
    return f"{tuple(tensor.shape)} {tensor.dtype} {numbers}"
