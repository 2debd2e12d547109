"""Weight streaming: the base's weights stay in RAM, and pass through a ring of device memory as they are needed.

What a setting keeps resident is copied to the device once. All other layers share one buffer. ``ring.py`` decides where
in it each goes and what is copied ahead; here the copies are made, ordered with the computation, and handed out.

A weight is handed out for one use only (``stable`` is False), so nothing but the use at hand ever pins the ring, and no
block can fail to fit. That a recomputed block's weights are copied once for its second run and its backward pass comes
from the ring itself, which keeps what is needed again soonest: their stored form, so that a quantised weight takes no
more there than in RAM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..ports import StoredWeights, Transfers, Weights
from .facts import ALIGNMENT, aligned
from .frozen import matrices
from .layout import is_dense
from .ring import Conveyor, Segment
from .setting import Setting


@dataclass
class Counts:
    """What has been copied so far.

    Attributes:
        copies: of a layer's weights into the ring.
        num_bytes: by these copies.
        ring_bytes: the ring's memory that was ever used.
    """

    copies: int = 0
    num_bytes: int = 0
    ring_bytes: int = 0


class _Loaded:
    """A layer's payload in the ring.

    Attributes:
        copy: what brought it there.
        tensors: by place in the payload; None for one that was on the device already.
        is_whole: there is none of these.
    """

    __slots__ = ("copy", "is_whole", "tensors")

    def __init__(self, copy: Any, tensors: list[Tensor | None], is_whole: bool) -> None:
        self.copy, self.tensors, self.is_whole = copy, tensors, is_whole


class _Layer:
    """How a layer's payload lies in its place in the ring.

    Attributes:
        num_bytes: of the place.
        parts: by place in the payload: offset, type, shape and strides.
    """

    __slots__ = ("num_bytes", "parts")

    def __init__(self, payload: Sequence[Tensor]) -> None:
        self.num_bytes = 0
        self.parts: list[tuple[int, torch.dtype, torch.Size, tuple[int, ...]]] = []
        for tensor in payload:
            self.parts.append((self.num_bytes, tensor.dtype, tensor.shape, tensor.stride()))
            self.num_bytes += aligned(tensor.nbytes)


class Streamed:
    """A ``WeightSource`` that brings weights to the device itself; a context manager.

    A tensor that is on the device already is used where it is. Should the ring have no room, a layer is fetched the
    host's way; that takes one layer used within another's use, a resident one asked for in two dtypes, or one that was
    read in no simulated step and is larger than all that were.

    Args:
        network: whose matrices are fetched.
        setting: says what is resident and how large the ring is.
    """

    def __init__(self, weights: StoredWeights, transfers: Transfers, network: nn.Module, setting: Setting) -> None:
        self.counts = Counts()
        self._weights = weights
        self._transfers = transfers
        self._finished: dict[tuple[nn.Module, torch.dtype], _Ready] = {}
        streamed = (module for path, module in matrices(network) if path not in setting.resident)
        self._layers = {module: _Layer(weights.payload(module)) for module in streamed}
        self._resident = self._copied(module for path, module in matrices(network) if path in setting.resident)
        self._ring = transfers.empty(setting.ring_bytes) if setting.ring_bytes else None
        self._sized: tuple[nn.Module | None, tuple[Tensor, ...]] = (None, ())
        # The ring as numbers of each type that is in it.
        self._typed: dict[torch.dtype, Tensor] = {}
        self._conveyor = Conveyor(setting.ring_bytes, self._size, self._load)

    @property
    def resident_bytes(self) -> int:
        """Device bytes of the weights that stay."""
        return 0 if self._slab is None else self._slab.nbytes

    def begin(self) -> None:
        """Learn that a pass through the network, forward and backward, begins."""
        self._conveyor.begin()

    def fetch(self, module: nn.Module, like: Tensor) -> AbstractContextManager[Weights]:
        """Return the context of one use of ``module``'s weights on the device in ``like.dtype``.

        They are ``stable`` if they are resident.
        """
        return self._finished.get((module, like.dtype)) or _Use(self, module, like)

    def open(self, use: _Use) -> Weights:
        """Return the weights that ``use`` asks for, and note there what has to be given back."""
        module, like = use.module, use.like
        if module in self._resident:
            return self._from_resident(module, like)
        segment = self._conveyor.held(module)
        if segment is not None and segment.content.is_whole:
            # Where the host's tensors are on the device by now, these are the same numbers.
            self._conveyor.use(segment)
            return self._opened(use, segment, segment.content.tensors)
        payload = self._weights.payload(module)
        is_here = [self._transfers.holds(tensor) for tensor in payload]
        if all(is_here):
            self._conveyor.skip(module)
            weight, bias, _ = self._weights.finish(module, payload, like)
            return Weights(weight, bias, False)
        again = segment is not None and any(
            own is None and not here for own, here in zip(segment.content.tensors, is_here, strict=True)
        )
        segment = self._conveyor.take(module, again)
        if segment is None:
            use.context = self._weights.fetch(module, like)
            weight, bias, _ = use.context.__enter__()
            return Weights(weight, bias, False)
        tensors = zip(segment.content.tensors, payload, strict=True)
        return self._opened(use, segment, [own if own is not None else there for own, there in tensors])

    def _opened(self, use: _Use, segment: Segment, parts: Sequence[Tensor]) -> Weights:
        loaded: _Loaded = segment.content
        try:
            self._transfers.wait(loaded.copy)
        except BaseException:
            self._conveyor.give_up(segment)
            raise
        use.segment = segment
        try:
            weight, bias, _ = self._weights.finish(use.module, parts, use.like)
        except BaseException:
            self.close_use(use)
            raise
        return Weights(weight, bias, False)

    def close_use(self, use: _Use) -> None:
        """Take back what ``use`` was given."""
        segment, use.segment = use.segment, None
        if segment is not None:
            self._conveyor.give_back(segment, self._transfers.released(segment.content.copy))

    def load_ahead(self) -> None:
        """Start to copy what is needed next."""
        self._conveyor.load_ahead()

    def _from_resident(self, module: nn.Module, like: Tensor) -> Weights:
        """Return the weights of a resident ``module``, and keep them made up if they fit where they are stored."""
        payload = self._resident[module]
        weights = self._weights.finish(module, payload, like)
        settled = self._settled(weights, payload)
        if settled is None:
            # Nobody counts a second copy, so nobody may hold it.
            return weights._replace(stable=False)
        self._finished[module, like.dtype] = _Ready(settled)
        del self._resident[module]
        return settled

    def _settled(self, weights: Weights, payload: Sequence[Tensor]) -> Weights | None:
        """Return ``weights`` in the memory of ``payload``, or None if they do not fit there or it is not ours."""
        made = [tensor for tensor in (weights.weight, weights.bias) if tensor is not None]
        if len(made) != len(payload) or not all(map(is_dense, made)):
            return None
        placed = []
        for tensor, place in zip(made, payload, strict=True):
            if not _shares(tensor, place):
                if self._slab is None or not _shares(self._slab, place) or tensor.nbytes > place.nbytes:
                    return None
                start = place.storage_offset() * place.element_size()
                region = self._slab[start : start + tensor.nbytes].view(tensor.dtype)
                # As it is laid out, which kernels may like.
                made_there = region.as_strided(tensor.shape, tensor.stride())
                made_there.copy_(tensor)
                tensor = made_there
            placed.append(tensor)
        return Weights(placed[0], placed[1] if len(placed) > 1 else None, True)

    def _copied(self, modules: Iterator[nn.Module]) -> dict[nn.Module, tuple[Tensor, ...]]:
        """Return the payloads of ``modules`` on the device, but for those that are there already.

        All in one piece of memory: an allocator rounds each up, which adds up over a network's layers.
        """
        payloads = {module: self._weights.payload(module) for module in modules}
        self._layers.update((module, _Layer(payload)) for module, payload in payloads.items())
        missing = {m: [t for t in payload if not self._transfers.holds(t)] for m, payload in payloads.items()}
        num_bytes = sum(aligned(tensor.nbytes) for tensors in missing.values() for tensor in tensors)
        self._slab = self._transfers.empty(num_bytes) if num_bytes else None
        resident, copies, start = {}, [], 0
        for module, sources in missing.items():
            if not sources:
                continue
            targets = []
            for source in sources:
                assert self._slab is not None
                targets.append(_shaped(self._slab[start : start + source.nbytes], source))
                start += aligned(source.nbytes)
            copies.append(self._transfers.copy_in(targets, sources))
            own = iter(targets)
            resident[module] = tuple(t if self._transfers.holds(t) else next(own) for t in payloads[module])
        for copy in copies:
            self._transfers.wait(copy)
        return resident

    def _size(self, module: nn.Module) -> int:
        payload = self._weights.payload(module)
        for tensor in payload:
            if not self._transfers.holds(tensor):
                # What asks for a size loads next, if there is room.
                self._sized = module, payload
                return self._layers[module].num_bytes
        return 0

    def _load(self, segment: Segment) -> _Loaded:
        module: Any = segment.key
        tensors: list[Tensor | None] = []
        targets, sources = [], []
        num_bytes = 0
        (sized, payload), self._sized = self._sized, (None, ())
        payload = payload if sized is module else self._weights.payload(module)
        for source, part in zip(payload, self._layers[module].parts, strict=True):
            if self._transfers.holds(source):
                tensors.append(None)
                continue
            target = self._target(segment.start, *part)
            tensors.append(target)
            targets.append(target)
            sources.append(source)
            num_bytes += source.nbytes
        counts = self.counts
        counts.copies += 1
        counts.num_bytes += num_bytes
        counts.ring_bytes = max(counts.ring_bytes, segment.end)
        copy = self._transfers.copy_in(targets, sources, segment.fences)
        return _Loaded(copy, tensors, len(targets) == len(tensors))

    def _target(
        self, start: int, offset: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
    ) -> Tensor:
        """Return the part of the ring that a tensor of the payload goes to."""
        typed = self._typed.get(dtype)
        if typed is None:
            assert self._ring is not None
            whole = len(self._ring) // ALIGNMENT * ALIGNMENT
            typed = self._typed[dtype] = self._ring[:whole].view(dtype)
        return typed.as_strided(shape, stride, (start + offset) // dtype.itemsize)

    def close(self) -> None:
        """Let go of all device memory."""
        self._finished.clear()
        self._resident.clear()
        self._slab = None
        self._typed.clear()
        self._sized = (None, ())
        self._conveyor = Conveyor(0, self._size, self._load)
        self._ring = None

    def __enter__(self) -> Streamed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Ready:
    """A use of weights that stay. The same object serves all uses."""

    __slots__ = ("weights",)

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def __enter__(self) -> Weights:
        return self.weights

    def __exit__(self, *error: Any) -> None:
        pass


class _Use:
    """One use of a layer's weights. Written out, because it runs at every layer."""

    __slots__ = ("_stream", "context", "like", "module", "segment")

    def __init__(self, stream: Streamed, module: nn.Module, like: Tensor) -> None:
        self._stream, self.module, self.like = stream, module, like
        self.segment: Segment | None = None
        self.context: AbstractContextManager[Weights] | None = None

    def __enter__(self) -> Weights:
        return self._stream.open(self)

    def __exit__(self, *error: Any) -> None:
        if self.context is not None:
            self.context.__exit__(*error)
        elif self.segment is not None:
            self._stream.close_use(self)
            if error[0] is None:
                # Only now: where a copy blocks the caller, it does so while the device computes.
                self._stream.load_ahead()


def _shares(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are in the same storage."""
    return int(one.untyped_storage()._cdata) == int(other.untyped_storage()._cdata)


def _shaped(region: Tensor, like: Tensor) -> Tensor:
    """Return ``region``, bytes, as a tensor of ``like``'s type and shape."""
    return region.view(like.dtype).view(like.shape)
