"""The batch sizes of a run with ``adaptive_batch``: simulated steps ask the plan's memory model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..data.batches import BatchRecipe
from ..data.draw import Batch
from ..data.tokens import MOST_TIMES_BASE
from ..memory.between import Corners
from ..memory.facts import Facts
from ..memory.fitting import Fitting, Shape, positions
from ..memory.footprint import footprint
from ..memory.setting import Setting
from ..memory.wishes import DeviceFacts, Wishes
from .estimate import Simulator, measured


@dataclass(frozen=True, kw_only=True)
class Sized:
    """What was decided.

    Attributes:
        recipe: with its sizes.
        full: facts of a full batch of each latent shape that there are enough samples of.
        writes_in_place: by block.
    """

    recipe: BatchRecipe
    full: dict[Shape, Facts]
    writes_in_place: dict[str, bool]

    def excess(self, planned: Facts, shape: Shape, setting: Setting) -> int:
        """Return by how many bytes a full batch of another shape exceeds the one that was planned for.

        Args:
            planned: facts of that one.
            shape: its latent shape.
        """
        if setting.micro_batch:
            # No part of another batch is larger: see ``Planner.largest``.
            return 0
        # How much feed-forwards in parts save is known of the planned batch alone.
        plain = replace(setting, chunked=frozenset())
        most = max((footprint(facts, plain).peak for other, facts in self.full.items() if other != shape), default=0)
        return max(most - footprint(planned, plain).peak, 0)


def decide(
    recipe: BatchRecipe, simulator_for: Callable[[Batch], Simulator], passes: int, wishes: Wishes, device: DeviceFacts
) -> Sized:
    """Return ``recipe`` with as many samples of each latent shape to a batch as ``memory.fitting`` says.

    At most five steps are simulated: the smallest and the largest pictures, in batches of the base size and of the
    largest that is allowed, and one to learn which blocks write in place.

    Args:
        simulator_for: of a batch of one latent shape.
        passes: batches that make a step.
    """
    members, base = recipe.members(), recipe.config.batch_size
    sizes = base, MOST_TIMES_BASE * base
    learned: dict[str, bool] = {}
    corners: dict[tuple[int, int], Facts] = {}
    for shape in (min(members, key=positions), max(members, key=positions)):
        for size in sizes:
            if (positions(shape), size) not in corners:
                one = {size: simulator_for((members[shape].draw,) * size)}
                corners[positions(shape), size], learned = measured(one, passes, lambda _: False, learned)
    fitting = Fitting(
        corners=Corners(corners),
        counts={shape: member.count for shape, member in members.items()},
        base=base,
        most=sizes[1],
        wishes=wishes,
        device=device,
    )
    found = fitting.sizes()
    full = {
        shape: fitting.facts(shape, min(size, members[shape].count))
        for shape, size in found.items()
        if members[shape].count >= base
    }
    return Sized(
        recipe=BatchRecipe(recipe.cache, recipe.config, tuple(sorted(found.items()))),
        full=full,
        writes_in_place=learned,
    )
