"""Digests of the host's models, for fingerprints and content addresses."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ._weights import stored

SAMPLES_PER_TENSOR = 64
# Objects may hold half the host; past this many, a type's name has to do.
MAX_OBJECTS = 50_000
# What a closure's cell is until it is filled.
_EMPTY = CellType()
_PLAIN = (str, int, float, bool, complex, bytes, torch.dtype, torch.device)


def digest(parts: Iterable[str]) -> str:
    """Return the sha256 of ``parts`` in order, as hex."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode("utf-8", "surrogatepass"))
        state.update(b"\0")
    return state.hexdigest()


def patcher_digest(patcher: Any, ignored: Collection[str] = ()) -> str:
    """Return a digest of a model's weights as they are before patching, and of the patches on them."""
    return digest(
        f"{name} {describe(original)} {[describe(patch) for patch in patches]}"
        for name, ((original, _), *patches) in sorted(patcher.get_key_patches().items())
        if name not in ignored
    )


def describe(value: Any) -> str:
    """Return text that stands for ``value`` in any process: no addresses, no hashes.

    Tensors stand by shape, type and a strided sample of their numbers; functions by their code and what they have
    captured; other objects by their class and attributes.
    """
    return _Description().of(value)


class _Description:
    """One walk through an object and what it holds."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._num_objects = 0

    def of(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return _describe_tensor(value)
        if value is None or isinstance(value, _PLAIN):
            return repr(value)
        self._num_objects += 1
        if id(value) in self._open or self._num_objects > MAX_OBJECTS:
            return _class_name(value)
        self._open.add(id(value))
        try:
            return self._of_container(value)
        finally:
            self._open.discard(id(value))

    def _of_container(self, value: Any) -> str:
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.of, value))}]"
        if isinstance(value, dict):
            return str(sorted((self.of(key), self.of(item)) for key, item in value.items()))
        if isinstance(value, set | frozenset):
            return str(sorted(map(self.of, value)))
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return _describe_tensor(torch.from_numpy(np.ascontiguousarray(value)))
        return f"{_class_name(value)} {self.of(list(_parts(value)))}"


def _class_name(value: Any) -> str:
    # The host makes some classes anew at each use, under one name; what they inherit tells them apart.
    return " ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__)


def _parts(value: Any) -> Iterator[Any]:
    """Yield what ``value`` is made of."""
    if isinstance(value, FunctionType):
        yield from (value.__module__, value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__)
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, CodeType):
        yield from (value.co_code, value.co_consts, value.co_names)
    elif isinstance(value, type):
        yield from (value.__module__, value.__qualname__)
    else:
        if isinstance(value, nn.Module):
            yield dict(value.state_dict())
        attributes = getattr(value, "__dict__", {})
        yield {name: item for name, item in attributes.items() if not (isinstance(value, nn.Module) and name[0] == "_")}
        yield [getattr(value, name, None) for name in getattr(type(value), "__slots__", ()) if name != "__weakref__"]


def _describe_tensor(tensor: Tensor) -> str:
    numel = tensor.numel()
    picked = torch.linspace(0, max(numel - 1, 0), min(numel, SAMPLES_PER_TENSOR), dtype=torch.float64).long()
    flat = tensor.detach().reshape(-1)
    if tensor.dtype.is_floating_point and tensor.element_size() == 1:
        # Older versions of torch can't pick numbers of these types, but bytes; and of some they know no values.
        sample = flat.view(torch.uint8)[picked.to(flat.device)].cpu()
        sample = sample.view(tensor.dtype) if str(tensor.dtype).startswith("torch.float8") else sample
    else:
        sample = flat[picked.to(flat.device)].cpu()
    return f"{tuple(tensor.shape)} {tensor.dtype} {sample.float().tolist() if numel else []}"


def is_quantised(model: nn.Module) -> bool:
    """Return whether any parameter of ``model`` is stored in less than 2 bytes a number, or in a type of its own."""
    kinds = {(type(parameter), parameter.element_size()) for parameter in model.parameters()}
    return any(kind not in (Tensor, nn.Parameter) or num_bytes == 1 for kind, num_bytes in kinds)


def quantised_digest(patcher: Any) -> str:
    """Return a digest of weights that the host lists under other names, or not as they are."""
    tensors = {**dict(patcher.model.named_parameters()), **dict(patcher.model.named_buffers())}
    originals = {name: patcher.backup[name].weight if name in patcher.backup else t for name, t in tensors.items()}
    weights = (
        f"{name} {[f'{part.dtype} {describe(_indexable(part))}' for part in stored(tensor)]}"
        for name, tensor in sorted(originals.items())
    )
    return digest([*weights, *(f"{key} {describe(patches)}" for key, patches in sorted(patcher.patches.items()))])


def _indexable(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or its bytes where torch can't pick numbers of its type (float8)."""
    return tensor.reshape(-1).view(torch.uint8) if tensor.element_size() == 1 else tensor
