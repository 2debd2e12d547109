"""Facts of a batch that was not simulated, from four that were.

Whatever lives at a moment of a step is a sum: some of it is there once, some for each sample, some for each position of
each sample. A peak is the largest of such sums. It is convex in the number of samples, and in the number of positions:
between two simulated numbers it is nowhere above the straight line. That holds for sides that a network halves evenly,
as all buckets' sides are with the usual step of 64 pixels; where it rounds odd ones up, up to a tenth too little was
seen on a tiny network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from .facts import BlockFacts, Facts, StepFacts

# What a block does not hold in some settings: the less of it, the more is reckoned with.
_TAKEN_OFF = ("input_bytes", "convolution_bytes")
_BLOCK = (
    "flops",
    "forward_peak",
    "backward_peak",
    "activation_bytes",
    *_TAKEN_OFF,
    "gradient_bytes",
    "convolution_flops",
    "backward_flops",
)


@dataclass(frozen=True)
class Corners:
    """Facts of whole batches of two sizes, of pictures of two sizes.

    Attributes:
        facts: by positions of a picture's latents and samples of the batch; each pair of one and the other is there.
            Every one has the step of its own batch size.
    """

    facts: Mapping[tuple[int, int], Facts]

    def at(self, positions: int, batch_size: int) -> Facts:
        """Return facts of a batch of ``batch_size`` samples that go through the network at once.

        Numbers outside the simulated ones are brought to the nearest of these. Feed-forwards in parts are not known.
        """
        every_positions = sorted({positions for positions, _ in self.facts})
        every_batch = sorted({batch for _, batch in self.facts})
        small, large = (
            self._between_batches(each, every_batch, batch_size) for each in (every_positions[0], every_positions[-1])
        )
        step = _step(small, large, _share(every_positions, positions))
        known = self.facts[every_positions[-1], every_batch[-1]]
        return replace(known, batch_size=batch_size, steps={batch_size: step}, parts_ring_bytes=0)

    def _between_batches(self, positions: int, every: list[int], batch_size: int) -> StepFacts:
        low, high = (self.facts[positions, size].steps[size] for size in (every[0], every[-1]))
        return _step(low, high, _share(every, batch_size))


def _share(simulated: list[int], wanted: int) -> Fraction:
    """Return how far ``wanted`` is on the way from the first to the last of ``simulated``, 0 to 1."""
    low, high = simulated[0], simulated[-1]
    return min(max(Fraction(wanted - low, high - low), Fraction(0)), Fraction(1)) if high > low else Fraction(1)


def _step(low: StepFacts, high: StepFacts, share: Fraction) -> StepFacts:
    if [block.path for block in low.blocks] != [block.path for block in high.blocks]:
        # Another way through the network: the larger one stands for both.
        return high

    def mixed(one: int, other: int) -> int:
        return _mixed(one, other, share)

    return StepFacts(
        blocks=tuple(_block(*pair, share) for pair in zip(low.blocks, high.blocks, strict=True)),
        other_peak=mixed(low.other_peak, high.other_peak),
        other_flops=mixed(low.other_flops, high.other_flops),
        between_peaks=tuple(map(mixed, low.between_peaks, high.between_peaks)),
    )


def _block(low: BlockFacts, high: BlockFacts, share: Fraction) -> BlockFacts:
    pairs = {name: (getattr(low, name), getattr(high, name)) for name in _BLOCK}
    numbers: dict[str, Any] = {
        # What is too small to wait in RAM is none, and from where on it does so is not known.
        name: 0 if name in _TAKEN_OFF and not min(pair) else _mixed(*pair, share, up=name not in _TAKEN_OFF)
        for name, pair in pairs.items()
    }
    return replace(high, **numbers, in_parts=None)


def _mixed(low: int, high: int, share: Fraction, up: bool = True) -> int:
    """Return the whole number next to ``share`` of the way from ``low`` to ``high``."""
    exact = low + (high - low) * share
    return -(-exact.numerator // exact.denominator) if up else exact.numerator // exact.denominator
