"""How many samples of each latent shape make a batch: the most that fit the budget and cost no sample any time.

One shape leads: the one whose batch of the base size is largest. Its batch grows as long as it goes through the
network at once and the plan for it takes no longer over a sample than the plan for the base size. The run then goes in
that plan's setting, and of each other shape a batch holds as many samples as fit the budget in that setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .between import Corners
from .facts import Facts
from .footprint import footprint
from .lossy import Change
from .pace import pace
from .refusal import changed_space
from .setting import Setting
from .wishes import DeviceFacts, Wishes, ceiling

Shape = tuple[int, ...]
# What two ways to reckon the same seconds may differ by.
_EQUAL = 1 + 1e-9


@dataclass(frozen=True)
class _Way:
    """The fastest way to take a whole batch through the network at once."""

    setting: Setting
    seconds_per_sample: float


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """The memory model of one job.

    Attributes:
        corners: of the job; its smallest and largest batch are ``base`` and ``most`` samples.
        counts: latent shapes, and how many samples of each could meet in a batch.
    """

    corners: Corners
    counts: Mapping[Shape, int]
    base: int
    most: int
    wishes: Wishes
    device: DeviceFacts

    def sizes(self) -> dict[Shape, int]:
        """Return the samples of a batch of each shape, ``base`` to ``most``.

        All are ``base`` where not even so many of the leading shape fit at once: the plan then takes batches in parts.
        """
        budget, leading = ceiling(self.wishes, self.device), self.leading
        least = self._way(leading, self.base)
        if budget is None or least is None:
            return dict.fromkeys(self.counts, self.base)
        allowed = least.seconds_per_sample * _EQUAL

        def costs_nothing(batch_size: int) -> bool:
            way = self._way(leading, batch_size)
            return way is not None and way.seconds_per_sample <= allowed

        # More than there are would only take memory from the others.
        found = _largest(costs_nothing, self.base, min(self.most, max(self.base, self.counts[leading])))
        way = self._way(leading, found)
        assert way is not None
        setting = way.setting

        def size_of(shape: Shape) -> int:
            return _largest(lambda size: self._fits(self.facts(shape, size), setting, budget), self.base, self.most)

        return {shape: found if shape == leading else size_of(shape) for shape in self.counts}

    @property
    def leading(self) -> Shape:
        """The shape of which a batch of the base size, or of as many as there are, holds most."""
        return max(self.counts, key=lambda s: (min(self.base, self.counts[s]) * positions(s), positions(s), s))

    def facts(self, shape: Shape, batch_size: int) -> Facts:
        """Return what a plan for a batch of one shape is made from."""
        return self.corners.at(positions(shape), batch_size)

    def _way(self, shape: Shape, batch_size: int) -> _Way | None:
        budget, facts = ceiling(self.wishes, self.device), self.facts(shape, batch_size)
        space = changed_space(facts, Change(), self.wishes, self.device)
        setting = None if budget is None else space.best(budget, self.device.ram)
        if setting is None:
            return None
        return _Way(setting, pace(facts, setting, self.device.rates).seconds / batch_size)

    def _fits(self, facts: Facts, setting: Setting, budget: int) -> bool:
        taken = footprint(facts, setting)
        return taken.need <= budget and taken.ram <= self.device.ram


def positions(shape: Shape) -> int:
    """Return the places of latents of ``shape``, channels first."""
    return math.prod(shape[1:])


def _largest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return a number from ``low`` to ``high`` for which ``holds``, taken to hold for ``low``.

    It is the largest where ``holds`` ends once and does not begin again.
    """
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
