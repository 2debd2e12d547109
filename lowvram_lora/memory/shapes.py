"""Operations on tensors without data, answered from memory: the same shapes in give the same shapes out.

What torch does for the ``meta`` device is written in Python for many operations, and takes longer than a device takes
for the real ones. A step repeats the same few hundred operations thousands of times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Made(NamedTuple):
    """What a tensor without data is made of."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Shapes:
    """Runs operations on ``meta`` tensors, each combination of shapes and arguments once."""

    def __init__(self) -> None:
        self._makes: dict[Any, tuple[Callable[..., Any], tuple[_Made, ...]]] = {}
        self._written: set[Any] = set()
        self._kinds: dict[Any, str] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``func`` returns."""
        kind = self._kinds.get(func) or self._learn_kind(func)
        if kind == "view":
            return func(*args, **kwargs)
        try:
            key = func, _described(args), _described(tuple(kwargs.items()))
            hash(key)
        except TypeError:
            return func(*args, **kwargs)
        answer = self._make if kind == "fresh" else self._write
        return answer(key, func, args, kwargs)

    def _learn_kind(self, func: Any) -> str:
        schema = func._schema
        is_fresh = all(a.alias_info is None for a in (*schema.arguments, *schema.returns))
        # It writes into its first argument and returns that.
        first = schema.arguments[0].alias_info if schema.arguments else None
        is_write = first is not None and first.is_write and len(schema.returns) == 1
        others = any(a.alias_info is not None for a in schema.arguments[1:])
        kind = "fresh" if is_fresh else "write" if is_write and not others else "view"
        self._kinds[func] = kind
        return kind

    def _make(self, key: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = self._makes.get(key)
        if known is not None:
            kind, parts = known
            made = [torch.empty_strided(*part[:2], dtype=part.dtype, device="meta") for part in parts]
            return made[0] if kind is Tensor else kind(made)
        out = func(*args, **kwargs)
        tensors: Any = (out,) if isinstance(out, Tensor) else out
        if not isinstance(tensors, tuple | list) or not all(_is_meta(tensor) for tensor in tensors):
            return out
        given = {_storage(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
        if any(_storage(tensor) in given for tensor in tensors):
            # Some views do not say that they are.
            self._kinds[func] = "view"
        elif tensors:
            described = tuple(_Made(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors)
            self._makes[key] = Tensor if isinstance(out, Tensor) else type(out), described
        return out

    def _write(self, key: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if key in self._written:
            return args[0]
        out = func(*args, **kwargs)
        if out is args[0] and _is_meta(out):
            self._written.add(key)
        return out


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta" and type(value) is Tensor


def _described(value: Any) -> Any:
    """Return something hashable that stands for ``value`` as far as shapes depend on it."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple(_described(item) for item in value)
    # 1, 1.0 and True are equal and give other types.
    return type(value), value
