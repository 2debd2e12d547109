"""Copies between RAM and a device, beside the computation where the device can do that."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .facts import ALIGNMENT

_log = logging.getLogger(__name__)
# Devices that do one thing at a time, as far as torch lets us ask.
_IN_ORDER = ("cpu", "meta", "mps")


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's bytes ``[N]``; no copy."""
    return tensor.reshape(-1).view(torch.uint8)


class DeviceTransfers:
    """``Transfers`` to ``device``: on a stream of their own where it has streams, else at once and in order.

    Args:
        staging_bytes: page-locked RAM that weights pass through, copied there by a thread. 0 copies from where they
            are, which blocks the caller unless that is page-locked itself. torch page-locks powers of two.
    """

    def __init__(self, device: torch.device, staging_bytes: int = 0) -> None:
        self._way: _InOrder | _Streams = (
            _InOrder(device) if device.type in _IN_ORDER else _Streams(device, staging_bytes)
        )
        self.device = self._way.device

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is on the device already."""
        return tensor.device == self.device

    def empty(self, num_bytes: int) -> Tensor:
        """Return ``num_bytes`` of device memory, ``uint8``."""
        return self._way.empty(num_bytes)

    def copy_in(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Any] = ()) -> Any:
        """Start to copy ``sources`` into ``targets`` once all ``after`` have passed; return the copy."""
        with torch.no_grad():
            return self._way.copy_in(targets, sources, after)

    def wait(self, copy: Any) -> None:
        """Let computation that is issued from now on wait for ``copy``. Raises what went wrong in it."""
        self._way.wait(copy)

    def released(self, copy: Any) -> Any:
        """Return a fence that passes when what was issued so far is done."""
        return self._way.mark()

    def to_ram(self, tensor: Tensor) -> Any:
        """Return a copy of ``tensor`` in RAM that ``from_ram`` takes once."""
        with torch.no_grad():
            return self._way.to_ram(tensor.detach())

    def from_ram(self, kept: Any, room: Tensor | None = None) -> Tensor:
        """Return a device copy of what ``to_ram`` was given, in ``room`` or in new memory."""
        with torch.no_grad():
            return self._way.from_ram(kept, room)

    def close(self) -> None:
        """Let go of everything; copies under way are finished first."""
        self._way.close()


def _empty(num_bytes: int, device: torch.device) -> Tensor:
    # A tensor made in inference mode could not be written to outside of it.
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class _InOrder:
    """A device without streams: a copy is done before anything that is asked for later."""

    def __init__(self, device: torch.device) -> None:
        # Tensors carry an index where the device has one.
        self.device = torch.empty(0, device=device).device

    def empty(self, num_bytes: int) -> Tensor:
        return _empty(num_bytes, self.device)

    def copy_in(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Any]) -> None:
        if self.device.type != "meta":
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

    def wait(self, copy: Any) -> None:
        pass

    def mark(self) -> None:
        pass

    def to_ram(self, tensor: Tensor) -> Tensor:
        # On meta there are no numbers to keep, and the shape is kept by a tensor without any.
        return torch.empty_like(tensor) if self.device.type == "meta" else tensor.to("cpu", copy=True)

    def from_ram(self, kept: Tensor, room: Tensor | None) -> Tensor:
        if room is not None:
            return room if self.device.type == "meta" else room.copy_(kept)
        return torch.empty_like(kept) if self.device.type == "meta" else kept.to(self.device, copy=True)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _InRam:
    """A tensor's bytes in RAM, and what it looked like."""

    buffer: Tensor
    shape: torch.Size
    dtype: torch.dtype
    is_pinned: bool

    @property
    def tensor(self) -> Tensor:
        return self.buffer.view(self.dtype).view(self.shape)


