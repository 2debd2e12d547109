"""Why a plan does not use what would be faster, and what to do where nothing fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..errors import BudgetError
from ..units import GIB, format_bytes
from .facts import Facts
from .footprint import footprint, step_facts
from .lossy import BATCH_REASON, Change, FactsFor, lossy_changes
from .pace import pace, ring_place, ring_sizes
from .search import Space
from .setting import Setting
from .wishes import DeviceFacts, Wishes, ceiling, exceeds_card

Refusal = tuple[str, str]
# Steps of the widget.
GB_STEP = 0.05
_NO_LIMIT = 1 << 62
_IN_RAM = "inputs of blocks or optimizer state in RAM"


def faster_refused(facts: Facts, setting: Setting, device: DeviceFacts, budget: int) -> tuple[Refusal, ...]:
    """Return each technique that would make ``setting`` faster, alone, with the reason why it is not used."""
    seconds = pace(facts, setting, device.rates).seconds
    refused = []
    for technique, other in _alternatives(facts, setting):
        if pace(facts, other, device.rates).seconds < seconds:
            need = footprint(facts, other).need
            if need > budget:
                more = format_bytes(need - budget)
                refused.append((technique, f"needs {format_bytes(need)}, {more} more than the budget"))
    in_place = sum(block.writes_in_place for block in step_facts(facts, setting).blocks)
    if in_place:
        reason = f"not possible for {in_place} blocks, which write over their inputs"
        refused.append(("keep activations", reason))
    return tuple(refused)


def _alternatives(facts: Facts, setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Yield ``setting`` with one technique turned round, for each that saves memory and costs time."""
    everything = frozenset(layer.path for layer in facts.layers)
    if setting.resident != everything:
        yield "all weights resident", replace(setting, resident=everything, ring_bytes=0, staging_bytes=0)
        rings = ring_sizes(facts.layers, facts.parts_ring_bytes if setting.chunked else 0)
        place = ring_place(rings, setting.ring_bytes)
        if place == 0 and len(rings) > 1:
            yield "buffers for a whole block", replace(setting, ring_bytes=rings[1])
    blocks = step_facts(facts, setting).blocks
    keepable = frozenset(block.path for block in blocks if not block.writes_in_place)
    if setting.kept != keepable:
        yield "keep all activations", replace(setting, kept=keepable)
    if setting.chunked:
        yield "feed-forwards as a whole", replace(setting, chunked=frozenset())
    if setting.micro_batch:
        yield "the whole batch at once", replace(setting, micro_batch=0)
    if not setting.keep_convolutions:
        yield "keep convolutions", replace(setting, keep_convolutions=True)
    if setting.inputs_in_ram:
        yield "inputs of blocks on the device", replace(setting, inputs_in_ram=False)
    if setting.optimizer_in_ram:
        yield "optimizer state on the device", replace(setting, optimizer_in_ram=False)


def ram_refused(
    space: Space, setting: Setting, device: DeviceFacts, budget: int, peak: int | None
) -> tuple[Refusal, ...]:
    """Return what more RAM would allow in the same ``budget`` and ``peak``."""
    refused = []
    free = format_bytes(device.ram)
    best = space.best(budget, _NO_LIMIT, peak)
    if best is not None:
        faster = pace(space.facts, best, device.rates).seconds < pace(space.facts, setting, device.rates).seconds
        if faster:
            ram = format_bytes(footprint(space.facts, best).ram)
            refused.append((_IN_RAM, f"needs {ram} of RAM, {free} are available"))
    if setting.ring_bytes and not setting.staging_bytes:
        refused.append(("page-locked staging", f"{free} of RAM are available: copies start where the weights are"))
    return tuple(refused)


def card_error(wishes: Wishes, device: DeviceFacts) -> BudgetError | None:
    """Return the refusal of a budget that is larger than the card, or None."""
    if not exceeds_card(wishes, device) or device.total is None:
        return None
    total = device.total / GIB
    return BudgetError(
        f"vram_budget_gb is {wishes.vram_budget_gb:g}, but the card has {total:.2f} GiB.",
        f"Set vram_budget_gb to {math.floor(total / GB_STEP) * GB_STEP:g} or less, or to 0 for what is free.",
        budget=int(wishes.vram_budget_gb * GIB),
        needed=None,
    )


