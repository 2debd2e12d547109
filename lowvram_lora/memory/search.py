"""The fastest setting that fits, among all combinations of the lossless techniques.

The candidates do not depend on the budget: it only says which of them fit. So more budget never gives a slower one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import torch

from ..units import MIB
from .facts import Facts, LayerFacts
from .footprint import margin, num_passes, parameter_bytes, state_bytes, update_bytes, visiting_bytes
from .keep import Kept, can_run_in_parts, keep_sequence
from .pace import (
    Rates,
    holds_block,
    launch_seconds,
    overlapped,
    pass_flops,
    reads,
    ring_place,
    ring_sizes,
)
from .setting import Setting

# Two of the largest layer on their way at once; page-locked RAM is taken from everybody, so not without end.
MAX_STAGING_BYTES = 256 * MIB


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run the job, but for where the weights are.

    Attributes:
        settled: device bytes that stay, without weights and ring.
        moving: device bytes that come and go within a step, at most.
        ram: bytes of RAM it takes.
        computed_s: computation of a step.
        trips_s: round trips to RAM, of anything but weights.
    """

    micro_batch: int
    passes: int
    keep_convolutions: bool
    inputs_in_ram: bool
    optimizer_in_ram: bool
    kept: Kept
    settled: int
    moving: int
    ram: int
    computed_s: float
    trips_s: float

    @property
    def least_s(self) -> float:
        """Seconds of a step when no weight is copied."""
        return self.computed_s + self.trips_s

    @property
    def need(self) -> int:
        """What a budget must hold beside weights and ring."""
        return self.settled + self.moving + margin(self.moving)

    @property
    def num_techniques(self) -> int:
        """Techniques in use, to prefer the plainer of two equals."""
        in_ram, in_parts = self.inputs_in_ram + self.optimizer_in_ram, bool(self.kept.chunked)
        return in_ram + in_parts + (not self.keep_convolutions) + (self.passes > 1)


@dataclass(frozen=True)
class Found:
    """A candidate with its weights in place; compares by what is better."""

    seconds: float
    num_techniques: int
    need: int
    candidate: Candidate
    ring: int
    num_resident: int

    @property
    def key(self) -> tuple[float, int, int]:
        """Smaller is better."""
        return self.seconds, self.num_techniques, self.need


