"""One caption's conditioning, as tensors and plain data that fit in a safetensors file."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedModelError
from ..ports import Encoding


def pack(conditioning: list[Any]) -> Encoding:
    """Return ``conditioning``, the host's list of ``[tensor, dict]``, as an ``Encoding``.

    Dicts, lists, tuples, tensors, text, numbers, booleans and None may be nested in any way. Tensors become
    contiguous CPU copies, bit for bit.

    Raises:
        UnsupportedModelError: something else is in there; the message names its key.
    """
    tensors: dict[str, Tensor] = {}
    structure = _describe(conditioning, "conditioning", tensors)
    return Encoding(tensors, json.dumps(structure))


def unpack(encoding: Encoding) -> list[Any]:
    """Return the conditioning that was packed; its tensors are the encoding's own, not copies."""
    conditioning = _restore(json.loads(encoding.structure), encoding.tensors)
    assert isinstance(conditioning, list)
    return conditioning


def _describe(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Return JSON for ``value``: lists and plain values as they are, the rest as ``{kind: content}``."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Tensor) and value.layout is torch.strided:
        name = f"t{len(tensors)}"
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, list):
        return [_describe(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": _describe(list(value), where, tensors)}
    if isinstance(value, dict):
        pairs = [[key, _describe(item, f"{where}[{key!r}]", tensors)] for key, item in value.items()]
        return {"dict": [_check_key(pair, where) for pair in pairs]}
    raise UnsupportedModelError(
        f"The text encoder's output holds {where} of type {type(value).__name__}, which can't be cached.",
        "Connect a CLIP without hooks to Build Tiered Cache.",
    )


def _check_key(pair: list[Any], where: str) -> list[Any]:
    if pair[0] is None or isinstance(pair[0], str | int | float):
        return pair
    raise UnsupportedModelError(
        f"The text encoder's output holds {where} with the key {pair[0]!r}, which can't be cached.",
        "Connect a CLIP without hooks to Build Tiered Cache.",
    )


def _restore(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_restore(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_restore(content, tensors))
    return {key: _restore(item, tensors) for key, item in content}