class _Streams:
    """A device with streams. Fences are events; a copy is an event, or a promise of one."""

    def __init__(self, device: torch.device, staging_bytes: int) -> None:
        self._module: Any = torch.get_device_module(device)
        index = self._module.current_device() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self._stream = self._module.Stream(device=self.device)
        self._under_way: deque[tuple[Any, Sequence[Tensor]]] = deque()
        self._free: dict[int, list[Tensor]] = {}
        self._is_locking = True
        slots = _page_locked(2, staging_bytes // 2 // ALIGNMENT * ALIGNMENT)
        self._staging = _Staging(self, slots) if slots else None

    def empty(self, num_bytes: int) -> Tensor:
        buffer = _empty(num_bytes, self.device)
        # What had this memory before may still be computed with, and what gets it next must wait for our copies.
        self._stream.wait_stream(self._compute())
        if num_bytes:
            buffer.record_stream(self._stream)
        return buffer

    def _compute(self) -> Any:
        return self._module.current_stream(self.device)

    def mark(self) -> Any:
        event = self._module.Event()
        event.record(self._compute())
        return event

    def copy_in(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Any]) -> Any:
        if self._staging is not None:
            return self._staging.submit(targets, sources, after)
        event = self.enqueue(targets, sources, after)
        self.keep_until(event, sources)
        return event

    def enqueue(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Any]) -> Any:
        """Put a copy on the stream; return the event that follows it."""
        with self._module.stream(self._stream):
            for fence in after:
                self._stream.wait_event(fence)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        return event

    def keep_until(self, event: Any, sources: Sequence[Tensor]) -> None:
        """Hold ``sources`` until ``event`` has passed. Asked for by one thread only."""
        # Memory that somebody else page-locked is read until the copy is done, whoever lets go of it.
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        self._under_way.append((event, sources))

    def wait(self, copy: Any) -> None:
        event = copy.result() if isinstance(copy, Future) else copy
        self._compute().wait_event(event)

    def to_ram(self, tensor: Tensor) -> _InRam:
        free = self._free.get(tensor.nbytes)
        buffer = free.pop() if free else self._in_ram(tensor.nbytes)
        kept = _InRam(buffer, tensor.shape, tensor.dtype, buffer.is_pinned())
        # On the computation's own stream, so that the buffer is free for the next as soon as from_ram was issued.
        kept.tensor.copy_(tensor, non_blocking=kept.is_pinned)
        return kept

    def _in_ram(self, num_bytes: int) -> Tensor:
        locked = _page_locked(1, num_bytes) if self._is_locking else []
        # Asked once more, the system would say the same.
        self._is_locking = bool(locked) or not num_bytes
        return locked[0] if locked else _empty(num_bytes, torch.device("cpu"))

    def from_ram(self, kept: _InRam, room: Tensor | None) -> Tensor:
        tensor = torch.empty(kept.shape, dtype=kept.dtype, device=self.device) if room is None else room
        tensor.copy_(kept.tensor, non_blocking=kept.is_pinned)
        self._free.setdefault(kept.buffer.nbytes, []).append(kept.buffer)
        return tensor

    def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
        self._stream.synchronize()
        # The computation's stream as well: it copies to and from the buffers that are let go of here.
        self._compute().synchronize()
        self._staging = None
        self._under_way.clear()
        self._free.clear()


class _Staging:
    """A thread that copies weights into page-locked slots, by turns, and from there to the device."""

    def __init__(self, streams: _Streams, slots: list[Tensor]) -> None:
        self._streams = streams
        self._slots = slots
        self._events: list[Any] = [None] * len(slots)
        self._turn = 0
        self._thread = ThreadPoolExecutor(1, "weights to the device")

    def submit(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Any]) -> Future[Any]:
        return self._thread.submit(self._copy, targets, sources, after)

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Any]) -> Any:
        # Grad mode belongs to a thread.
        with torch.no_grad():
            event = self._streams.enqueue((), (), after)
            for target, source in zip(targets, sources, strict=True):
                if source.nbytes:
                    event = self._copy_one(_bytes_of(target), _bytes_of(source))
            return event

    def _copy_one(self, target: Tensor, source: Tensor) -> Any:
        if source.is_pinned():
            event = self._streams.enqueue([target], [source], ())
            self._streams.keep_until(event, [source])
            return event
        step = self._slots[0].numel()
        for start in range(0, source.numel(), step):
            part = source[start : start + step]
            slot, earlier = self._slots[self._turn], self._events[self._turn]
            if earlier is not None:
                earlier.synchronize()
            slot[: part.numel()].copy_(part)
            event = self._streams.enqueue([target[start : start + step]], [slot[: part.numel()]], ())
            self._events[self._turn] = event
            self._turn = (self._turn + 1) % len(self._slots)
        return event

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


def _page_locked(num: int, num_bytes: int) -> list[Tensor]:
    """Return ``num`` page-locked buffers, or none if the system gives none."""
    if not num_bytes:
        return []
    try:
        with torch.inference_mode(False):
            return [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(num)]
    except RuntimeError as error:
        _log.warning("No %d bytes of page-locked RAM, so copies are slower: %s", num * num_bytes, error)
        return []
