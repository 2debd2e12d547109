"""Kernels that a network calls and autograd can't go through, found in its code; nothing of the host is imported."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

# Fused kernels of newer hosts that autograd has no formula for; most networks do without them while they train.
_NO_GRADIENT = "rms_rope_split_half"


def kernel_problems(network: nn.Module) -> list[str]:
    """Return whether the network's own code calls a kernel without a gradient, in training as well."""
    kinds = {kind for module in network.modules() for kind in type(module).__mro__}
    functions = ((kind, item) for kind in kinds for item in vars(kind).values() if isinstance(item, FunctionType))
    calling = ((kind, set(_names_in(function.__code__))) for kind, function in functions)
    found = sorted(kind.__module__ for kind, names in calling if _NO_GRADIENT in names and "in_training" not in names)
    return [
        f"ComfyUI computes this model's attention with a kernel ({_NO_GRADIENT}, in {where}) that has no gradient, so "
        "this version of ComfyUI can't train it. Use a version that trains without it, such as 0.3.75."
        for where in found[:1]
    ]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
