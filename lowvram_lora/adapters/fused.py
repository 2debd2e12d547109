"""A frozen layer and its LoRA as one autograd function.

``y = x W^T + b + s (x D^T) U^T`` with ``s = alpha / rank`` (Hu et al., LoRA, arXiv:2106.09685). Base and adapter are
summed into one output, and the input's gradient into one tensor, so there is no second tensor of either size. What is
saved for the backward pass is the input and the rank-sized ``x D^T``; the weight is fetched again.

The small matrices are cast to the input's dtype, rather than the large input to theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..memory.convolution import convolve, geometry, input_gradient
from ..memory.frozen import BlockMemory, is_linear


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a call needs beside its input.

    ``down`` is ``[r, in]`` or ``[r, in, *kernel]``, ``up`` ``[out, r]`` or ``[out, r, 1, ...]``.
    """

    module: Any
    source: BlockMemory
    down: Tensor
    up: Tensor
    scaling: float


def fused_forward(
    module: nn.Module, source: BlockMemory, down: nn.Parameter, up: nn.Parameter, scaling: float
) -> Callable[[Tensor], Tensor]:
    """Return a forward for ``module``: its own output plus ``scaling`` times that of the adapter ``down``, ``up``.

    The output owns its storage, because some networks add to it in place.
    """
    layer = _Layer(module, source, down, up, scaling)
    compute, function = (_linear, _FusedLinear) if is_linear(module) else (_conv, _FusedConv)

    def forward(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return compute(x, layer)[0]
        out: Tensor = function.apply(x, down, up, layer)
        return out

    return forward


def _linear(x: Tensor, layer: _Layer, is_last: bool = True) -> tuple[Tensor, Tensor]:
    """Return the output and ``x D^T`` as rows ``[N, r]``."""
    rows = x.reshape(-1, x.shape[-1])
    hidden = F.linear(rows, layer.down.to(x.dtype))
    with layer.source.fetch(layer.module, x, is_last) as (weight, bias, _):
        out = F.linear(rows, weight, bias)
    # Not in place by its name: a block that writes in place is recomputed in another way.
    torch.addmm(out, hidden, layer.up.to(x.dtype).t(), alpha=layer.scaling, out=out)
    return out.view(*x.shape[:-1], out.shape[1]).data, hidden


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, layer: _Layer) -> Tensor:
        # Where the input needs no gradient, the backward pass has no use for the weight.
        out, hidden = _linear(x, layer, is_last=not ctx.needs_input_grad[0])
        ctx.layer = layer
        ctx.save_for_backward(x, hidden, down, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        layer: _Layer = ctx.layer
        x, hidden, down, up = ctx.saved_tensors
        grad_rows, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        # Scaled by the product itself, before it is rounded; what would be added has no say.
        scaled: Any = {"beta": 0, "alpha": layer.scaling}
        nothing = grad.new_empty(())
        grad_hidden = torch.addmm(nothing, grad_rows, up.to(grad.dtype), **scaled)
        # Twice as fast on the CPU in bf16 as its transpose.
        grad_up = torch.addmm(nothing, hidden.t(), grad_rows, **scaled).t()
        grad_down = torch.mm(grad_hidden.t(), rows)
        grad_x = None
        if ctx.needs_input_grad[0]:
            with layer.source.fetch(layer.module, grad, is_last=True) as (weight, _, _):
                grad_x = torch.mm(grad_rows, weight)
            grad_x = grad_x.addmm_(grad_hidden, down.to(grad.dtype)).view(x.shape)
        # Autograd casts to the parameter's type, but would leave the other order, which a parameter can't keep.
        return grad_x, grad_down, grad_up.to(up.dtype, memory_format=torch.contiguous_format), None


def _conv(x: Tensor, layer: _Layer, is_last: bool = True) -> tuple[Tensor, Tensor]:
    """Return the output and what the down convolution gives.

    A block's second run is answered with both from its first: sums included, since the adapter is the same in both.
    """
    module, source = layer.module, layer.source

    def narrow() -> Tensor:
        return torch.convolution(x, layer.down.to(x.dtype), None, **geometry(module))

    def total() -> Tensor:
        with source.fetch(module, x, is_last) as (weight, bias, _):
            out = convolve(x, weight, bias, module)
        # A view that can't be made raises; a copy would lose the sum.
        flat, up = out.view(*out.shape[:2], -1), layer.up.to(x.dtype).flatten(1)
        rows = hidden.reshape(*hidden.shape[:2], -1)
        torch.baddbmm(flat, up.expand(len(x), *up.shape), rows, alpha=layer.scaling, out=flat)
        return out

    hidden = source.convolved(narrow)
    return source.convolved(total), hidden


class _FusedConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, layer: _Layer) -> Tensor:
        out, hidden = _conv(x, layer, is_last=not ctx.needs_input_grad[0])
        ctx.layer = layer
        ctx.save_for_backward(x, hidden, down, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        layer: _Layer = ctx.layer
        x, hidden, down, up = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[0]
        flat_grad, rows = grad.reshape(*grad.shape[:2], -1), hidden.reshape(*hidden.shape[:2], -1)
        grad_up = torch.bmm(rows, flat_grad.transpose(1, 2)).sum(0).t().mul_(layer.scaling)
        grad_hidden = torch.matmul(up.to(grad.dtype).flatten(1).t(), flat_grad).mul_(layer.scaling)
        grad_x, grad_down, _ = torch.ops.aten.convolution_backward(
            grad_hidden.view(hidden.shape),
            x,
            down.to(grad.dtype),
            None,
            **geometry(layer.module),
            output_mask=(needs_x, True, False),
        )
        if needs_x:
            with layer.source.fetch(layer.module, grad, is_last=True) as (weight, _, _):
                grad_x.add_(input_gradient(grad, x.shape, weight, layer.module))
        return grad_x, grad_down, grad_up.reshape(up.shape), None
