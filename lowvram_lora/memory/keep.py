"""Which blocks keep their activations instead of running again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from .facts import BlockFacts, Facts, StepFacts
from .footprint import held, num_passes, place_gradients, place_peaks
from .pace import flops_again


@dataclass(frozen=True)
class Kept:
    """The first of the blocks in ``order`` keep their activations, all others run again.

    Attributes:
        order: blocks that can keep.
        always: blocks that can't.
        moving: the most bytes that live for the step, gradients included, in forward and backward.
        flops: work of the blocks that run again, in one pass.
        input_bytes: inputs that they hold.
    """

    order: tuple[str, ...]
    always: tuple[str, ...]
    number: int
    moving: int
    flops: int
    input_bytes: int

    @property
    def blocks(self) -> frozenset[str]:
        """Paths of the blocks that keep their activations."""
        return frozenset(self.order[: self.number])

    @property
    def again(self) -> tuple[str, ...]:
        """Paths of the blocks that run again."""
        return self.order[self.number :] + self.always


def keep_sequence(
    facts: Facts, micro_batch: int, keep_convolutions: bool, inputs_in_ram: bool, adapter_dtype: torch.dtype
) -> list[Kept]:
    """Return the choices worth looking at: no block, one, ... all that can keep.

    Each next block is the one that saves most work for the bytes it raises the peak by. One whose activations are gone
    before the peak comes, as the last block's are, raises it by none.
    """
    step = facts.steps[micro_batch]
    line = _Line(facts, step, num_passes(facts, micro_batch) > 1, adapter_dtype, (keep_convolutions, inputs_in_ram))
    left = {place: block for place, block in enumerate(step.blocks) if not block.writes_in_place}
    flops = sum(flops_again(block, keep_convolutions) for block in step.blocks)
    inputs = sum(block.input_bytes for block in step.blocks)
    chosen, states = [], [(line.peak, flops, inputs)]
    while left:
        place = line.cheapest(left)
        block = left.pop(place)
        line.keep(place)
        chosen.append(block.path)
        flops -= flops_again(block, keep_convolutions)
        inputs -= block.input_bytes
        states.append((line.peak, flops, inputs))
    order, always = tuple(chosen), tuple(block.path for block in step.blocks if block.writes_in_place)
    return [Kept(order, always, number, *state) for number, state in enumerate(states)]


class _Line:
    """The bytes at every place of a pass, as blocks are chosen to keep; equal to ``footprint`` of the same choice."""

    def __init__(
        self, facts: Facts, step: StepFacts, several: bool, adapter_dtype: torch.dtype, flags: tuple[bool, bool]
    ) -> None:
        blocks, (self._convolutions, self._inputs) = step.blocks, flags
        gradients, self._in_forward = place_gradients(facts, step, several, adapter_dtype)
        places = place_peaks(step)
        self._blocks: Sequence[BlockFacts] = blocks
        shifts = accumulate((held(block, False, *flags) for block in blocks), initial=0)
        self._shift = list(shifts)
        self._most = [places[i] + gradients[i] + self._shift[i] for i in range(len(places))]
        for place, block in enumerate(blocks):
            forward = block.forward_peak + self._in_forward
            backward = block.backward_peak + gradients[place + 1]
            self._most[place] = max(self._most[place], max(forward, backward) + self._shift[place])
        self._measure()

    def _measure(self) -> None:
        self._after = list(accumulate(reversed(self._most), max))[::-1]
        self.peak = self._after[0]

    def _added(self, place: int) -> int:
        block = self._blocks[place]
        recomputed = held(block, False, self._convolutions, self._inputs)
        return held(block, True, self._convolutions, self._inputs) - recomputed

    def _own(self, place: int) -> int:
        block = self._blocks[place]
        return block.forward_peak + self._in_forward + self._shift[place] + block.activation_bytes

    def cheapest(self, left: dict[int, BlockFacts]) -> int:
        """Return the place of the block in ``left`` to keep next."""
        return max(left, key=self._worth)

    def _worth(self, place: int) -> float:
        block = self._blocks[place]
        raised = max(self._after[place + 1] + self._added(place), self._own(place)) - self.peak
        # Bytes below the peak are not free either: they are gone for blocks chosen later.
        price = max(raised, 0) + block.activation_bytes / 8 + 1
        return (1 + flops_again(block, self._convolutions)) / price

    def keep(self, place: int) -> None:
        """Let the block at ``place`` keep its activations."""
        self._most[place] = max(self._most[place], self._own(place))
        added = self._added(place)
        for later in range(place + 1, len(self._most)):
            self._most[later] += added
            self._shift[later] += added
        self._measure()