def budget_error(
    lossless: Space,
    tried: Sequence[tuple[Change, Space]],
    wishes: Wishes,
    device: DeviceFacts,
    facts_for: FactsFor | None,
) -> BudgetError:
    """Return why nothing fits, the smallest budget that would do, and the smallest change that would fit.

    Args:
        lossless: the job as it was asked for.
        tried: the changed jobs that did not fit either, smallest change first.
    """
    budget = ceiling(wishes, device) or 0
    needed = min(space.smallest(device.ram) for space in (lossless, *(space for _, space in tried)))
    refused = [*_recompute_refused(lossless, wishes, device), *_ram_needed(lossless, device)]
    if tried:
        refused.append(("larger changes", f"even with {_listed(tried[-1][0])}, {format_bytes(needed)} are needed"))
    else:
        refused.append(("lossy changes", _offer(lossless.facts, wishes, device, facts_for, budget)))
    refused.append(("smaller batch", BATCH_REASON))
    problem, remedy = _sentences(wishes, device, needed)
    return BudgetError(problem, remedy, budget=budget, needed=needed, refusals=refused)


def _recompute_refused(lossless: Space, wishes: Wishes, device: DeviceFacts) -> Iterator[Refusal]:
    technique = "recompute of blocks"
    if not any(step.blocks for step in lossless.facts.steps.values()):
        yield technique, "no repeated blocks were recognised in this model"
    elif not wishes.recompute:
        with_it = Space(lossless.facts, device.rates).smallest(device.ram)
        yield technique, f"recompute is off; on, {format_bytes(with_it)} would be enough"


def _ram_needed(lossless: Space, device: DeviceFacts) -> Iterator[Refusal]:
    with_more = lossless.smallest(_NO_LIMIT)
    if with_more < lossless.smallest(device.ram):
        free, enough = format_bytes(device.ram), format_bytes(with_more)
        yield _IN_RAM, f"{free} of RAM are available; with more, {enough} on the device would be enough"


def _offer(facts: Facts, wishes: Wishes, device: DeviceFacts, facts_for: FactsFor | None, budget: int) -> str:
    """Return the smallest change that would fit, in words."""
    last = ""
    for change, changed in lossy_changes(facts, wishes, facts_for):
        need = changed_space(changed, change, wishes, device).smallest(device.ram)
        last = f"{_listed(change)} would fit in {format_bytes(need)}"
        if need <= budget:
            return f"allow_lossy is off; with it on, {last}"
    return f"allow_lossy is off; even with it on, this is too little: {last}"


def changed_space(facts: Facts, change: Change, wishes: Wishes, device: DeviceFacts) -> Space:
    """Return the ways to run the job that ``change`` makes of it."""
    return Space(facts, device.rates, wishes.recompute, change.adapter_dtype, change.optimizer_dtype)


def _listed(change: Change) -> str:
    return ", ".join(change.words)


def _sentences(wishes: Wishes, device: DeviceFacts, needed: int) -> tuple[str, str]:
    """Return what is wrong and what to do."""
    available = device.available or 0
    asked = wishes.vram_budget_gb
    least = math.ceil(needed / GIB / GB_STEP) * GB_STEP
    smallest = f"the smallest budget in which this job fits is {least:.2f} GiB"
    if asked and asked * GIB <= available:
        problem = f"vram_budget_gb is {asked:g}; {smallest}."
    else:
        wanted = f", less than vram_budget_gb = {asked:g}" if asked else ""
        problem = f"{format_bytes(available)} of device memory can be had for training{wanted}; {smallest}."
    if needed <= available:
        return problem, f"Set vram_budget_gb to {least:.2f} or more."
    if device.total is None or needed <= device.total - device.reserve:
        missing = format_bytes(needed - available)
        also = f" and set vram_budget_gb to {least:.2f} or more" if asked and asked < least else ""
        return problem, f"Free {missing} more: close what else uses the card{also}."
    return problem, "This card is too small for the job. Choose a lower resolution, fewer targets or a smaller model."
