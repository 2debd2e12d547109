"""Block recompute: keep a block's inputs, run it again in the backward pass.

The library checkpoint gives wrong gradients, without an error, on networks whose blocks add to their inputs in place
(the Flux family). This one is reentrant: the block runs first without gradients, then again on detached inputs; and
while it runs, in-place operators answer with a new tensor, so that neither a kept input nor a saved activation is
ever written over.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedModelError
from .frozen import HeldWeights, is_matrix

_OUT_OF_PLACE: dict[str, Callable[..., Tensor]] = {
    "__iadd__": torch.add,
    "__isub__": torch.sub,
    "__imul__": torch.mul,
    "__itruediv__": torch.div,
}


class _NewTensors(TorchFunctionMode):
    """Answer ``x += y`` and its kin with a new tensor; the caller rebinds its name and sees no difference."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _OUT_OF_PLACE.get(getattr(func, "__name__", ""))
        if replacement is None:
            return func(*args, **(kwargs or {}))
        # In place, the left side's dtype wins; out of place, the two are promoted.
        return replacement(*args).to(args[0].dtype)


def find_blocks(network: nn.Module) -> dict[str, nn.Module]:
    """Return the network's repeated blocks by path: what recompute works on.

    A block is an element of a module list or sequence that holds two matrices or more and no blocks of its own. Pure
    containers are looked into, because hosts call their elements directly.
    """
    found: dict[str, nn.Module] = {}
    _collect_blocks(network, "", found)
    return found


def _collect_blocks(module: nn.Module, prefix: str, found: dict[str, nn.Module]) -> None:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        before = len(found)
        _collect_blocks(child, path, found)
        is_container = isinstance(child, nn.ModuleList | nn.Sequential)
        if is_list and not is_container and len(found) == before and _num_matrices(child) >= 2:
            found[path] = child


def _num_matrices(module: nn.Module) -> int:
    return sum(is_matrix(part) for part in module.modules())


def recomputed_forward(
    name: str, forward: Callable[..., Any], held: HeldWeights, anchor: Tensor, trains: bool
) -> Callable[..., Any]:
    """Return a forward that computes what ``forward`` does and keeps only its inputs for the backward pass.

    Args:
        name: the block's path, for errors.
        forward: the block's own forward.
        held: the source its frozen layers fetch from.
        anchor: a tensor that requires a gradient, so that a block whose inputs need none is still run backward.
        trains: whether the block holds adapters; one that holds none and gets no gradient has no backward at all.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        leaves: list[Tensor] = []
        template = _flatten((args, kwargs), leaves)
        if not (leaves or trains):
            with torch.no_grad():
                return forward(*args, **kwargs)
        block = _Block(name, forward, held, template)
        flat = _Recompute.apply(block, anchor, *leaves)
        return _rebuild(block.out_template, list(flat))

    return run


@dataclasses.dataclass
class _Block:
    """One call of a block: what is needed to run it again."""

    name: str
    forward: Callable[..., Any]
    held: HeldWeights
    template: Any
    out_template: Any = None

    def __call__(self, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        args, kwargs = _rebuild(self.template, leaves)
        with _NewTensors():
            result = self.forward(*args, **kwargs)
        flat: list[Tensor] = []
        self.out_template = _flatten(result, flat, every_tensor=True)
        return tuple(flat)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: _Block, anchor: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        versions = [leaf._version for leaf in leaves]
        out = block(list(leaves))
        if versions != [leaf._version for leaf in leaves]:
            raise UnsupportedModelError(
                f"The block {block.name} writes over its own inputs, so it can't be recomputed.",
                "Turn 'recompute' off on LoRA Train (low-VRAM).",
            )
        ctx.block = block
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*leaves)
        # An input handed through as it is would otherwise be an output and an input of this function at once.
        inputs = {id(leaf) for leaf in leaves}
        return tuple(tensor.view_as(tensor) if id(tensor) in inputs else tensor for tensor in out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in ctx.saved_tensors]
        with ctx.block.held.hold():
            with torch.enable_grad():
                out = ctx.block(list(leaves))
            pairs = [(o, g) for o, g in zip(out, grads, strict=True) if o.requires_grad and g is not None]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return None, None, *(leaf.grad for leaf in leaves)


class _Leaf:
    """The place of a tensor in a flattened structure."""

    def __init__(self, index: int) -> None:
        self.index = index


def _flatten(value: Any, leaves: list[Tensor], every_tensor: bool = False) -> Any:
    """Return ``value`` with its tensors that need a gradient replaced by places in ``leaves``.

    Containers are copied, so that what the host writes into a dict later does not change a recompute. The same
    tensor gets one place however often it occurs.
    """
    if isinstance(value, Tensor):
        if not (every_tensor or value.requires_grad):
            return value
        for index, leaf in enumerate(leaves):
            if leaf is value:
                return _Leaf(index)
        leaves.append(value)
        return _Leaf(len(leaves) - 1)
    return _map(value, lambda item: _flatten(item, leaves, every_tensor))


def _rebuild(value: Any, leaves: list[Tensor]) -> Any:
    """Undo ``_flatten`` with ``leaves`` in the tensors' places."""
    if isinstance(value, _Leaf):
        return leaves[value.index]
    return _map(value, lambda item: _rebuild(item, leaves))


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(function(item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(function(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: function(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value


def recomputed(
    network: nn.Module, held: HeldWeights, device: torch.device, trained: Collection[str]
) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Yield every block of ``network`` with its recomputing forward.

    Args:
        trained: paths of the adapted layers.
    """
    anchor = torch.zeros((), device=device, requires_grad=True)
    for path, block in find_blocks(network).items():
        trains = any(layer.startswith(f"{path}.") for layer in trained)
        yield block, recomputed_forward(path, block.forward, held, anchor, trains)