class Space:
    """Every way to run a job that is worth looking at.

    Args:
        recompute: whether blocks may run again; else all that can keep their activations do.
    """

    def __init__(
        self,
        facts: Facts,
        rates: Rates,
        recompute: bool = True,
        adapter_dtype: torch.dtype = torch.float32,
        optimizer_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.facts = facts
        self._rates = rates
        self._recompute = recompute
        self._dtypes = adapter_dtype, optimizer_dtype
        self._order = resident_order(facts.layers)
        self._sizes = list(accumulate((layer.num_bytes for layer in self._order), initial=0))
        self._rings = {
            in_parts: ring_sizes(facts.layers, facts.parts_ring_bytes * in_parts) for in_parts in (False, True)
        }
        self._traffic = _Traffic(self._order)
        self._candidates = sorted(self._all(), key=lambda candidate: candidate.least_s)

    def smallest(self, ram: int) -> int:
        """Return the smallest budget in which something fits, taking at most ``ram`` bytes of RAM."""
        weights = {in_parts: min(self._sizes[-1], rings[0]) for in_parts, rings in self._rings.items()}
        return min(c.need + weights[bool(c.kept.chunked)] for c in self._candidates if c.ram <= max(ram, 0))

    def best(self, budget: int, ram: int, peak: int | None = None) -> Setting | None:
        """Return the fastest setting that fits into ``budget`` bytes, or None.

        Args:
            ram: bytes of RAM it may take.
            peak: live bytes it must stay at or below, without the margin.
        """
        found = self._best(budget, ram, peak)
        return None if found is None else self._setting(found, ram)

    def _best(self, budget: int, ram: int, peak: int | None) -> Found | None:
        best: Found | None = None
        for candidate in self._candidates:
            if best is not None and candidate.least_s > best.seconds:
                break
            if candidate.ram > max(ram, 0):
                continue
            room = budget - candidate.need
            if peak is not None:
                room = min(room, peak - candidate.settled - candidate.moving)
            for found in self._placements(candidate, room):
                if best is None or found.key < best.key:
                    best = found
        return best

    def _placements(self, candidate: Candidate, room: int) -> Iterator[Found]:
        """Yield the most resident weights in ``room`` bytes for each ring."""
        every, plain = len(self._order), candidate.num_techniques
        if room >= self._sizes[-1]:
            yield Found(candidate.least_s, plain, candidate.need + self._sizes[-1], candidate, 0, every)
            return
        rings = self._rings[bool(candidate.kept.chunked)]
        for ring in rings:
            number = bisect_right(self._sizes, room - ring, hi=every) - 1
            if number < 0:
                return
            copied = self._traffic.copied(number, ring, candidate.kept, candidate.keep_convolutions)
            copied_s = candidate.passes * copied / self._rates.copy_bytes_per_s
            seconds = overlapped(candidate.computed_s, copied_s, ring_place(rings, ring)) + candidate.trips_s
            yield Found(seconds, plain, candidate.need + ring + self._sizes[number], candidate, ring, number)

    def _setting(self, found: Found, ram: int) -> Setting:
        candidate = found.candidate
        adapter_dtype, optimizer_dtype = self._dtypes
        staging = min(self._rings[False][0], MAX_STAGING_BYTES) if found.ring else 0
        whole = candidate.micro_batch == self.facts.batch_size
        return Setting(
            resident=frozenset(layer.path for layer in self._order[: found.num_resident]),
            kept=candidate.kept.blocks,
            chunked=candidate.kept.chunked,
            ring_bytes=found.ring,
            staging_bytes=staging if candidate.ram + staging <= ram else 0,
            micro_batch=0 if whole else candidate.micro_batch,
            inputs_in_ram=candidate.inputs_in_ram,
            optimizer_in_ram=candidate.optimizer_in_ram,
            keep_convolutions=candidate.keep_convolutions,
            adapter_dtype=adapter_dtype,
            optimizer_dtype=optimizer_dtype,
        )

    def _all(self) -> Iterator[Candidate]:
        adapter_dtype, _ = self._dtypes
        off_on = (False, True)
        for micro_batch, keeps, to_ram, in_parts in product(self.facts.steps, (True, False), off_on, off_on):
            if in_parts and not (self._recompute and can_run_in_parts(self.facts, micro_batch)):
                continue
            choices = keep_sequence(self.facts, micro_batch, keeps, to_ram, adapter_dtype, in_parts)
            for kept in choices if self._recompute else choices[-1:]:
                if (kept.input_bytes or not to_ram) and (kept.flops or keeps):
                    for state_out in (False, True):
                        yield self._candidate(micro_batch, keeps, to_ram, state_out, kept)

    def _candidate(self, micro_batch: int, keeps: bool, to_ram: bool, state_out: bool, kept: Kept) -> Candidate:
        facts, (adapter_dtype, optimizer_dtype) = self.facts, self._dtypes
        parameters, state = parameter_bytes(facts, adapter_dtype), state_bytes(facts, optimizer_dtype)
        step, passes = facts.steps[micro_batch], num_passes(facts, micro_batch)
        # Kept in step with ``footprint`` and ``pace``, which say the same of one setting.
        visiting = visiting_bytes(facts, optimizer_dtype) if state_out else 0
        update = parameters + update_bytes(facts, adapter_dtype, optimizer_dtype) + visiting
        flops = pass_flops(step.blocks, step.other_flops) + kept.flops
        flops = facts.passes * flops * facts.batch_size // micro_batch
        trips = passes * 2 * kept.input_bytes * to_ram + 2 * state * state_out
        return Candidate(
            micro_batch=micro_batch,
            passes=passes,
            keep_convolutions=keeps,
            inputs_in_ram=to_ram,
            optimizer_in_ram=state_out,
            kept=kept,
            settled=facts.small_bytes + parameters + (0 if state_out else state),
            moving=max(kept.moving, update),
            ram=kept.input_bytes * to_ram + state * state_out,
            computed_s=flops / self._rates.flops_per_s + launch_seconds(facts, passes),
            trips_s=trips / self._rates.copy_bytes_per_s,
        )


def resident_order(layers: Sequence[LayerFacts]) -> list[LayerFacts]:
    """Return ``layers`` in the order in which they become resident, so that any beginning of it is spread evenly.

    Layers outside blocks come first. The others follow by bit reversal of their place in the forward pass, so that what
    is still copied is spread over the whole pass, and computation can hide it.
    """
    outside = [layer for layer in layers if layer.block is None]
    inside = [layer for layer in layers if layer.block is not None]
    width = len(inside).bit_length()
    places = sorted(range(len(inside)), key=lambda place: f"{place:0{width}b}"[::-1])
    return outside + [inside[place] for place in places]


class _Traffic:
    """Bytes a pass copies, by how many layers are resident. Equal to what ``pace`` counts for one setting.

    Args:
        order: all layers, the first to become resident first.
    """

    def __init__(self, order: Sequence[LayerFacts]) -> None:
        self._places = {block: place for place, block in enumerate(dict.fromkeys(layer.block for layer in order))}
        self._largest = list(accumulate((layer.num_bytes for layer in reversed(order)), max, initial=0))[::-1]
        self._streamed = self._table(order, [1] * len(order))
        self._plain = self._table(order, [reads(layer, False, False, True) for layer in order])
        self._again = {
            (is_held, keeps): self._table(order, [reads(layer, True, is_held, keeps) for layer in order])
            for is_held, keeps in product((False, True), repeat=2)
        }

    def _table(self, order: Sequence[LayerFacts], times: Sequence[int]) -> list[list[int]]:
        """Return, by number of resident layers, the bytes of each block's other layers, each ``times`` over."""
        row = [0] * len(self._places)
        rows = [row]
        for layer, number in zip(reversed(order), reversed(times), strict=True):
            row = row.copy()
            row[self._places[layer.block]] += number * layer.num_bytes
            rows.append(row)
        return rows[::-1]

    def copied(self, num_resident: int, ring: int, kept: Kept, keep_convolutions: bool) -> int:
        """Return the bytes of one pass."""
        total = sum(self._plain[num_resident])
        plain, streamed = self._plain[num_resident], self._streamed[num_resident]
        by_held = [self._again[is_held, keep_convolutions][num_resident] for is_held in (False, True)]
        for block in kept.again:
            place = self._places.get(block)
            if place is not None:
                is_held = holds_block(ring, streamed[place], self._largest[num_resident])
                total += by_held[is_held][place] - plain[place]
        return total
