"""Which blocks keep their activations instead of running again, and whose feed-forward runs in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from .facts import BlockFacts, Facts, StepFacts
from .footprint import held, num_passes, place_gradients, place_peaks
from .pace import flops_again, flops_in_parts

# What a block does: run again; keep all but what a feed-forward makes, which runs in parts; keep everything.
_AGAIN, _MOST, _EVERYTHING = range(3)


@dataclass(frozen=True)
class Kept:
    """Some blocks keep their activations, all others run again.

    Attributes:
        blocks: paths of those that keep theirs.
        again: paths of those that run again.
        chunked: paths of those whose feed-forward runs in parts, of both kinds.
        moving: the most bytes that live for the step, gradients included, in forward and backward.
        flops: work that is done again, in one pass.
        input_bytes: inputs that the blocks which run again hold.
    """

    blocks: frozenset[str]
    again: tuple[str, ...]
    chunked: frozenset[str]
    moving: int
    flops: int
    input_bytes: int


def can_run_in_parts(facts: Facts, micro_batch: int) -> bool:
    """Return whether any block has a feed-forward that could run in parts."""
    return any(block.in_parts for block in facts.steps[micro_batch].blocks)


def keep_sequence(
    facts: Facts,
    micro_batch: int,
    keep_convolutions: bool,
    inputs_in_ram: bool,
    adapter_dtype: torch.dtype,
    in_parts: bool = False,
) -> list[Kept]:
    """Return the choices worth looking at: no block keeps anything, one does, ... all that can keep everything.

    Each next block is the one that saves most work for the bytes it raises the peak by. One whose activations are gone
    before the peak comes, as the last block's are, raises it by none.

    Args:
        in_parts: feed-forwards may run in parts. First every block comes to keep all but its feed-forward's
            activations, then one after the other those too. One that runs again does so in parts only where it would
            raise the peak as a whole.
    """
    step = facts.steps[micro_batch]
    several = num_passes(facts, micro_batch) > 1
    line = _Line(facts, step, several, adapter_dtype, (keep_convolutions, inputs_in_ram), in_parts)
    choices = [line.choice()]
    while line.keep_next():
        choices.append(line.choice())
    return choices


class _Line:
    """The bytes at every place of a pass, as blocks are chosen to keep; equal to ``footprint`` of the same choice."""

    def __init__(
        self,
        facts: Facts,
        step: StepFacts,
        several: bool,
        adapter_dtype: torch.dtype,
        flags: tuple[bool, bool],
        in_parts: bool,
    ) -> None:
        blocks, (keep_convolutions, _) = step.blocks, flags
        least = [(in_parts and block.in_parts) or block for block in blocks]
        gradients, in_forward = place_gradients(facts, step, several, adapter_dtype)
        around = [peak + own for peak, own in zip(place_peaks(step), gradients, strict=True)]

        def peaks(chosen: Sequence[BlockFacts], is_kept: bool) -> list[int]:
            """Return the most bytes while each block runs, and just before."""
            forward = [block.forward_peak + block.activation_bytes * is_kept + in_forward for block in chosen]
            backward = [block.backward_peak + own for block, own in zip(chosen, gradients[1:], strict=True)]
            return [max(place) for place in zip(around, forward, backward, strict=False)]

        def holds(chosen: Sequence[BlockFacts], is_kept: bool) -> list[int]:
            return [held(block, is_kept, *flags) for block in chosen]

        self._blocks = blocks
        # By level and place, but for what earlier blocks hold.
        self._peaks = [peaks(least, False), peaks(least, True), peaks(blocks, True)]
        self._whole_peaks = peaks(blocks, False)
        self._held = [holds(least, False), holds(least, True), holds(blocks, True)]
        self._activations = [[0] * len(blocks), *([b.activation_bytes for b in chosen] for chosen in (least, blocks))]
        self._again = [flops_again(block, keep_convolutions) for block in blocks]
        self._more = [0 if b is block else flops_in_parts(block) for b, block in zip(least, blocks, strict=True)]
        self._is_whole = [b is block for b, block in zip(least, blocks, strict=True)]
        self._levels = [_AGAIN] * len(blocks)
        self._left = [place for place, block in enumerate(blocks) if not block.writes_in_place]
        self._shift = list(accumulate(self._held[_AGAIN], initial=0))
        self._last = around[-1]
        self._measure()

    def _measure(self) -> None:
        most = [self._peaks[level][place] + self._shift[place] for place, level in enumerate(self._levels)]
        most.append(self._last + self._shift[-1])
        self._after = list(accumulate(reversed(most), max))[::-1]
        self._peak = self._after[0]

    def _is_chunked(self, place: int, level: int) -> bool:
        if level == _EVERYTHING or self._is_whole[place]:
            return False
        return level == _MOST or self._whole_peaks[place] + self._shift[place] > self._peak

    def _work(self, place: int, level: int) -> int:
        again = self._again[place] if level == _AGAIN else 0
        return again + (self._more[place] if self._is_chunked(place, level) else 0)

    def choice(self) -> Kept:
        """Return what is chosen now."""
        levels = list(enumerate(self._levels))
        again = [self._blocks[place] for place, level in levels if level == _AGAIN]
        return Kept(
            blocks=frozenset(self._blocks[place].path for place, level in levels if level != _AGAIN),
            again=tuple(block.path for block in again),
            chunked=frozenset(self._blocks[place].path for place, level in levels if self._is_chunked(place, level)),
            moving=self._peak,
            flops=sum(self._work(place, level) for place, level in levels),
            input_bytes=sum(block.input_bytes for block in again),
        )

    def keep_next(self) -> bool:
        """Let the block that is worth most keep more; return whether there was one."""
        level = _MOST
        left = [place for place in self._left if self._levels[place] == _AGAIN]
        if not left:
            level = _EVERYTHING
            left = [place for place in self._left if self._levels[place] == _MOST and not self._is_whole[place]]
        if not left:
            return False
        place = max(left, key=lambda place: self._worth(place, level))
        added = self._held[level][place] - self._held[self._levels[place]][place]
        self._levels[place] = level
        for later in range(place + 1, len(self._shift)):
            self._shift[later] += added
        self._measure()
        return True

    def _worth(self, place: int, level: int) -> float:
        before = self._levels[place]
        added = self._held[level][place] - self._held[before][place]
        raised = max(self._after[place + 1] + added, self._peaks[level][place] + self._shift[place]) - self._peak
        # Bytes below the peak are not free either: they are gone for blocks chosen later.
        more = self._activations[level][place] - self._activations[before][place]
        price = max(raised, 0) + max(more, 0) / 8 + 1
        return (1 + self._work(place, before) - self._work(place, level)) / price
