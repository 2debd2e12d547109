"""Changes that save memory and alter the trained numbers, from the least to the most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .facts import BlockFacts, Facts, StepFacts
from .wishes import Wishes

RESOLUTIONS = (0.75, 0.5)
BATCH_REASON = "the batch goes through the network in parts as small as one sample; a smaller one saves nothing more"


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is done to a job so that it fits. The first value of each means: nothing.

    Attributes:
        resolution: factor of width and height.
        rank: the new one, or 0. The strength ``alpha / rank`` stays: alpha shrinks with it.
        precision: the new one, or empty.
    """

    optimizer_dtype: torch.dtype = torch.float32
    adapter_dtype: torch.dtype = torch.float32
    resolution: float = 1.0
    rank: int = 0
    precision: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """Each change in a few words."""
        said = (
            (self.optimizer_dtype != torch.float32, "optimizer state in bf16"),
            (self.adapter_dtype != torch.float32, "adapters in bf16"),
            (self.resolution != 1, f"resolution times {self.resolution:g}"),
            (self.rank > 0, f"rank {self.rank} at the same alpha / rank"),
            (bool(self.precision), f"precision {self.precision}"),
        )
        return tuple(words for is_so, words in said if is_so)


# Returns the facts of the job at a change's resolution and precision, with the job's own rank; None where that can't be
# had. Only a new simulated step can tell them, so it is called for nothing else and as late as possible.
FactsFor = Callable[[Change], Facts | None]


def lossy_changes(facts: Facts, wishes: Wishes, facts_for: FactsFor | None) -> Iterator[tuple[Change, Facts]]:
    """Yield ever larger changes, each with all that came before it, and the facts of the job so changed."""
    change, base = Change(), facts
    for fields in _steps(wishes):
        wanted = replace(change, **fields)
        if (wanted.resolution, wanted.precision) != (change.resolution, change.precision):
            found = facts_for(wanted) if facts_for else None
            if found is None:
                continue
            base = found
        change = wanted
        yield change, at_rank(base, change.rank, wishes.rank) if change.rank else base


def _steps(wishes: Wishes) -> Iterator[dict[str, Any]]:
    yield {"optimizer_dtype": torch.bfloat16}
    yield {"adapter_dtype": torch.bfloat16}
    for factor in RESOLUTIONS:
        yield {"resolution": factor}
    rank = wishes.rank // 2
    while rank:
        yield {"rank": rank}
        rank //= 2
    if wishes.precision == "fp32":
        yield {"precision": "bf16"}


def at_rank(facts: Facts, rank: int, before: int) -> Facts:
    """Return ``facts`` at another rank. Adapters shrink in proportion; of activations, what shrinks is left out."""

    def scaled(num_bytes: int) -> int:
        return -(-num_bytes * rank // before)

    def block(old: BlockFacts) -> BlockFacts:
        in_parts = old.in_parts and block(old.in_parts)
        return replace(old, gradient_bytes=scaled(old.gradient_bytes), in_parts=in_parts)

    def step(old: StepFacts) -> StepFacts:
        return replace(old, blocks=tuple(map(block, old.blocks)))

    return replace(
        facts,
        steps={size: step(old) for size, old in facts.steps.items()},
        adapter_bytes=scaled(facts.adapter_bytes),
        update_bytes=scaled(facts.update_bytes),
    )
