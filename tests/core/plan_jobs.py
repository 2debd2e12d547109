"""Jobs to plan: facts as a simulated step gives them, made up."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import strategies as st

from lowvram_lora.errors import BudgetError
from lowvram_lora.memory.facts import BlockFacts, Facts, LayerFacts, StepFacts, aligned
from lowvram_lora.memory.plan import make_plan
from lowvram_lora.memory.wishes import DeviceFacts, Wishes
from lowvram_lora.units import GIB, MIB

LOTS = 1 << 50
SDXL_LEVELS = (0,) * 9 + (1,) * 12 + (2,) * 28 + (1,) * 12 + (0,) * 9


def smallest(facts: Facts, wishes: Wishes, ram: int = LOTS) -> int:
    """Return the smallest budget the job fits in, as its refusal states it."""
    with pytest.raises(BudgetError) as refused:
        make_plan(facts, wishes, card(0, ram))
    assert refused.value.needed is not None
    return refused.value.needed


def card(available: int, ram: int = LOTS, **options: Any) -> DeviceFacts:
    """Return a device with this many bytes to train in."""
    return DeviceFacts(available=available, ram=ram, **options)


def block(
    name: str,
    before: int,
    work: int,
    activations: int,
    inputs: int = 0,
    convolutions: int = 0,
    gradients: int = 0,
    flops: int = 0,
    writes_in_place: bool = False,
    saves: float = 0.0,
) -> BlockFacts:
    """Return a block that runs while ``before`` bytes of earlier blocks live, in ``work`` bytes of its own.

    Args:
        saves: the part of its activations that go when its feed-forward runs in parts, which is a third of its work.
    """
    whole = BlockFacts(
        path=name,
        flops=flops,
        forward_peak=before + work,
        backward_peak=before + work + activations,
        activation_bytes=activations,
        input_bytes=inputs,
        convolution_bytes=convolutions,
        gradient_bytes=gradients,
        writes_in_place=writes_in_place,
        convolution_flops=flops // 3 if convolutions else 0,
        backward_flops=flops,
    )
    if not saves:
        return whole
    rest = activations - int(activations * saves)
    in_parts = replace(
        whole,
        forward_peak=before + work - int(work * saves / 2),
        backward_peak=before + work + rest,
        activation_bytes=rest,
        backward_flops=flops + flops // 3,
    )
    return replace(whole, in_parts=in_parts)


def sdxl(batch_size: int = 1, passes: int = 1, levels: Sequence[int] = SDXL_LEVELS) -> Facts:
    """Return a job of SDXL's proportions at 1024²: 70 blocks, 1680 layers, 4.8 GiB of weights, rank 16.

    Args:
        levels: how often the picture was halved, by block.
    """
    layers = [
        LayerFacts(f"block{i}.layer{j}", f"block{i}", aligned(int((0.3, 0.8, 3.0)[level] * (1 + j % 5 / 2) * MIB)))
        for i, level in enumerate(levels)
        for j in range(23)
    ]
    layers += [LayerFacts(f"outside{j}", None, 2 * MIB) for j in range(70)]
    adapters = 160 * MIB
    sizes = [size for size in (1, 2, 4, 8) if size <= batch_size]
    return Facts(
        layers=tuple(layers),
        batch_size=batch_size,
        passes=passes,
        steps={size: _sdxl_step(levels, size, adapters) for size in sizes},
        small_bytes=6 * MIB,
        adapter_bytes=adapters,
        parts_ring_bytes=16 * MIB,
    )


def _sdxl_step(levels: Sequence[int], size: int, adapters: int) -> StepFacts:
    inputs = [int((5.0, 2.5, 1.25)[level] * size * MIB) for level in levels]
    convolutions = [int(value // 2) if i % 3 == 0 else 0 for i, value in enumerate(inputs)]
    before = list(accumulate((a + b for a, b in zip(inputs, convolutions, strict=True)), initial=0))
    blocks = tuple(
        block(
            f"block{i}",
            before[i],
            work=int((30, 20, 10)[level] * size * MIB),
            activations=int((120, 90, 60)[level] * size * MIB),
            inputs=inputs[i],
            convolutions=convolutions[i],
            gradients=adapters * (len(levels) - i) // len(levels),
            flops=int((60, 75, 95)[level] * size * 1e9),
            saves=(0.0, 0.4, 0.0 if size == 1 else 0.4)[level],
        )
        for i, level in enumerate(levels)
    )
    around = tuple(value + 40 * size * MIB for value in before)
    return StepFacts(blocks=blocks, other_peak=max(around), other_flops=int(2e11 * size), between_peaks=around)


@st.composite
def jobs(draw: st.DrawFn) -> Facts:
    """Draw a small job of any shape."""
    num_blocks = draw(st.integers(0, 5))
    size = st.integers(0, 400 * MIB)
    names = [None, *(f"b{i}" for i in range(num_blocks))]
    layers = tuple(
        LayerFacts(f"l{i}", draw(st.sampled_from(names)), aligned(draw(st.integers(1, 300 * MIB))), *draw(_READS))
        for i in range(draw(st.integers(0, 9)))
    )
    adapters = draw(st.integers(4, 200 * MIB))
    batch_size = draw(st.sampled_from([1, 2, 3]))
    one = [
        (*(draw(size) for _ in range(4)), draw(st.integers(0, 10**13)), draw(st.booleans()), draw(_SAVES))
        for _ in range(num_blocks)
    ]
    around, flops, is_measured = draw(size), draw(st.integers(0, 10**12)), draw(st.booleans())

    def step(samples: int) -> StepFacts:
        blocks, before = [], 0
        befores = [0]
        for i, (work, activations, inputs, convolutions, work_flops, in_place, saves) in enumerate(one):
            held = 0 if in_place else convolutions * samples
            args = (work * samples, activations * samples, inputs * samples, held, adapters * (num_blocks - i) // 6)
            more = {"flops": work_flops * samples, "writes_in_place": in_place, "saves": saves}
            blocks.append(block(f"b{i}", before, *args, **more))
            before += inputs * samples + held
            befores.append(before)
        places = tuple(value + around * samples for value in befores) if is_measured else ()
        return StepFacts(
            blocks=tuple(blocks),
            other_peak=before + around * samples,
            other_flops=flops * samples,
            between_peaks=places,
        )

    return Facts(
        layers=layers,
        batch_size=batch_size,
        passes=draw(st.integers(1, 2)),
        steps={samples: step(samples) for samples in {1, batch_size}},
        small_bytes=draw(st.integers(0, 10 * MIB)),
        adapter_bytes=adapters,
        update_bytes=draw(st.sampled_from([0, adapters])),
        parts_ring_bytes=draw(st.integers(0, 900 * MIB)),
    )


_SAVES = st.sampled_from([0.0, 0.3, 0.8])
_READS = st.tuples(st.booleans(), st.booleans())
# Bytes above the fewest a job can run in.
ROOM = st.integers(0, 6 * GIB)
