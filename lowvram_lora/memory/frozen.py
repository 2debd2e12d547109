"""Frozen layers: matrices whose weight autograd never keeps.

A plain layer saves its weight for the backward pass. Here forward fetches the weight, uses it and lets it go, and
backward fetches it again for the input's gradient. So a weight may live anywhere (CPU RAM, a page the host reuses,
a quantised tensor, a tensor made in inference mode, which autograd refuses to save) and no gradient of the weight
itself is ever computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ports import Weights, WeightSource
from .convolution import convolve, input_gradient


def is_linear(module: nn.Module) -> bool:
    """Return whether ``module`` multiplies by a matrix. Quantised layers are not ``nn.Linear``: judge by shape."""
    has_sides = hasattr(module, "in_features") and hasattr(module, "out_features")
    # A bank of experts holds several matrices and does not multiply by itself.
    return has_sides and hasattr(module, "weight") and not hasattr(module, "num_experts")


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


def _linear(x: Tensor, module: nn.Module, source: BlockMemory, is_last: bool = True) -> Tensor:
    with source.fetch(module, x, is_last) as (weight, bias, _):
        out = F.linear(x, weight, bias)
    # Not a view, as the product is for 3-D input: the Flux family adds to it in place.
    return out.data


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, source: BlockMemory) -> Tensor:
        ctx.module, ctx.source = module, source
        return _linear(x, module, source, is_last=not ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        with ctx.source.fetch(ctx.module, grad, is_last=True) as (weight, _, _):
            return grad @ weight, None, None


def _conv(x: Tensor, module: nn.Module, source: BlockMemory, is_last: bool = True) -> Tensor:
    def compute() -> Tensor:
        with source.fetch(module, x, is_last) as (weight, bias, _):
            return convolve(x, weight, bias, module)

    return source.convolved(compute)


class _FrozenConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, source: BlockMemory) -> Tensor:
        ctx.module, ctx.source, ctx.shape = module, source, x.shape
        return _conv(x, module, source, is_last=not ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        with ctx.source.fetch(ctx.module, grad, is_last=True) as (weight, _, _):
            return input_gradient(grad, ctx.shape, weight, ctx.module), None, None


def frozen_forward(module: nn.Module, source: BlockMemory) -> Callable[[Tensor], Tensor]:
    """Return a forward for ``module`` that computes what its own does and keeps no weight."""
    compute, function = (_linear, _FrozenLinear) if is_linear(module) else (_conv, _FrozenConv)

    def forward(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return compute(x, module, source)
        out: Tensor = function.apply(x, module, source)
        return out

    return forward


class BlockMemory:
    """A source of weights that knows when a block runs for the second time.

    A recomputed block is followed at once by its backward pass, so inside ``replaying`` what was fetched is held and
    read once for both. And the outputs of convolutions are kept from the first run: they are small for the work they
    take, and with them no convolution runs twice. Blocks may hold blocks; the outermost one holds the weights.

    Attributes:
        source: where weights come from.
        is_watched: tell when the source is at work.
        is_fetching: while watched: the source is handing out or taking back, and may write into memory of its own.
    """

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.is_watched = self.is_fetching = False
        self._held: dict[_Key, _Held] | None = None
        self._recorded: list[tuple[Tensor, int]] | None = None
        self._replayed: list[Tensor | None] = []

    @contextmanager
    def recording(self, outputs: list[Tensor | None]) -> Iterator[None]:
        """Put every convolution's output into ``outputs``, the last one first, when the context ends.

        None stands for one that was written over in the meantime.
        """
        recorded: list[tuple[Tensor, int]] = []
        before, self._recorded = self._recorded, recorded
        try:
            yield
        finally:
            self._recorded = before
            outputs += [out if out._version == version else None for out, version in reversed(recorded)]

    @contextmanager
    def replaying(self, outputs: list[Tensor | None]) -> Iterator[None]:
        """Hold weights, and answer convolutions with ``outputs``, as recorded, until the context ends.

        ``outputs`` is empty afterwards.
        """
        held_before, replayed_before, self._replayed = self._held, self._replayed, outputs
        with ExitStack() as undo:
            if held_before is None:
                self._held = {}
                undo.callback(self._release, self._held)
            try:
                yield
            finally:
                outputs.clear()
                self._held, self._replayed = held_before, replayed_before

    def fetch(self, module: nn.Module, like: Tensor, is_last: bool = False) -> AbstractContextManager[Weights]:
        """Return the context of one use of ``module``'s weights, held ones or new ones.

        Args:
            is_last: no backward pass will ask for them: this is it, or there is none.
        """
        if self._held is not None:
            return _HeldUse(self, self._held, module, like, is_last)
        return self._fetched(module, like)

    def _fetched(self, module: nn.Module, like: Tensor) -> AbstractContextManager[Weights]:
        context = self.source.fetch(module, like)
        return _WatchedUse(self, context) if self.is_watched else context

    @staticmethod
    def _release(held: dict[_Key, _Held]) -> None:
        with ExitStack() as undo:
            for use in held.values():
                undo.push(use.context.__exit__)
            held.clear()

    def convolved(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return a convolution's output: the recorded one, or that of ``compute``."""
        out = self._replayed.pop() if self._replayed else None
        if out is None:
            out = compute()
        if self._recorded is not None:
            self._recorded.append((out, out._version))
        return out


