"""Tensors inside nested containers: taken out, and put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

# What holds no tensor, and most of what blocks are given.
_ATOMS = frozenset({type(None), bool, int, float, str})


class _Place:
    """Where a tensor was."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Places:
    """Collects tensors; the same one gets one place however often it occurs."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._index: dict[int, int] = {}

    def taken(self, value: Any) -> tuple[Any, list[int]]:
        """Return ``value`` with places for its tensors, and their indices in ``tensors``.

        Containers are copied, so that what is written into a dict later does not change them. Understands dicts,
        lists, tuples and dataclasses.
        """
        indices: list[int] = []
        return self._take(value, indices), indices

    def _take(self, value: Any, indices: list[int]) -> Any:
        if type(value) in _ATOMS:
            return value
        if not isinstance(value, Tensor):
            return _map(value, lambda item: self._take(item, indices))
        index = self._index.setdefault(id(value), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(value)
        indices.append(index)
        return _Place(index)


def rebuilt(value: Any, tensors: list[Tensor]) -> Any:
    """Return ``value`` with ``tensors`` in the places that ``Places`` made."""
    kind = type(value)
    if kind is _Place:
        return tensors[value.index]
    return value if kind in _ATOMS else _map(value, lambda item: rebuilt(item, tensors))


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [function(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if hasattr(type(value), "__dataclass_fields__"):
        fields = {f.name: function(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value
