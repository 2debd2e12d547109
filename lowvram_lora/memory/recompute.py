"""Block recompute: keep a block's inputs, run it again in the backward pass.

The library checkpoint gives wrong gradients, without an error, on networks whose blocks write in place into tensors
that autograd has saved (the Flux family). This one is reentrant: the block runs first without gradients, then again
on detached inputs. A block that writes in place runs on copies of the inputs it writes over, and its second run under
a guard that keeps what was saved as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from ..ports import Transfers
from .frozen import BlockMemory, is_matrix
from .layout import flattened, is_dense
from .mutation import MutationGuard
from .nested import Places, rebuilt
from .random_state import RandomState
from .watch import InPlaceWatch

# A smaller input takes longer to send to RAM than its room is worth.
WORTH_MOVING_BYTES = 2**20


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recompute:
    """How blocks are recomputed.

    Attributes:
        kept: paths of the blocks that keep their activations.
        transfers: by which the inputs of recomputed blocks wait in RAM; None leaves them on the device.
        worth_moving_bytes: smaller inputs stay on the device all the same.
        keep_convolutions: answer frozen convolutions from the first run instead of running them twice.
        writes_in_place: by path of the block, where it is known; the others find out in their first call.
        observe: entered around each run of a block, with its path and ``forward``, ``recompute`` or ``backward``.
    """

    kept: Collection[str] = ()
    transfers: Transfers | None = None
    worth_moving_bytes: int = WORTH_MOVING_BYTES
    keep_convolutions: bool = True
    writes_in_place: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    observe: Callable[[str, str], AbstractContextManager[None]] | None = None

    def observed(self, path: str, phase: str) -> AbstractContextManager[None]:
        """Return the context to enter around a block's run."""
        return nullcontext() if self.observe is None else self.observe(path, phase)


@dataclasses.dataclass(frozen=True)
class _Shared:
    """What the blocks of a run share.

    ``anchor`` requires a gradient, so that a block whose inputs need none is still run backward.
    """

    how: Recompute
    memory: BlockMemory
    anchor: Tensor
    guard: MutationGuard


