"""Weight streaming: the base's weights stay in RAM, and pass through a ring of device memory as they are needed.

What a setting keeps resident is copied to the device once. All other layers share one buffer. ``ring.py`` decides where
in it each goes and what is copied ahead; here the copies are made, ordered with the computation, and handed out.

A weight is handed out for one use only (``stable`` is False), so nothing but the use at hand ever pins the ring, and no
block can fail to fit. That a recomputed block's weights are copied once for its second run and its backward pass comes
from the ring itself, which keeps what is needed again soonest: their stored form, so that a quantised weight takes no
more there than in RAM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LowVramLoraError
from ..ports import StoredWeights, Transfers, Weights
from .facts import aligned
from .frozen import matrices
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


@dataclass(frozen=True)
class _Loaded:
    """A layer's payload in the ring.

    Attributes:
        copy: what brought it there.
        tensors: by place in the payload; None for one that was on the device already.
    """

    copy: Any
    tensors: tuple[Tensor | None, ...]


class Streamed:
    """A ``WeightSource`` that brings weights to the device itself; a context manager.

    A tensor that is on the device already is used where it is. Should the ring have no room, a layer is fetched the
    host's way; that takes one layer used within another's use, or a resident one asked for in two dtypes.

    Args:
        network: whose matrices are fetched.
        setting: says what is resident and how large the ring is.

    Raises:
        LowVramLoraError: the ring is smaller than a layer that must pass through it.
    """

    def __init__(self, weights: StoredWeights, transfers: Transfers, network: nn.Module, setting: Setting) -> None:
        self.counts = Counts()
        self._weights = weights
        self._transfers = transfers
        self._finished: dict[tuple[nn.Module, torch.dtype], Weights] = {}
        streamed = {path: module for path, module in matrices(network) if path not in setting.resident}
        self._sizes = {module: self._payload_bytes(module) for module in streamed.values()}
        self._check(streamed, setting.ring_bytes)
        self._resident = self._copied(module for path, module in matrices(network) if path in setting.resident)
        self._ring = transfers.empty(setting.ring_bytes) if setting.ring_bytes else None
        self._conveyor = Conveyor(setting.ring_bytes, self._size, self._load)

    def _check(self, streamed: dict[str, nn.Module], ring_bytes: int) -> None:
        for path, module in streamed.items():
            if self._size(module) > ring_bytes:
                raise LowVramLoraError(
                    f"The weights of {path} take {self._sizes[module]} bytes of device memory, more than the "
                    f"{ring_bytes} bytes planned for all that are not resident. Take this to the pack's issue page."
                )

    def _payload_bytes(self, module: nn.Module) -> int:
        return sum(aligned(tensor.nbytes) for tensor in self._weights.payload(module))

    @property
    def resident_bytes(self) -> int:
        """Device bytes of the weights that stay, as they are now."""
        kept = [tensor for payload in self._resident.values() for tensor in payload]
        made = [tensor for weights in self._finished.values() for tensor in (weights.weight, weights.bias)]
        return sum(tensor.nbytes for tensor in (*kept, *made) if tensor is not None)

    def begin(self) -> None:
        """Learn that a pass through the network, forward and backward, begins."""
        self._conveyor.begin()

    @contextmanager
    def fetch(self, module: nn.Module, like: Tensor) -> Iterator[Weights]:
        """Yield the weights of ``module`` on the device in ``like.dtype``; ``stable`` if they are resident."""
        weights = self._finished.get((module, like.dtype)) or self._from_resident(module, like)
        if weights is not None:
            yield weights
            return
        payload = self._weights.payload(module)
        is_here = [self._transfers.holds(tensor) for tensor in payload]
        if all(is_here):
            self._conveyor.skip(module)
            yield self._weights.finish(module, payload, like)._replace(stable=False)
            return

        def serves(loaded: _Loaded) -> bool:
            return all(here or tensor is not None for here, tensor in zip(is_here, loaded.tensors, strict=True))

        segment = self._conveyor.take(module, serves)
        if segment is None:
            with self._weights.fetch(module, like) as weights:
                yield weights._replace(stable=False)
            return
        loaded: _Loaded = segment.content
        # Where the host's tensor is on the device by now, it is the same numbers.
        parts = [own if own is not None else there for own, there in zip(loaded.tensors, payload, strict=True)]
        self._transfers.wait(loaded.copy)
        try:
            yield self._weights.finish(module, parts, like)._replace(stable=False)
        finally:
            self._conveyor.give_back(segment, self._transfers.released(loaded.copy))
        # Only now: where a copy blocks the caller, it does so while the device computes.
        self._conveyor.load_ahead()

    def _from_resident(self, module: nn.Module, like: Tensor) -> Weights | None:
        """Return the weights of a resident ``module``, and keep them made up if they take no more than as stored."""
        payload = self._resident.get(module)
        if payload is None:
            return None
        weights = self._weights.finish(module, payload, like)
        made = [tensor for tensor in (weights.weight, weights.bias) if tensor is not None]
        if sum(tensor.nbytes for tensor in made) > sum(tensor.nbytes for tensor in payload):
            # Nobody counts a second copy, so nobody may hold it.
            return weights._replace(stable=False)
        weights = self._finished[module, like.dtype] = weights._replace(stable=True)
        del self._resident[module]
        return weights

    def _copied(self, modules: Iterator[nn.Module]) -> dict[nn.Module, tuple[Tensor, ...]]:
        """Return the payloads of ``modules`` on the device, but for those that are there already."""
        resident, copies = {}, []
        for module in modules:
            payload = self._weights.payload(module)
            self._sizes[module] = self._payload_bytes(module)
            missing = [tensor for tensor in payload if not self._transfers.holds(tensor)]
            if missing:
                targets = [_shaped(self._transfers.empty(tensor.nbytes), tensor) for tensor in missing]
                copies.append(self._transfers.copy_in(targets, missing))
                own = iter(targets)
                resident[module] = tuple(tensor if self._transfers.holds(tensor) else next(own) for tensor in payload)
        for copy in copies:
            self._transfers.wait(copy)
        return resident

    def _size(self, module: nn.Module) -> int:
        is_here = all(self._transfers.holds(tensor) for tensor in self._weights.payload(module))
        return 0 if is_here else self._sizes[module]

    def _load(self, segment: Segment) -> _Loaded:
        module: Any = segment.key
        start = segment.start
        tensors: list[Tensor | None] = []
        targets, sources = [], []
        assert self._ring is not None
        for source in self._weights.payload(module):
            if self._transfers.holds(source):
                tensors.append(None)
                continue
            target = _shaped(self._ring[start : start + source.nbytes], source)
            start += aligned(source.nbytes)
            tensors.append(target)
            targets.append(target)
            sources.append(source)
        self.counts.copies += 1
        self.counts.num_bytes += sum(source.nbytes for source in sources)
        self.counts.ring_bytes = max(self.counts.ring_bytes, segment.end)
        return _Loaded(self._transfers.copy_in(targets, sources, segment.fences), tuple(tensors))

    def close(self) -> None:
        """Let go of all device memory."""
        self._finished.clear()
        self._resident.clear()
        self._conveyor = Conveyor(0, self._size, self._load)
        self._ring = None

    def __enter__(self) -> Streamed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _shaped(region: Tensor, like: Tensor) -> Tensor:
    """Return ``region``, bytes, as a tensor of ``like``'s type and shape."""
    return region.view(like.dtype).view(like.shape)
