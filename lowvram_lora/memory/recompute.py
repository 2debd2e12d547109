"""Block recompute: keep a block's inputs, run it again in the backward pass.

The library checkpoint gives wrong gradients, without an error, on networks whose blocks write in place into tensors
that autograd has saved (the Flux family). This one is reentrant: the block runs first without gradients, then again
on detached inputs. A block seen writing in place runs on copies of its inputs, and its second run under
``torch.autograd.graph.allow_mutation_on_saved_tensors``, which keeps what was saved as it was.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedModelError
from .frozen import BlockMemory, is_matrix
from .random_state import RandomState

# Methods that end like in-place ones and write nothing.
_HARMLESS = ("requires_grad_", "detach_")


class _InPlaceWatch(TorchFunctionMode):
    """Notices a call that writes into a tensor: ``x += y``, ``x.mul_(y)``, ``x[0] = y``."""

    def __init__(self, memory: BlockMemory) -> None:
        super().__init__()
        self.seen = False
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        is_method = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
        kwargs = kwargs or {}
        is_asked_to = kwargs.get("inplace") is True
        if (is_method or is_asked_to or name == "__setitem__") and not self._memory.is_fetching:
            self.seen = True
        return func(*args, **kwargs)


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


@dataclasses.dataclass(kw_only=True)
class RecomputedBlock:
    """The forward that stands in for a block's own while a run lasts.

    Attributes:
        name: the block's path, for errors.
        forward: the block's own forward.
        memory: the source its frozen layers fetch from.
        anchor: a tensor that requires a gradient, so that a block whose inputs need none is still run backward.
        trains: whether the block holds adapters; one that holds none and gets no gradient has no backward at all.
        wanted: whether the user wants recompute. Without it only blocks that write in place are recomputed: autograd
            can't differentiate them otherwise.
        writes_in_place: found out in the block's first call, which therefore runs as if it did.
    """

    name: str
    forward: Callable[..., Any]
    memory: BlockMemory
    anchor: Tensor
    trains: bool
    wanted: bool
    writes_in_place: bool | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the block's own forward returns."""
        is_plain = not self.wanted and self.writes_in_place is False
        if is_plain or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        leaves: list[Tensor] = []
        template = _flatten((args, kwargs), leaves)
        if not (leaves or self.trains):
            with torch.no_grad():
                return self.forward(*args, **kwargs)
        call = _Call(self, template, RandomState.now(self.anchor.device))
        flat = _Recompute.apply(call, self.anchor, *leaves)
        return _rebuild(call.out_template, list(flat))

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the block on inputs that it may write over, and learn whether it does.

        Raises:
            UnsupportedModelError: it did not in its first call and does now.
        """
        assumed = self.writes_in_place is not False
        if assumed:
            args, kwargs = _copied(args), _copied(kwargs)
        with _InPlaceWatch(self.memory) as watch:
            result = self.forward(*args, **kwargs)
        if watch.seen and not assumed:
            raise UnsupportedModelError(
                f"The block {self.name} writes over its inputs in some steps and not in others.",
                "It can't be trained through; take it to the pack's issue page.",
            )
        self.writes_in_place = watch.seen
        return result


@dataclasses.dataclass
class _Call:
    """One call of a block: what is needed to run it again."""

    block: RecomputedBlock
    template: Any
    random_state: RandomState
    out_template: Any = None
    convolved: list[Tensor] = dataclasses.field(default_factory=list)

    def run(self, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        args, kwargs = _rebuild(self.template, leaves)
        flat: list[Tensor] = []
        self.out_template = _flatten(self.block.run(args, kwargs), flat, every_tensor=True)
        return tuple(flat)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        with call.block.memory.recording(call.convolved):
            out = call.run(list(leaves))
        if call.block.writes_in_place:
            call.convolved.clear()
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*leaves)
        # An input handed through as it is would otherwise be an output and an input of this function at once.
        inputs = {id(leaf) for leaf in leaves}
        return tuple(tensor.view_as(tensor) if id(tensor) in inputs else tensor for tensor in out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        leaves = [leaf.detach().requires_grad_() for leaf in ctx.saved_tensors]
        call: _Call = ctx.call
        in_place = call.block.writes_in_place
        protected = torch.autograd.graph.allow_mutation_on_saved_tensors() if in_place else nullcontext()
        with call.block.memory.replaying(call.convolved), protected, call.random_state.restored():
            with torch.enable_grad():
                out = call.run(list(leaves))
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


def _copied(value: Any) -> Any:
    """Return ``value`` with every tensor in it cloned; gradients flow through."""
    return value.clone() if isinstance(value, Tensor) else _map(value, _copied)


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
    network: nn.Module, memory: BlockMemory, device: torch.device, trained: Collection[str], wanted: bool = True
) -> Iterator[tuple[nn.Module, RecomputedBlock]]:
    """Yield every block of ``network`` with its stand-in.

    Args:
        trained: paths of the adapted layers.
        wanted: as in ``RecomputedBlock``.
    """
    shared: dict[str, Any] = {
        "memory": memory,
        "anchor": torch.zeros((), device=device, requires_grad=True),
        "wanted": wanted,
    }
    for path, block in find_blocks(network).items():
        trains = any(layer.startswith(f"{path}.") for layer in trained)
        yield block, RecomputedBlock(name=path, forward=block.forward, trains=trains, **shared)
