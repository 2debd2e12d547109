from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lowvram_lora.memory.facts import Facts
from lowvram_lora.memory.ladder import next_rung
from lowvram_lora.memory.plan import Plan, make_plan
from lowvram_lora.memory.wishes import Wishes
from lowvram_lora.units import GIB
from tests.core.plan_jobs import ROOM, card, jobs, sdxl, smallest


def rungs(plan: Plan, budget: int) -> list[Plan]:
    """Return ``plan`` and every rung below it."""
    found: list[Plan] = []
    following: Plan | None = plan
    while following is not None:
        found.append(following)
        following = next_rung(following, Wishes(), card(budget))
    return found


@settings(deadline=None)
@given(jobs(), ROOM)
def test_each_rung_is_clearly_lower_and_the_ladder_ends(facts: Facts, room: int) -> None:
    budget = smallest(facts, Wishes()) + room
    plan = make_plan(facts, Wishes(), card(budget))
    peaks = [rung.peak_bytes for rung in rungs(plan, budget)]
    assert all(lower <= 0.92 * higher for higher, lower in pairwise(peaks))
    assert len(peaks) <= 200


@settings(deadline=None)
@given(jobs(), ROOM, st.floats(1.0, 2.0))
def test_a_rung_fits_even_if_it_is_exceeded_like_the_one_before(facts: Facts, room: int, factor: float) -> None:
    budget = smallest(facts, Wishes()) + room
    plan = make_plan(facts, Wishes(), card(budget))
    measured = int(plan.peak_bytes * factor)
    rung = next_rung(plan, Wishes(), card(budget), measured)
    if rung is not None:
        assert rung.peak_bytes * measured <= plan.budget * plan.peak_bytes
        assert rung.peak_bytes <= 0.92 * plan.peak_bytes


def test_a_rung_trains_the_same_numbers() -> None:
    wishes = Wishes(allow_lossy=True, rank=16)
    plan = make_plan(sdxl(), wishes, card(smallest(sdxl(), Wishes()) - 1))
    assert plan.change.words
    lower = next_rung(plan, wishes, card(plan.budget))
    assert lower is not None
    assert lower.change == plan.change
    assert lower.setting.optimizer_dtype == plan.setting.optimizer_dtype


def test_a_ladder_from_full_speed_ends_at_the_smallest_plan_there_is() -> None:
    ladder = rungs(make_plan(sdxl(4), Wishes(), card(40 * GIB)), 40 * GIB)
    assert ladder[0].num_recomputed == 0
    last = ladder[-1]
    assert last.setting.micro_batch in (1, 2)
    assert last.setting.inputs_in_ram
    assert last.footprint.need * 0.9 <= smallest(sdxl(4), Wishes())
    assert "memory ran out" in dict(last.refusals)["the plan before"]


def test_there_is_no_rung_where_nothing_was_planned() -> None:
    plan = make_plan(sdxl(), Wishes(), replace(card(0), available=None))
    assert next_rung(plan, Wishes(), card(0)) is None
