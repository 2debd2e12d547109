"""AdamW's moments: made before the first step, in a few large tensors that can wait in RAM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..memory.footprint import CHUNK_ELEMENTS
from ..ports import Transfers


@dataclass
class Chunk:
    """Both moments of consecutive parameters in one tensor: all first moments, then all second ones.

    Attributes:
        flat: on the device, or None while they wait in RAM.
        kept: what ``Transfers.to_ram`` gave, or None.
        keeper: the transfers that gave it.
    """

    parameters: list[nn.Parameter]
    flat: Tensor | None
    kept: Any = None
    keeper: Transfers | None = None


class Moments:
    """The moments of ``parameters``; ``state`` is the optimizer's own, and refers to them while they are there.

    They are zero at first and take exactly as many bytes as those of separate tensors.

    Args:
        transfers: by which they wait in RAM from the start; None leaves them on the device.
    """

    def __init__(
        self,
        state: MutableMapping[Any, Any],
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        transfers: Transfers | None = None,
    ) -> None:
        self._state = state
        self._dtype = dtype
        self._transfers = transfers
        self.chunks: list[Chunk] = []
        for part in _parts(parameters):
            flat = torch.zeros(2 * _num_elements(part), dtype=dtype, device=part[0].device)
            self._refer_to(flat, part)
            chunk = Chunk(part, flat)
            del flat
            if transfers is not None:
                self._leave(chunk, transfers)
            self.chunks.append(chunk)

    def keep_in_ram(self, transfers: Transfers) -> None:
        """Let the moments wait in RAM from now on, but for the time of their update; no number changes.

        They go there at once, through ``transfers``. If they wait in RAM by way of another one, that is used once more.
        """
        for chunk in self.chunks:
            self._bring(chunk)
            self._leave(chunk, transfers)
        self._transfers = transfers

    def keep_on_device(self) -> None:
        """Let the moments stay on the device from now on; if there is no room for them, nothing has changed."""
        try:
            for chunk in self.chunks:
                self._bring(chunk)
        except BaseException:
            self._leave_all()
            raise
        self._transfers = None

    @property
    def are_in_ram(self) -> bool:
        """Whether they wait in RAM between updates."""
        return self._transfers is not None

    @property
    def largest(self) -> int:
        """Parameter elements of the largest chunk."""
        return max(_num_elements(chunk.parameters) for chunk in self.chunks)

    def each(self, update: Callable[[Chunk], None]) -> None:
        """Call ``update`` with each chunk while it is on the device: one at a time of those that wait in RAM.

        All device memory for that is taken before the first call, so if there is none, nothing has changed.
        """
        transfers = self._transfers
        if transfers is None:
            for chunk in self.chunks:
                update(chunk)
            return
        first = self.chunks[0].parameters[0]
        room = torch.empty(2 * self.largest, dtype=self._dtype, device=first.device)
        for chunk in self.chunks:
            self._bring(chunk, room[: 2 * _num_elements(chunk.parameters)])
            try:
                update(chunk)
            finally:
                self._leave(chunk, transfers)

    def _bring(self, chunk: Chunk, room: Tensor | None = None) -> None:
        if chunk.flat is not None:
            return
        assert chunk.keeper is not None
        chunk.flat = chunk.keeper.from_ram(chunk.kept, room)
        chunk.kept = chunk.keeper = None
        self._refer_to(chunk.flat, chunk.parameters)

    def _refer_to(self, flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        first, second = (views(half, parameters) for half in flat.chunk(2))
        for parameter, exp_avg, exp_avg_sq in zip(parameters, first, second, strict=True):
            self._state[parameter].update(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)

    def _leave_all(self) -> None:
        for chunk in self.chunks:
            if chunk.flat is not None and self._transfers is not None:
                self._leave(chunk, self._transfers)

    def _leave(self, chunk: Chunk, transfers: Transfers) -> None:
        assert chunk.flat is not None
        chunk.kept, chunk.keeper = transfers.to_ram(chunk.flat), transfers
        chunk.flat = None
        for parameter in chunk.parameters:
            del self._state[parameter]["exp_avg"], self._state[parameter]["exp_avg_sq"]


def views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return ``flat``, one element for each of the parameters', as tensors of their shapes."""
    pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [piece.view(parameter.shape) for piece, parameter in zip(pieces, parameters, strict=True)]


def _parts(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    part: list[nn.Parameter] = []
    for parameter in parameters:
        if part and _num_elements(part) + parameter.numel() > CHUNK_ELEMENTS:
            yield part
            part = []
        part.append(parameter)
    if part:
        yield part


def _num_elements(parameters: Sequence[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)
