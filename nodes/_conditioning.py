"""Conditioning of several captions as one batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def grouped(conds: list[dict[str, Any]]) -> list[list[int]]:
    """Return the places of conds that can be stacked with one another, in the fewest groups."""
    groups: list[list[int]] = []
    for i, cond in enumerate(conds):
        fitting = (group for group in groups if _can_stack(conds[group[0]], cond))
        group = next(fitting, None)
        if group is None:
            groups.append([i])
        else:
            group.append(i)
    return groups


def stacked(conds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the network's keyword arguments for conds that can be stacked."""
    first, *others = conds
    return {key: _usable(cond.concat([other[key] for other in others])) for key, cond in first.items()}


def _can_stack(first: dict[str, Any], other: dict[str, Any]) -> bool:
    return first.keys() == other.keys() and all(first[key].can_concat(other[key]) for key in first)


def _usable(value: Any) -> Any:
    """Return ``value`` without inference tensors, which autograd refuses to save."""
    if isinstance(value, Tensor) and value.is_inference():
        return value.clone()
    if isinstance(value, list | tuple):
        return type(value)(_usable(item) for item in value)
    return value
