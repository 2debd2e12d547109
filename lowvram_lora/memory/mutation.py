"""Writes in place over what autograd has saved, made harmless: whoever saved it gets a copy first.

torch's own ``allow_mutation_on_saved_tensors`` tells tensors apart by the address of their data, and all addresses are
0 on the ``meta`` device. Here a storage is known by its identity. The guard is up while a graph is recorded; a backward
pass needs it no more, because every saved tensor is held by what was packed for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .layout import flattened, is_dense, placed


class _Saved:
    """What autograd keeps in a tensor's place."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        # An output that is saved would otherwise hold its own node, and so itself.
        self.tensor = tensor.detach()


class MutationGuard:
    """Keeps saved tensors as they were; one object serves every block of a run.

    Attributes:
        num_needed: how often something saved was about to be written over.
    """

    def __init__(self) -> None:
        self.num_needed = 0
        # By operation: position and name of each argument that it writes into.
        self._written: dict[Any, tuple[tuple[int, str], ...]] = {}
        self._saved: dict[int, list[weakref.ref[_Saved]]] | None = None
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def guarding(self, copies: Sequence[tuple[Tensor, Tensor]] = ()) -> Iterator[None]:
        """Let operations write over what autograd saves until the context ends.

        Args:
            copies: clones and what they were made of. What is saved of a clone needs no copy of its own when the clone
                is written over: it is still there in the original, which nobody writes to.
        """
        is_outer = self._saved is None
        if self._saved is None:
            self._saved = {}
        # The clones are held so that no other storage takes their place in memory.
        for clone, original in copies:
            if _same(clone, original):
                self._copies[_key(clone)] = clone, original.detach()
        try:
            if is_outer:
                with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack), _WriteMode(self):
                    yield
            else:
                yield
        finally:
            if is_outer:
                self._saved = None
                self._copies.clear()

    def written(self, func: Any) -> tuple[tuple[int, str], ...]:
        """Return position and name of the arguments that ``func`` writes into."""
        found = self._written.get(func)
        if found is None:
            arguments = enumerate(func._schema.arguments)
            found = tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
            self._written[func] = found
        return found

    def before_write(self, value: Any) -> None:
        """Give what was saved of ``value``, a tensor or a list of tensors, numbers of its own."""
        if isinstance(value, list | tuple):
            for item in value:
                self.before_write(item)
        if not isinstance(value, Tensor) or self._saved is None:
            return
        key = _key(value)
        clone_of = self._copies.pop(key, None)
        references = self._saved.pop(key, None)
        if not references:
            return
        saved = [handle for handle in (reference() for reference in references) if handle is not None]
        self.num_needed += bool(saved)
        if clone_of is None:
            _part(saved)
            return
        _, original = clone_of
        begin = int(original.storage_offset())
        for handle in saved:
            handle.tensor = placed(original, handle.tensor, begin + int(handle.tensor.storage_offset()))
        self._saved.setdefault(_key(original), []).extend(references)

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        if self._saved is not None:
            self._saved.setdefault(_key(tensor), []).append(weakref.ref(saved))
        return saved


class _WriteMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, guard: MutationGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guard = guard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for index, name in self._guard.written(func):
            self._guard.before_write(args[index] if index < len(args) else kwargs.get(name))
        return func(*args, **kwargs)


def _unpack(saved: _Saved) -> Tensor:
    return saved.tensor


def _key(tensor: Tensor) -> int:
    """Return what tells the tensor's storage from any other that is alive."""
    return int(tensor.untyped_storage()._cdata)


def _same(clone: Tensor, original: Tensor) -> bool:
    """Return whether a view of the clone's storage can be had of the original's."""
    return int(clone.storage_offset()) == 0 and clone.stride() == original.stride() and is_dense(original)


def _part(saved: list[_Saved]) -> None:
    """Take tensors of one storage away from it. Views of the same numbers share one copy."""
    copies: dict[Any, Tensor] = {}
    for handle in saved:
        tensor = handle.tensor
        if not is_dense(tensor):
            handle.tensor = tensor.clone()
            continue
        stretch = tensor.dtype, tensor.storage_offset(), tensor.numel()
        if stretch not in copies:
            copies[stretch] = flattened(tensor).clone()
        handle.tensor = placed(copies[stretch], tensor, 0)
