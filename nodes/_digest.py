"""Digests of the host's models, for fingerprints and content addresses."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES_PER_TENSOR = 64
# Objects hold each other in circles; this deep, the type's name has to do.
MAX_DEPTH = 6


def digest(parts: Iterable[str]) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode("utf-8"))
        state.update(b"\0")
    return state.hexdigest()


def patcher_digest(patcher: Any, ignored: Collection[str] = ()) -> str:
    """Return a digest of a model's weights as they are before patching, and of the patches on them."""
    return digest(
        f"{name} {describe(original)} {[describe(patch) for patch in patches]}"
        for name, ((original, _), *patches) in sorted(patcher.get_key_patches().items())
        if name not in ignored
    )


def describe(value: Any, depth: int = 0) -> str:
    """Return text that stands for ``value`` in any process: no addresses, no hashes.

    Tensors stand by shape, type and a strided sample of their numbers; functions by where they were written and what
    they have captured; other objects by their attributes.
    """
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if value is None or isinstance(value, str | int | float | bool | torch.dtype | torch.device):
        return repr(value)
    if depth > MAX_DEPTH:
        return type(value).__qualname__
    if isinstance(value, list | tuple):
        return f"[{', '.join(describe(item, depth + 1) for item in value)}]"
    if isinstance(value, dict):
        return str(sorted((str(key), describe(item, depth + 1)) for key, item in value.items()))
    return _describe_object(value, depth + 1)


def _describe_object(value: Any, depth: int) -> str:
    if isinstance(value, FunctionType | MethodType):
        function = getattr(value, "__func__", value)
        captured = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        owner = getattr(value, "__self__", None)
        return (
            f"{function.__module__}.{function.__qualname__} {describe([owner, function.__defaults__, captured], depth)}"
        )
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {describe(dict(value.state_dict()), depth)}"
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"{name} {describe(getattr(value, '__dict__', {}), depth)}"


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _describe_tensor(tensor: Tensor) -> str:
    numel = tensor.numel()
    picked = torch.linspace(0, max(numel - 1, 0), min(numel, SAMPLES_PER_TENSOR), dtype=torch.float64).long()
    flat = tensor.detach().reshape(-1)
    numbers = flat[picked.to(flat.device)].to("cpu", torch.float32).tolist() if numel else []
    return f"{tuple(tensor.shape)} {tensor.dtype} {numbers}"
