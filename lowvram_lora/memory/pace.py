"""What a setting costs in time, before anything was measured: work, copies, and how well they overlap.

The seconds are those of a nominal device. They rank settings against each other; what a step really takes is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from .facts import BlockFacts, Facts, LayerFacts
from .footprint import num_passes, state_bytes
from .setting import Setting

# Host time to start one layer's kernels, and how often a pass does so: forward, second run, backward.
LAUNCH_S = 1.5e-5
RUNS_PER_PASS = 3
# The part of the shorter of computation and copies that the longer one does not hide, by how far copies may run ahead:
# one layer, one block, two blocks. Layers' copies and work match badly one by one, and better the more are summed.
UNHIDDEN = (0.3, 0.1, 0.05)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """A device's nominal speed.

    Attributes:
        flops_per_s: of matrix products, in the compute dtype.
        copy_bytes_per_s: from RAM to the device.
    """

    flops_per_s: float = 2e13
    copy_bytes_per_s: float = 1e10


@dataclass(frozen=True, kw_only=True)
class Pace:
    """One step of the largest batch.

    Attributes:
        flops: work of the network.
        copied_bytes: weights copied to the device. A bound, as a ring may still hold some at the turn of a pass;
            the plan of a prepared run has the exact count.
        ram_trip_bytes: inputs of blocks and optimizer state, out to RAM and back.
        seconds: on the nominal device.
    """

    flops: int
    copied_bytes: int
    ram_trip_bytes: int
    seconds: float


def pace(facts: Facts, setting: Setting, rates: Rates) -> Pace:
    """Return what a step in ``setting`` costs."""
    micro_batch = setting.micro_batch or facts.batch_size
    step, passes = facts.steps[micro_batch], num_passes(facts, micro_batch)
    again = [block for block in step.blocks if block.path not in setting.kept]
    flops = pass_flops(step.blocks, step.other_flops) + sum(flops_again(b, setting.keep_convolutions) for b in again)
    flops += sum(flops_in_parts(block) for block in step.blocks if block.path in setting.chunked)
    flops = facts.passes * flops * facts.batch_size // micro_batch
    copied = passes * _copied_per_pass(facts, setting, {block.path for block in again})
    trips = passes * 2 * sum(block.input_bytes for block in again) if setting.inputs_in_ram else 0
    trips += 2 * state_bytes(facts, setting.optimizer_dtype) if setting.optimizer_in_ram else 0
    computed_s = flops / rates.flops_per_s + launch_seconds(facts, passes)
    rings = ring_sizes(facts.layers, facts.parts_ring_bytes if setting.chunked else 0)
    place = ring_place(rings, setting.ring_bytes)
    seconds = overlapped(computed_s, copied / rates.copy_bytes_per_s, place) + trips / rates.copy_bytes_per_s
    return Pace(flops=flops, copied_bytes=copied, ram_trip_bytes=trips, seconds=seconds)


def pass_flops(blocks: Sequence[BlockFacts], other_flops: int) -> int:
    """Return the work of forward and backward without recompute.

    The weights are frozen, so backward only computes the inputs' gradients: as much work as forward.
    """
    return 2 * (other_flops + sum(block.flops for block in blocks))


def flops_again(block: BlockFacts, keep_convolutions: bool) -> int:
    """Return the work of the block's second run."""
    return block.flops - (block.convolution_flops if keep_convolutions and not block.writes_in_place else 0)


def flops_in_parts(block: BlockFacts) -> int:
    """Return what the block works more with its feed-forward in parts, kept or not."""
    return block.in_parts.backward_flops - block.backward_flops if block.in_parts else 0


def launch_seconds(facts: Facts, passes: int) -> float:
    """Return the host's time to start the kernels of ``passes`` passes: what small micro-batches lose."""
    return LAUNCH_S * RUNS_PER_PASS * len(facts.layers) * passes


def overlapped(computed_s: float, copied_s: float, place: int) -> float:
    """Return the seconds computation and copies take beside each other.

    Args:
        place: which of ``UNHIDDEN`` holds.
    """
    return max(computed_s, copied_s) + UNHIDDEN[place] * min(computed_s, copied_s)


def holds_block(ring_bytes: int, block_bytes: int, largest_bytes: int) -> bool:
    """Return whether the ring keeps a recomputed block's weights from its second run to its backward pass.

    Args:
        block_bytes: of the block's layers that pass through the ring.
        largest_bytes: of the largest layer that passes through it: the gap where the ring starts anew.
    """
    return block_bytes + largest_bytes <= ring_bytes


def ring_sizes(layers: Sequence[LayerFacts], least: int = 0) -> tuple[int, ...]:
    """Return the ring sizes worth having, ascending: two layers, a block and a layer, two blocks and a layer.

    Args:
        least: the smallest that will do.
    """
    largest = max((layer.num_bytes for layer in layers), default=0)
    least = max(2 * largest, least)
    by_block: Counter[str] = Counter()
    for layer in layers:
        if layer.block is not None:
            by_block[layer.block] += layer.num_bytes
    if not by_block:
        return (least,)
    block = max(by_block.values())
    return least, max(least, block + largest), max(least, 2 * block + largest)


def ring_for_parts(sizes: Sequence[int]) -> int:
    """Return the ring in which the weights of a feed-forward all find room, wherever some of them are already.

    ``n - 1`` weights leave ``n`` gaps, of which one is large enough if all gaps together are as large as ``n`` weights.
    """
    return sum(sizes) + (len(sizes) - 1) * max(sizes)


def ring_place(sizes: Sequence[int], ring_bytes: int) -> int:
    """Return the number of the largest of ``sizes`` that a ring of ``ring_bytes`` has."""
    return max((place for place, size in enumerate(sizes) if size <= ring_bytes), default=0)


def reads(layer: LayerFacts, is_recomputed: bool, is_held: bool, keep_convolutions: bool) -> int:
    """Return how often a pass copies a layer that is not resident."""
    again = is_recomputed and (layer.read_again or not keep_convolutions)
    if is_held:
        return 1 + (again or layer.read_backward)
    return 1 + again + layer.read_backward


def pass_order(facts: Facts, setting: Setting) -> list[str]:
    """Return the paths of the layers that are not resident in the order a pass reads them.

    Forward as in the facts; then from the last block to the first its second run and its backward pass, which goes
    through its layers the other way round. A feed-forward in parts counts as a whole one: it reads its layers part by
    part, but nothing else in between.
    """
    blocks = facts.steps[setting.micro_batch or facts.batch_size].blocks
    again = {block.path for block in blocks} - setting.kept
    streamed = [layer for layer in facts.layers if layer.path not in setting.resident]
    order = [layer.path for layer in streamed]
    stretches = [(block, list(layers)) for block, layers in groupby(streamed, key=lambda layer: layer.block)]
    for block, layers in reversed(stretches):
        if block in again:
            order += [x.path for x in layers if x.read_again or not setting.keep_convolutions]
        order += [x.path for x in reversed(layers) if x.read_backward]
    return order


def _copied_per_pass(facts: Facts, setting: Setting, again: set[str]) -> int:
    streamed = [layer for layer in facts.layers if layer.path not in setting.resident]
    largest = max((layer.num_bytes for layer in streamed), default=0)
    by_block: Counter[str | None] = Counter()
    for layer in streamed:
        by_block[layer.block] += layer.num_bytes
    return sum(
        layer.num_bytes
        * reads(
            layer,
            is_recomputed=layer.block in again,
            is_held=layer.block in again and holds_block(setting.ring_bytes, by_block[layer.block], largest),
            keep_convolutions=setting.keep_convolutions,
        )
        for layer in streamed
    )