_Key = tuple[nn.Module, torch.dtype]


class _Held:
    """Weights that a block's backward pass will ask for, and the context they are valid in."""

    __slots__ = ("context", "num_uses", "weights")

    def __init__(self, weights: Weights, context: AbstractContextManager[Weights]) -> None:
        self.weights, self.context, self.num_uses = weights, context, 1


class _HeldUse:
    """One use of a layer's weights while a block runs again and backward.

    The source gets them back with the last backward use. Written out, because it runs at every layer.
    """

    __slots__ = ("_context", "_held", "_is_last", "_key", "_like", "_memory")

    def __init__(
        self, memory: BlockMemory, held: dict[_Key, _Held], module: nn.Module, like: Tensor, is_last: bool
    ) -> None:
        self._memory, self._held, self._like, self._is_last = memory, held, like, is_last
        self._key = module, like.dtype
        self._context: AbstractContextManager[Weights] | None = None

    def __enter__(self) -> Weights:
        held = self._held.get(self._key)
        if held is None:
            # A source's context may hold on to what it was given, and a held one lasts.
            like = self._like if self._is_last else self._like.new_empty(0)
            context = self._memory._fetched(self._key[0], like)
            weights = context.__enter__()
            if self._is_last or not weights.stable:
                self._context = context
            else:
                self._held[self._key] = _Held(weights, context)
            return weights
        held.num_uses += -1 if self._is_last else 1
        if held.num_uses <= 0:
            del self._held[self._key]
            self._context = held.context
        return held.weights

    def __exit__(self, *error: Any) -> None:
        if self._context is not None:
            self._context.__exit__(*error)


class _WatchedUse:
    """One use of a layer's weights that tells when the source is at work."""

    def __init__(self, memory: BlockMemory, context: AbstractContextManager[Weights]) -> None:
        self._memory, self._context = memory, context

    def __enter__(self) -> Weights:
        self._memory.is_fetching = True
        try:
            return self._context.__enter__()
        finally:
            self._memory.is_fetching = False

    def __exit__(self, *error: Any) -> None:
        self._memory.is_fetching = True
        try:
            self._context.__exit__(*error)
        finally:
            self._memory.is_fetching = False


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


# What a host that casts weights for each use does to them then, by the names it keeps that under.
_PATCHES = ("weight_function", "bias_function")
# The same for hosts that bring weights to the device when a layer asks.
_LATE_PATCHES = ("weight_lowvram_function", "bias_lowvram_function")


@contextmanager
def usable_parameters(
    network: nn.Module, dtype: torch.dtype, device: torch.device, weights: WeightSource | None = None
) -> Iterator[None]:
    """Stand in a normal tensor for every small parameter (norms, embeddings, free ones) for as long as this lasts.

    The host's parameters are inference tensors, which autograd refuses to save. Layers that cast their own weights
    get them in ``dtype``; free parameters keep theirs, since the network's code decides about them. The host's
    parameter objects come back on every way out.

    Args:
        weights: how the host makes the weights of layers that cast their own; what it does to them is then done once,
            not at each use. None leaves it to them.
    """
    with ExitStack() as undo:
        for module in network.modules():
            if is_matrix(module) or isinstance(module, nn.Embedding):
                continue
            casts_itself = hasattr(module, "weight_function")
            made: dict[str, Tensor] = {}
            if weights is not None and casts_itself and module._parameters.get("weight") is not None:
                made = _made(module, weights, torch.empty(0, dtype=dtype, device=device))
                _hide_patches(module, undo)
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                undo.callback(module._parameters.__setitem__, name, parameter)
                if name not in made:
                    wanted = dtype if casts_itself and parameter.is_floating_point() else parameter.dtype
                    made[name] = _bare(parameter).to(device, wanted, copy=True)
                module._parameters[name] = nn.Parameter(made[name], requires_grad=False)
        yield


def _made(module: nn.Module, weights: WeightSource, like: Tensor) -> dict[str, Tensor]:
    """Return copies of what a source makes of a layer's parameters."""
    with weights.fetch(module, like) as made:
        named = zip(("weight", "bias"), made[:2], strict=True)
        return {name: tensor.detach().clone() for name, tensor in named if tensor is not None}


def _hide_patches(module: nn.Module, undo: ExitStack) -> None:
    for name in (*_PATCHES, *_LATE_PATCHES):
        before = module.__dict__.get(name)
        if before:
            undo.callback(module.__dict__.__setitem__, name, before)
            module.__dict__[name] = [] if name in _PATCHES else None


def _bare(parameter: Tensor) -> Tensor:
    """Return a parameter's data, without what a class of its own adds to it."""
    if type(parameter) in (Tensor, nn.Parameter) or hasattr(parameter, "__tensor_flatten__"):
        return parameter.detach()
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.as_subclass(Tensor).detach()
