"""Digests of the host's models, for fingerprints and content addresses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES_PER_TENSOR = 64


def digest(parts: Iterable[str]) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode("utf-8"))
        state.update(b"\0")
    return state.hexdigest()


def patcher_digest(patcher: Any) -> str:
    """Return a digest of a model's weights as they are before patching, and of the patches on them."""
    return digest(
        f"{name} {describe(original)} {[describe(patch) for patch in patches]}"
        for name, ((original, _), *patches) in sorted(patcher.get_key_patches().items())
    )


def describe(value: Any) -> str:
    """Return text that stands for ``value``: tensors by shape, type and a strided sample of their numbers."""
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {[(n, describe(b)) for n, b in value.state_dict().items()]}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(describe(item) for item in value)}]"
    if isinstance(value, dict):
        return str(sorted((str(key), describe(item)) for key, item in value.items()))
    if value is None or isinstance(value, str | int | float | bool | torch.dtype | torch.device):
        return repr(value)
    # A weight adapter keeps its tensors in `weights`; anything else stands for itself by type.
    return f"{type(value).__qualname__} {describe(getattr(value, 'weights', None))}"


def _describe_tensor(tensor: Tensor) -> str:
    numel = tensor.numel()
    picked = torch.linspace(0, max(numel - 1, 0), min(numel, SAMPLES_PER_TENSOR), dtype=torch.float64).long()
    flat = tensor.detach().reshape(-1)
    numbers = flat[picked.to(flat.device)].to("cpu", torch.float32).tolist() if numel else []
    return f"{tuple(tensor.shape)} {tensor.dtype} {numbers}"