@dataclasses.dataclass(kw_only=True)
class RecomputedBlock:
    """The forward that stands in for a block's own while a run lasts.

    Attributes:
        name: the block's path.
        forward: the block's own forward.
        trains: whether the block holds adapters; one that holds none and gets no gradient has no backward at all.
        kept: keep activations instead of running again. A block that writes in place is run again all the same:
            autograd can't differentiate it otherwise.
        writes_in_place: over what it was given or what autograd saves. None until its first call, which runs as if it
            did, and finds out whether it writes in place at all; its first backward pass finds out whether it matters.
        written: the arguments, by position or name, that hold what it writes over; None until its first call.
    """

    name: str
    forward: Callable[..., Any]
    shared: _Shared
    trains: bool
    kept: bool
    writes_in_place: bool | None = None
    written: frozenset[int | str] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the block's own forward returns."""
        is_kept = self.kept and self.writes_in_place is False
        if is_kept or not torch.is_grad_enabled():
            if is_kept:
                args, kwargs = _gathering((args, kwargs))
            with self.shared.how.observed(self.name, "forward"):
                return self.forward(*args, **kwargs)
        call = _Call(self, args, kwargs)
        leaves = call.take_leaves()
        if not (leaves or self.trains):
            with torch.no_grad(), self.shared.how.observed(self.name, "forward"):
                return self.forward(*args, **kwargs)
        token = _Run.apply(call, self.shared.anchor, *leaves)
        return call.result(_Emit.apply(call, token))

    def watched(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return what ``run``, the block's first run, returns; learn whether it writes in place, if that is unknown."""
        if self.writes_in_place is not None:
            return run()
        with InPlaceWatch(self.shared.memory) as watch:
            results = run()
        self.writes_in_place = watch.seen
        return results

    @contextmanager
    def guarded(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Let the block write in place over what it was given and what autograd saves, until the context ends.

        A block that writes over neither can do without from then on.
        """
        if not self.writes_in_place:
            yield
            return
        guard = self.shared.guard
        before = guard.num_needed
        with guard.guarding(copies):
            yield
        self.writes_in_place = guard.num_needed > before or bool(self.written)


def _gathering(arguments: Any) -> Any:
    """Return ``arguments`` with a view of each tensor in them that needs a gradient.

    So what a block gives back to an input is summed before it meets what others give: in the same order, and so to the
    same bit, as when the block runs again.
    """
    places = Places()
    template, _ = places.taken(arguments)
    return rebuilt(template, [t.view_as(t) if t.requires_grad else t for t in places.tensors])


class _Call:
    """One call of a block: all that is needed to run it again, but for what autograd saves.

    Attributes:
        waiting: what was sent to RAM, in the order of the leaves; None for those that were not.
        grads: of the results, between the two nodes that stand for the block in the graph.
    """

    def __init__(self, block: RecomputedBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.block = block
        self.waiting: list[_InRam | None] = []
        self.grads: tuple[Tensor | None, ...] = ()
        self.results: tuple[Tensor, ...] = ()
        self.convolved: list[Tensor | None] = []
        self._random_state = RandomState.now(block.shared.anchor.device)
        places = Places()
        self._num_args = len(args)
        self._arguments: dict[int | str, Any] = {}
        self._indices: dict[int | str, list[int]] = {}
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        for key, value in given.items():
            self._arguments[key], self._indices[key] = places.taken(value)
        self._tensors: list[Tensor | None] = list(places.tensors)
        self._result: Any = None

    def take_leaves(self) -> list[Tensor]:
        """Return the inputs that need a gradient; this object does not keep them."""
        leaves = [tensor for tensor in self._tensors if tensor is not None and tensor.requires_grad]
        self._tensors = [None if tensor is None or tensor.requires_grad else tensor for tensor in self._tensors]
        return leaves

    def result(self, tensors: Iterable[Tensor]) -> Any:
        """Return what the block returned, with ``tensors`` in it."""
        return rebuilt(self._result, list(tensors))

    def first(self, leaves: Sequence[Tensor]) -> None:
        """Run the block without gradients."""
        block, shared = self.block, self.block.shared
        given = self._inputs(leaves)
        with shared.how.observed(block.name, "forward"):
            self.waiting = [self._sent_to_ram(leaf) for leaf in leaves]
            inputs, copied = self._with_copies(given)
            versions = [_version(tensor) for tensor in inputs]
            with shared.memory.recording(self.convolved) if shared.how.keep_convolutions else nullcontext():
                results = block.watched(lambda: self._forward(inputs))
            self._learn(inputs, versions, copied)
            # An input handed through is not to become a result of a node itself.
            known = {id(tensor) for tensor in given}
            self.results = tuple(tensor.detach() if id(tensor) in known else tensor for tensor in results)

    def again(self, leaves: list[Tensor]) -> None:
        """Run the block again and backward: gradients arrive at ``leaves`` and at the adapters."""
        block, shared = self.block, self.block.shared
        with shared.memory.replaying(self.convolved):
            with shared.how.observed(block.name, "recompute"), self._random_state.restored(), torch.enable_grad():
                end = self._second(leaves)
            if end is not None:
                with shared.how.observed(block.name, "backward"):
                    torch.autograd.backward(end)

    def _second(self, leaves: list[Tensor]) -> Tensor | None:
        grads, self.grads = self.grads, ()
        given = self._inputs(leaves)
        # It will not run a third time.
        self._tensors.clear()
        inputs, copied = self._with_copies(given)
        with self.block.guarded([(inputs[index], given[index]) for index in copied]):
            results = self._forward(inputs)
        pairs = [(o, g) for o, g in zip(results, grads, strict=True) if o.requires_grad and g is not None]
        return _End.apply([g for _, g in pairs], *(o for o, _ in pairs)) if pairs else None

    def _forward(self, inputs: list[Tensor]) -> list[Tensor]:
        arguments = {key: rebuilt(value, inputs) for key, value in self._arguments.items()}
        args = [arguments.pop(index) for index in range(self._num_args)]
        kwargs = {str(key): value for key, value in arguments.items()}
        places = Places()
        self._result, _ = places.taken(self.block.forward(*args, **kwargs))
        return places.tensors

    def _inputs(self, leaves: Iterable[Tensor]) -> list[Tensor]:
        rest = iter(leaves)
        return [next(rest) if tensor is None else tensor for tensor in self._tensors]

    def _with_copies(self, given: list[Tensor]) -> tuple[list[Tensor], set[int]]:
        """Return inputs that the block may write over, and the indices of those that are copies."""
        if self.block.writes_in_place is False:
            return given, set()
        written = self._indices if self.block.written is None else self.block.written
        copied = {index for key in written for index in self._indices.get(key, ())}
        return [tensor.clone() if index in copied else tensor for index, tensor in enumerate(given)], copied

    def _learn(self, inputs: list[Tensor], versions: list[int], copied: set[int]) -> None:
        """Find which arguments were written over.

        Raises:
            UnsupportedModelError: one of which no copy was made.
        """
        changed = {i for i, version in enumerate(versions) if _version(inputs[i]) != version}
        if changed - copied:
            raise UnsupportedModelError(
                f"The block {self.block.name} writes over its inputs in some steps and not in others.",
                "It can't be trained through; take it to the pack's issue page.",
            )
        if self.block.written is None:
            self.block.written = frozenset(k for k, indices in self._indices.items() if changed.intersection(indices))
            self.block.writes_in_place = self.block.writes_in_place or bool(changed)

    def _sent_to_ram(self, leaf: Tensor) -> _InRam | None:
        how = self.block.shared.how
        if how.transfers is None or leaf.nbytes < how.worth_moving_bytes or not is_dense(leaf):
            return None
        return _InRam(how.transfers, leaf.detach())


class _InRam:
    """A dense input that waits in RAM."""

    def __init__(self, transfers: Transfers, tensor: Tensor) -> None:
        self._transfers = transfers
        self._kept = transfers.to_ram(flattened(tensor))
        self._shape, self._stride = tensor.shape, tensor.stride()

    def back(self) -> Tensor:
        return self._transfers.from_ram(self._kept).as_strided(self._shape, self._stride)


class _Run(torch.autograd.Function):
    """Runs the block; in the backward pass, again and backward.

    Its result stands for the block's, which another node hands out. So the gradients of the results are not inputs of
    this node's backward pass, which would hold them to its end.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *leaves: Tensor) -> Tensor:
        call.first(leaves)
        ctx.call = call
        ctx.save_for_backward(*(t for t, in_ram in zip(leaves, call.waiting, strict=True) if in_ram is None))
        return anchor.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: _Call = ctx.call
        saved, waiting = iter(ctx.saved_tensors), call.waiting
        call.waiting = []
        leaves = [(next(saved) if in_ram is None else in_ram.back()).detach().requires_grad_() for in_ram in waiting]
        del waiting
        call.again(leaves)
        return None, None, *(leaf.grad for leaf in leaves)


class _Emit(torch.autograd.Function):
    """Hands out a block's results, and takes in their gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, token: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        results, call.results = call.results, ()
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.call.grads = grads
        return None, ctx.call.block.shared.anchor.new_empty(())


class _End(torch.autograd.Function):
    """Where a block's backward pass begins: needs the results no more, and lets each gradient go once it is used."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *results: Tensor) -> Tensor:
        ctx.grads = grads
        return results[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        grads, ctx.grads = ctx.grads, None
        return None, *grads


def _version(tensor: Tensor) -> int:
    """Return a count of the writes into ``tensor``; inference tensors can't be written to."""
    return 0 if tensor.is_inference() else tensor._version


def recomputed(
    network: nn.Module,
    memory: BlockMemory,
    device: torch.device,
    trained: Collection[str],
    how: Recompute | None = None,
) -> Iterator[tuple[nn.Module, RecomputedBlock]]:
    """Yield every block of ``network`` with its stand-in.

    Args:
        trained: paths of the adapted layers.
    """
    how = how or Recompute()
    shared = _Shared(how, memory, torch.zeros((), device=device, requires_grad=True), MutationGuard())
    for path, block in find_blocks(network).items():
        yield (
            block,
            RecomputedBlock(
                name=path,
                forward=block.forward,
                shared=shared,
                trains=any(layer.startswith(f"{path}.") for layer in trained),
                kept=path in how.kept,
                writes_in_place=how.writes_in_place.get(path),
            ),
        )


def learned(blocks: Iterable[RecomputedBlock]) -> dict[str, bool]:
    """Return by path which blocks write in place, of those that have run."""
    return {block.name: block.writes_in_place for block in blocks if block.writes_in_place is not None}
