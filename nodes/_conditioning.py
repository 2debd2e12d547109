"""Conditioning of several captions as one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

TEXT = "c_crossattn"
"""The host's name of the captions' tokens among the network's arguments."""
ROWS = "lowvram_lora_text_rows"
"""Our own argument: how many rows of each caption are its own, where some are padded. The network never gets it."""

MayPad = Callable[[int], bool]
"""Whether captions padded to so many rows can be hidden from the network again."""


def grouped(conds: list[dict[str, Any]], may_pad: MayPad = lambda _: False) -> list[list[int]]:
    """Return the places of conds that can be stacked with one another, in the fewest groups."""
    groups: list[list[int]] = []
    for i, cond in enumerate(conds):
        fitting = (group for group in groups if _can_stack([conds[j] for j in group], cond, may_pad))
        group = next(fitting, None)
        if group is None:
            groups.append([i])
        else:
            group.append(i)
    return groups


def stacked(conds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the network's keyword arguments for conds that can be stacked; captions are as long as the longest."""
    first, *others = conds
    keys = [key for key in first if key != TEXT]
    together = {key: _usable(first[key].concat([other[key] for other in others])) for key in keys}
    if TEXT in first:
        together.update(_stacked_text([cond[TEXT] for cond in conds]))
    return together


def _can_stack(group: list[dict[str, Any]], other: dict[str, Any], may_pad: MayPad) -> bool:
    first = group[0]
    if first.keys() != other.keys() or not all(first[key].can_concat(other[key]) for key in first if key != TEXT):
        return False
    return TEXT not in first or _text_fits([*(cond[TEXT] for cond in group), other[TEXT]], may_pad)


def _text_fits(texts: list[Any], may_pad: MayPad) -> bool:
    if _repeats(texts):
        return True
    shapes = [text.cond.shape for text in texts]
    same_but_rows = len({(shape[0], *shape[2:]) for shape in shapes}) == 1
    return same_but_rows and all(len(shape) == 3 for shape in shapes) and may_pad(max(shape[1] for shape in shapes))


def _repeats(texts: list[Any]) -> bool:
    """Return whether the host's own way makes one batch of ``texts`` that is as long as the longest of them.

    It repeats captions in networks that attend to them from outside, which changes nothing; to the least common
    multiple, which may be far longer than the longest.
    """
    first, *others = texts
    if not all(first.can_concat(other) for other in others):
        return False
    lengths = [text.cond.shape[1] for text in texts if text.cond.ndim > 1]
    return all(max(lengths) % length == 0 for length in lengths)


def _stacked_text(texts: list[Any]) -> dict[str, Any]:
    if _repeats(texts):
        return {TEXT: _usable(texts[0].concat(texts[1:]))}
    rows = tuple(text.cond.shape[1] for text in texts)
    padded = [pad(text.cond, (0, 0, 0, max(rows) - text.cond.shape[1])) for text in texts]
    return {TEXT: _usable(torch.cat(padded)), ROWS: rows}


def _usable(value: Any) -> Any:
    """Return ``value`` without inference tensors, which autograd refuses to save."""
    if isinstance(value, Tensor) and value.is_inference():
        return value.clone()
    if isinstance(value, list | tuple):
        return type(value)(_usable(item) for item in value)
    return value
