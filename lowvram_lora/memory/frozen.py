"""Frozen layers: matrices whose weight autograd never keeps.

A plain layer saves its weight for the backward pass. Here forward fetches the weight, uses it and lets it go, and
backward fetches it again for the input's gradient. So a weight may live anywhere (CPU RAM, a page the host reuses,
a quantised tensor, a tensor made in inference mode, which autograd refuses to save) and no gradient of the weight
itself is ever computed.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..ports import Weights, WeightSource


def is_linear(module: nn.Module) -> bool:
    """Return whether ``module`` multiplies by a matrix. Quantised layers are not ``nn.Linear``: judge by shape."""
    return hasattr(module, "in_features") and hasattr(module, "out_features") and hasattr(module, "weight")


def is_conv(module: nn.Module) -> bool:
    """Return whether ``module`` is a convolution, plain or transposed."""
    return hasattr(module, "kernel_size") and hasattr(module, "in_channels") and hasattr(module, "transposed")


def is_matrix(module: nn.Module) -> bool:
    """Return whether ``module`` is a layer this file can freeze."""
    return is_linear(module) or is_conv(module)


def matrices(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of every matrix in ``network``, each module once."""
    return ((path, module) for path, module in network.named_modules() if is_matrix(module))


def why_not(module: nn.Module) -> str | None:
    """Return why ``module`` can't be frozen, or None."""
    if not is_conv(module):
        return None
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return f"it pads with '{module.padding_mode}'"
    if isinstance(module.padding, str):
        return f"its padding is '{module.padding}'"
    return None


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, source: WeightSource) -> Tensor:
        ctx.module, ctx.source = module, source
        with source.fetch(module, x) as (weight, bias, _):
            # The result must own its storage: F.linear's is a view for 3-D input, and the Flux family adds to it
            # in place.
            out = x.new_empty(*x.shape[:-1], weight.shape[0])
            rows, flat = x.reshape(-1, x.shape[-1]), out.view(-1, weight.shape[0])
            if bias is None:
                torch.mm(rows, weight.t(), out=flat)
            else:
                torch.addmm(bias, rows, weight.t(), out=flat)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        with ctx.source.fetch(ctx.module, grad) as (weight, _, _):
            return grad @ weight, None, None


class _FrozenConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, source: WeightSource) -> Tensor:
        ctx.module, ctx.source, ctx.shape = module, source, x.shape
        with source.fetch(module, x) as (weight, bias, _):
            return torch.convolution(x, weight, bias, **_geometry(module))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        with ctx.source.fetch(ctx.module, grad) as (weight, _, _):
            # Only the input's shape is needed for its gradient, so one number stands for all of it.
            stand_in = grad.new_empty(1).expand(ctx.shape)
            grad_x, _, _ = torch.ops.aten.convolution_backward(
                grad, stand_in, weight, None, **_geometry(ctx.module), output_mask=(True, False, False)
            )
        return grad_x, None, None


def _geometry(module: Any) -> dict[str, Any]:
    return {
        "stride": module.stride,
        "padding": module.padding,
        "dilation": module.dilation,
        "transposed": module.transposed,
        "output_padding": module.output_padding,
        "groups": module.groups,
    }


def frozen_forward(module: nn.Module, source: WeightSource) -> Callable[[Tensor], Tensor]:
    """Return a forward for ``module`` that computes what its own does and keeps no weight."""
    function = _FrozenLinear if is_linear(module) else _FrozenConv

    def forward(x: Tensor) -> Tensor:
        out: Tensor = function.apply(x, module, source)
        return out

    return forward


class HeldWeights:
    """A source that, inside ``hold()``, keeps what it fetched, so that a recomputed block reads its weights once.

    Only weights that the source calls stable are kept; a block's backward pass follows its recompute at once, so at
    most one block's weights are held.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._held: dict[tuple[nn.Module, torch.dtype], Weights] | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep stable weights until the context ends."""
        before, self._held = self._held, {}
        try:
            yield
        finally:
            self._held = before

    def fetch(self, module: nn.Module, like: Tensor) -> AbstractContextManager[Weights]:
        """Return the held weights of ``module``, or fetch them."""
        if self._held is None:
            return self._source.fetch(module, like)
        return self._fetch_and_hold(module, like)

    @contextmanager
    def _fetch_and_hold(self, module: nn.Module, like: Tensor) -> Iterator[Weights]:
        held, key = self._held, (module, like.dtype)
        found = held.get(key) if held is not None else None
        if found is not None:
            yield found
            return
        with self._source.fetch(module, like) as weights:
            if held is not None and weights.stable:
                held[key] = weights
            yield weights


@contextmanager
def frozen(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Give each module its forward from ``forwards``; on every way out the modules are as they were.

    The module tree is not touched: names, parameters and buffers stay the host's.
    """
    with ExitStack() as undo:
        for module, forward in forwards.items():
            undo.callback(_restore_forward, module, module.__dict__.get("forward"))
            module.forward = forward
        yield


def _restore_forward(module: nn.Module, before: Any) -> None:
    if before is None:
        module.__dict__.pop("forward", None)
    else:
        module.forward = before


@contextmanager
def usable_parameters(network: nn.Module, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Stand in a normal tensor for every small parameter (norms, embeddings, free ones) for as long as this lasts.

    The host's parameters are inference tensors, which autograd refuses to save. Layers that cast their own weights
    get them in ``dtype``; free parameters keep theirs, since the network's code decides about them. The host's
    parameter objects come back on every way out.
    """
    with ExitStack() as undo:
        for module in network.modules():
            if is_matrix(module) or isinstance(module, nn.Embedding):
                continue
            casts_itself = hasattr(module, "weight_function")
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                undo.callback(module._parameters.__setitem__, name, parameter)
                wanted = dtype if casts_itself and parameter.is_floating_point() else parameter.dtype
                clone = parameter.detach().to(device, wanted, copy=True)
                module._parameters[name] = nn.Parameter(clone, requires_grad=False)
        yield
