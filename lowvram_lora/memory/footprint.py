"""What a setting takes: device bytes by part at the worst moment of a step, and RAM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..units import MIB
from .facts import BlockFacts, Facts, StepFacts
from .setting import Setting

# What an allocator holds beyond live tensors. Workspaces of matrix products and convolutions, and the part of a 20 MiB
# or 2 MiB segment that stays empty, do not grow with the job; tensors that come and go leave gaps in proportion to
# themselves. What is allocated once and stays (weights, ring, adapters) leaves none.
MARGIN_BYTES = 64 * MIB
MARGIN_SHARE = 20
# Optimizer state that waits in RAM comes to the device in parts for so many parameters, or for one that has more. Large
# enough that copies are few.
CHUNK_ELEMENTS = 2**20


def margin(moving: int) -> int:
    """Return the bytes to leave free above the live ones, of which ``moving`` come and go within a step."""
    return MARGIN_BYTES + -(-moving // MARGIN_SHARE)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Device bytes at the moment of a step when most are live.

    Attributes:
        optimizer: the state, as far as it is on the device at that moment.
        activations: everything that lives for the step alone, but for gradients.
        phase: ``forward``, ``backward`` or ``optimizer``, or ``outside`` for forward and backward outside blocks.
        block: path of the block that runs then; empty outside blocks.
        ram: RAM bytes taken while the run lasts.
    """

    resident: int
    ring: int
    small: int
    adapters: int
    gradients: int
    optimizer: int
    activations: int
    margin: int
    phase: str
    block: str
    ram: int

    @property
    def peak(self) -> int:
        """Live bytes."""
        held = self.resident + self.ring + self.small + self.adapters
        return held + self.gradients + self.optimizer + self.activations

    @property
    def need(self) -> int:
        """Bytes that a budget must hold: live ones and the margin."""
        return self.peak + self.margin


@dataclass(frozen=True)
class Moment:
    """A point of a step that may be the worst: bytes beside what stays on the device."""

    phase: str
    block: str
    activations: int
    gradients: int
    optimizer: int

    @property
    def moving(self) -> int:
        """Bytes that come and go within a step."""
        return self.activations + self.gradients + self.optimizer


def footprint(facts: Facts, setting: Setting) -> Footprint:
    """Return what ``setting`` takes."""
    worst = max(_moments(facts, setting), key=lambda moment: moment.moving)
    state = state_bytes(facts, setting.optimizer_dtype)
    staying = 0 if setting.optimizer_in_ram else state
    inputs = sum(b.input_bytes for b in step_facts(facts, setting).blocks if b.path not in setting.kept)
    return Footprint(
        resident=sum(layer.num_bytes for layer in facts.layers if layer.path in setting.resident),
        ring=setting.ring_bytes,
        small=facts.small_bytes,
        adapters=parameter_bytes(facts, setting.adapter_dtype),
        gradients=worst.gradients,
        optimizer=worst.optimizer + staying,
        activations=worst.activations,
        margin=margin(worst.moving),
        phase=worst.phase,
        block=worst.block,
        ram=setting.staging_bytes + (inputs if setting.inputs_in_ram else 0) + (state - staying),
    )


def step_facts(facts: Facts, setting: Setting) -> StepFacts:
    """Return the facts of the micro-batch that ``setting`` runs, each block as it runs there."""
    step = facts.steps[setting.micro_batch or facts.batch_size]
    if not setting.chunked:
        return step
    blocks = tuple(b.in_parts if b.in_parts and b.path in setting.chunked else b for b in step.blocks)
    return replace(step, blocks=blocks)


def num_passes(facts: Facts, micro_batch: int) -> int:
    """Return how often a step goes through the network at ``micro_batch`` samples at once."""
    return facts.passes * -(-facts.batch_size // (micro_batch or facts.batch_size))


def parameter_bytes(facts: Facts, adapter_dtype: torch.dtype) -> int:
    """Return the bytes of the trained parameters; their gradients take as much."""
    return _at(facts.adapter_bytes, adapter_dtype)


def state_bytes(facts: Facts, optimizer_dtype: torch.dtype) -> int:
    """Return the bytes of AdamW's two moments."""
    return 2 * _at(facts.adapter_bytes, optimizer_dtype)


def visiting_bytes(facts: Facts, optimizer_dtype: torch.dtype) -> int:
    """Return the bytes of a state that waits in RAM which are on the device at one time of the update."""
    return min(state_bytes(facts, optimizer_dtype), 2 * CHUNK_ELEMENTS * optimizer_dtype.itemsize)


def update_bytes(facts: Facts, adapter_dtype: torch.dtype, optimizer_dtype: torch.dtype) -> int:
    """Return what the update holds for a moment beside parameters, gradients and state.

    Rounding to bfloat16 works in float32: four numbers for each element of a part.
    """
    num_bytes = _at(facts.update_bytes, adapter_dtype)
    if torch.bfloat16 in (adapter_dtype, optimizer_dtype):
        num_bytes += 4 * min(facts.adapter_bytes, 4 * CHUNK_ELEMENTS)
    return num_bytes


def _at(float32_bytes: int, dtype: torch.dtype) -> int:
    return -(-float32_bytes * dtype.itemsize // 4)


def place_peaks(step: StepFacts) -> Sequence[int]:
    """Return the most live bytes outside blocks, by the number of blocks that hold something for the backward pass."""
    return step.between_peaks or (step.other_peak,) * (len(step.blocks) + 1)


def place_gradients(facts: Facts, step: StepFacts, several: bool, adapter_dtype: torch.dtype) -> tuple[list[int], int]:
    """Return the gradients that live outside blocks, by place as in ``place_peaks``, and those in a forward pass.

    In the only pass of a step they appear as the backward pass goes; from the second on all are there.
    """
    every = parameter_bytes(facts, adapter_dtype)
    if several:
        return [every] * (len(step.blocks) + 1), every
    return [every, *(_at(block.gradient_bytes, adapter_dtype) for block in step.blocks)], 0


def held(block: BlockFacts, is_kept: bool, keep_convolutions: bool, inputs_in_ram: bool) -> int:
    """Return what ``block`` holds from forward to backward, beyond what a recomputed one does in the facts."""
    if is_kept:
        return max(block.activation_bytes - block.convolution_bytes, 0)
    convolutions = 0 if keep_convolutions else block.convolution_bytes
    return -convolutions - (block.input_bytes if inputs_in_ram else 0)


def _moments(facts: Facts, setting: Setting) -> Iterator[Moment]:
    step = step_facts(facts, setting)
    several = num_passes(facts, setting.micro_batch) > 1
    by_place, in_forward = place_gradients(facts, step, several, setting.adapter_dtype)
    around, shift = place_peaks(step), 0
    for index, block in enumerate(step.blocks):
        is_kept = block.path in setting.kept
        own = block.activation_bytes if is_kept else 0
        yield Moment("outside", "", around[index] + shift, by_place[index], 0)
        yield Moment("forward", block.path, block.forward_peak + shift + own, in_forward, 0)
        yield Moment("backward", block.path, block.backward_peak + shift, by_place[index + 1], 0)
        shift += held(block, is_kept, setting.keep_convolutions, setting.inputs_in_ram)
    yield Moment("outside", "", around[-1] + shift, by_place[-1], 0)
    state = visiting_bytes(facts, setting.optimizer_dtype) if setting.optimizer_in_ram else 0
    gradients = parameter_bytes(facts, setting.adapter_dtype)
    update = update_bytes(facts, setting.adapter_dtype, setting.optimizer_dtype)
    yield Moment("optimizer", "", update, gradients, state)
