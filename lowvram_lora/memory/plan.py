"""The fastest way to train inside a budget: facts and wishes in, a plan out, or a refusal that says why.

Everything here is arithmetic on facts. Lossless techniques come first, all combinations of them; changes of the trained
numbers only where none fits and the user allows them, the smallest first. Among plans without such a change a larger
budget never gives a slower one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .facts import Facts
from .footprint import Footprint, footprint, step_facts
from .lossy import Change, FactsFor, lossy_changes
from .pace import Pace, pace
from .refusal import Refusal, budget_error, card_error, changed_space, faster_refused, ram_refused
from .search import Space
from .setting import Setting
from .wishes import DeviceFacts, Wishes, ceiling


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a run goes, what that takes and what it costs.

    Attributes:
        facts: of the job that runs: with ``change`` done to it.
        budget: bytes that the footprint fits into, margin included; None where there is no device to plan.
        reserve: free device bytes that are left to the host, outside the budget.
        change: what alters the trained numbers.
        refusals: what would be faster, each with the reason why it is not used.
    """

    setting: Setting
    facts: Facts
    footprint: Footprint
    pace: Pace
    budget: int | None
    reserve: int = 0
    change: Change = field(default_factory=Change)
    refusals: tuple[Refusal, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Live device bytes at the worst moment, without the margin."""
        return self.footprint.peak

    @property
    def num_resident(self) -> int:
        """Layers whose weights stay on the device."""
        return len(self.setting.resident)

    @property
    def num_recomputed(self) -> int:
        """Blocks that run again in the backward pass."""
        return len(step_facts(self.facts, self.setting).blocks) - len(self.setting.kept)


def make_plan(facts: Facts, wishes: Wishes, device: DeviceFacts, facts_for: FactsFor | None = None) -> Plan:
    """Return the fastest plan that fits.

    Args:
        facts_for: simulates a changed job; without it resolution and precision are not offered.

    Raises:
        BudgetError: the budget is larger than the card, or smaller than anything possible.
    """
    error = card_error(wishes, device)
    if error is not None:
        raise error
    budget = ceiling(wishes, device)
    if budget is None:
        return _unplanned(facts, wishes, device)
    lossless = changed_space(facts, Change(), wishes, device)
    plan = fastest(lossless, Change(), device, budget)
    tried: list[tuple[Change, Space]] = []
    if plan is None and wishes.allow_lossy:
        for change, changed in lossy_changes(facts, wishes, facts_for):
            space = changed_space(changed, change, wishes, device)
            plan = fastest(space, change, device, budget)
            if plan is not None:
                break
            tried.append((change, space))
    if plan is None:
        raise budget_error(lossless, tried, wishes, device, facts_for)
    return plan


def runs_freely(facts: Facts, wishes: Wishes, device: DeviceFacts) -> bool:
    """Return whether the job fits without any technique: no facts of one would make its plan faster."""
    budget = ceiling(wishes, device)
    setting = _without_limit(facts)
    return budget is None or footprint(facts, setting).need <= budget


def fastest(space: Space, change: Change, device: DeviceFacts, budget: int, peak: int | None = None) -> Plan | None:
    """Return the fastest plan in ``space`` that fits, or None.

    Args:
        peak: live bytes it must stay at or below.
    """
    setting = space.best(budget, device.ram, peak)
    if setting is None:
        return None
    refused = faster_refused(space.facts, setting, device, budget)
    return Plan(
        setting=setting,
        facts=space.facts,
        footprint=footprint(space.facts, setting),
        pace=pace(space.facts, setting, device.rates),
        budget=budget,
        reserve=device.reserve,
        change=change,
        refusals=refused + ram_refused(space, setting, device, budget, peak),
    )


def _unplanned(facts: Facts, wishes: Wishes, device: DeviceFacts) -> Plan:
    """Return the plan of a host that computes where the weights are: nothing is copied, nothing is limited."""
    setting = _without_limit(facts)
    if wishes.recompute:
        setting = replace(setting, kept=frozenset())
    reason = "this host computes in RAM: there is no device memory to plan, and the budget is ignored"
    return Plan(
        setting=setting,
        facts=facts,
        footprint=footprint(facts, setting),
        pace=pace(facts, setting, device.rates),
        budget=None,
        refusals=(("vram_budget_gb", reason),),
    )


def _without_limit(facts: Facts) -> Setting:
    blocks = facts.steps[facts.batch_size].blocks
    return Setting(
        resident=frozenset(layer.path for layer in facts.layers),
        kept=frozenset(block.path for block in blocks if not block.writes_in_place),
    )
