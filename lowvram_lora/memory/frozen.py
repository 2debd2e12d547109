"""Frozen layers: matrices whose weight autograd never keeps.

A plain layer saves its weight for the backward pass. Here forward fetches the weight, uses it and lets it go, and
backward fetches it again for the input's gradient. So a weight may live anywhere (CPU RAM, a page the host reuses,
a quantised tensor, a tensor made in inference mode, which autograd refuses to save) and no gradient of the weight
itself is ever computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..ports import Weights, WeightSource
from .convolution import convolve, input_gradient


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
    def forward(ctx: Any, x: Tensor, module: nn.Module, source: BlockMemory) -> Tensor:
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
        with ctx.source.fetch(ctx.module, grad, is_last=True) as (weight, _, _):
            return grad @ weight, None, None


class _FrozenConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, source: BlockMemory) -> Tensor:
        ctx.module, ctx.source, ctx.shape = module, source, x.shape

        def compute() -> Tensor:
            with source.fetch(module, x) as (weight, bias, _):
                return convolve(x, weight, bias, module)

        return source.convolved(compute)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        with ctx.source.fetch(ctx.module, grad, is_last=True) as (weight, _, _):
            return input_gradient(grad, ctx.shape, weight, ctx.module), None, None


def frozen_forward(module: nn.Module, source: BlockMemory) -> Callable[[Tensor], Tensor]:
    """Return a forward for ``module`` that computes what its own does and keeps no weight."""
    function = _FrozenLinear if is_linear(module) else _FrozenConv

    def forward(x: Tensor) -> Tensor:
        out: Tensor = function.apply(x, module, source)
        return out

    return forward


class BlockMemory:
    """A source of weights that knows when a block runs for the second time.

    A recomputed block is followed at once by its backward pass, so inside ``replaying`` what was fetched is held and
    read once for both. And the outputs of convolutions are kept from the first run: they are small for the work they
    take, and with them no convolution runs twice.

    Attributes:
        is_fetching: the source is handing out or taking back, and may write into memory of its own.
    """

    def __init__(self, source: WeightSource) -> None:
        self.is_fetching = False
        self._source = source
        self._held: dict[tuple[nn.Module, torch.dtype], tuple[Weights, ExitStack]] | None = None
        self._recorded: list[Tensor] | None = None
        self._replayed: Iterator[Tensor] | None = None

    @contextmanager
    def recording(self, outputs: list[Tensor]) -> Iterator[None]:
        """Append every convolution's output to ``outputs`` until the context ends."""
        self._recorded = outputs
        try:
            yield
        finally:
            self._recorded = None

    @contextmanager
    def replaying(self, outputs: list[Tensor]) -> Iterator[None]:
        """Hold weights, and answer convolutions with ``outputs``, as recorded, until the context ends."""
        self._held, self._replayed = {}, iter(outputs)
        try:
            yield
        finally:
            for _, context in self._held.values():
                context.close()
            self._held = self._replayed = None

    @contextmanager
    def fetch(self, module: nn.Module, like: Tensor, is_last: bool = False) -> Iterator[Weights]:
        """Yield the held weights of ``module``, or fetch them.

        Args:
            is_last: the backward pass asks, and the block will not need them again.
        """
        key = module, like.dtype
        held = self._held.pop(key, None) if self._held else None
        weights, context = held or self._fetched(module, like)
        with context:
            if self._held is not None and weights.stable and not is_last:
                # The source gets its weights back when the block is done with them.
                self._held[key] = weights, context.pop_all()
            yield weights

    def _fetched(self, module: nn.Module, like: Tensor) -> tuple[Weights, ExitStack]:
        with ExitStack() as context:
            self.is_fetching = True
            context.callback(setattr, self, "is_fetching", False)
            weights = context.enter_context(self._source.fetch(module, like))
            context.callback(setattr, self, "is_fetching", True)
            self.is_fetching = False
            return weights, context.pop_all()
        raise AssertionError("the source swallowed an error")

    def convolved(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return a convolution's output: the recorded one, or that of ``compute``."""
        recorded = next(self._replayed, None) if self._replayed is not None else None
        if recorded is not None:
            return recorded
        out = compute()
        if self._recorded is not None:
            self._recorded.append(out)
        return out


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
