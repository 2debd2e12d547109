from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowvram_lora.errors import BudgetError, LowVramLoraError
from lowvram_lora.memory.facts import Facts, LayerFacts, StepFacts
from lowvram_lora.memory.footprint import footprint
from lowvram_lora.memory.lossy import Change
from lowvram_lora.memory.pace import Rates, pace, pass_order, ring_sizes
from lowvram_lora.memory.plan import Plan, make_plan
from lowvram_lora.memory.setting import Setting
from lowvram_lora.memory.table import describe_plan, plan_row, refused_row
from lowvram_lora.memory.wishes import Wishes
from lowvram_lora.units import GIB, MIB
from tests.core.plan_jobs import LOTS, ROOM, block, card, jobs, sdxl, smallest

RAMS = st.sampled_from([0, 100 * MIB, LOTS])
RECOMPUTE = st.booleans()


def planned(facts: Facts, room: int, wishes: Wishes, ram: int = LOTS) -> Plan:
    """Return the plan for ``room`` bytes more than the job needs at least."""
    return make_plan(facts, wishes, card(smallest(facts, wishes, ram) + room, ram))


def two_blocks(**changes: object) -> Facts:
    """Return a job small enough to reckon by hand, in bytes."""
    first = block("a", 0, work=1000, activations=5000, inputs=100, convolutions=30, gradients=80, flops=600)
    second = block("b", 130, work=2000, activations=4500, inputs=200, convolutions=0, gradients=50, flops=900)
    step = StepFacts(blocks=(first, second), other_peak=400, other_flops=100, between_peaks=(300, 400, 350))
    layers = (
        LayerFacts("in", None, 256, True, False),
        LayerFacts("a.conv", "a", 512, False, True),
        LayerFacts("a.linear", "a", 512),
        LayerFacts("b.linear", "b", 1024),
    )
    base = {"layers": layers, "batch_size": 1, "passes": 1, "steps": {1: step}, "small_bytes": 7, "adapter_bytes": 80}
    return Facts(**{**base, **changes})


# What a setting takes and costs, reckoned by hand.


def test_the_peak_of_a_recomputed_step_is_the_worst_blocks_backward() -> None:
    taken = footprint(two_blocks(), Setting(ring_bytes=2048))
    # b runs backward beside what a holds: 130 + 2000 + 4500, and the gradients it has then.
    assert (taken.phase, taken.block, taken.activations, taken.gradients) == ("backward", "b", 6630, 50)
    assert taken.peak == 2048 + 7 + 80 + 160 + 6630 + 50


def test_a_kept_block_holds_its_activations_while_later_blocks_run() -> None:
    # a's 5000 include the 30 of its convolutions, which are in b's 130 already.
    taken = footprint(two_blocks(), Setting(kept=frozenset({"a"})))
    assert taken.activations == 6630 + 5000 - 30
    # The last block's are gone before anything else runs backward.
    assert footprint(two_blocks(), Setting(kept=frozenset({"b"}))).activations == 130 + 2000 + 4500


def test_what_waits_in_ram_or_runs_twice_is_not_on_the_device() -> None:
    facts = two_blocks()
    assert footprint(facts, Setting(inputs_in_ram=True)).activations == 6630 - 100
    assert footprint(facts, Setting(keep_convolutions=False)).activations == 6630 - 30
    away = footprint(facts, Setting(optimizer_in_ram=True, inputs_in_ram=True, staging_bytes=9))
    assert away.optimizer == 0
    assert away.ram == 160 + 300 + 9


def test_the_optimizers_state_is_on_the_device_while_it_is_used() -> None:
    taken = footprint(two_blocks(adapter_bytes=80000, update_bytes=40), Setting(optimizer_in_ram=True))
    assert (taken.phase, taken.optimizer, taken.gradients, taken.activations) == ("optimizer", 160000, 80000, 40)


def test_with_several_passes_all_gradients_live_throughout() -> None:
    assert footprint(two_blocks(passes=2), Setting()).gradients == 80


def test_half_the_bytes_of_a_dtype_are_half_the_adapters_gradients_and_state() -> None:
    taken = footprint(two_blocks(), Setting(adapter_dtype=torch.bfloat16, optimizer_dtype=torch.bfloat16))
    assert (taken.adapters, taken.gradients, taken.optimizer) == (40, 25, 80)


def test_work_is_forward_backward_and_what_runs_again() -> None:
    facts = two_blocks()
    assert pace(facts, Setting(), Rates()).flops == 2 * 1600 + (600 - 200) + 900
    assert pace(facts, Setting(keep_convolutions=False), Rates()).flops == 2 * 1600 + 1500
    assert pace(facts, Setting(kept=frozenset("ab")), Rates()).flops == 2 * 1600


def test_a_block_that_fits_into_the_ring_is_copied_once_for_recompute_and_backward() -> None:
    facts = two_blocks()
    # "in" has no backward; "a.conv" is not read in the second run.
    assert pace(facts, Setting(ring_bytes=2047), Rates()).copied_bytes == 256 + 2 * 512 + 3 * 512 + 3 * 1024
    assert pace(facts, Setting(ring_bytes=2048), Rates()).copied_bytes == 256 + 2 * 512 + 2 * 512 + 2 * 1024
    kept = Setting(ring_bytes=2047, kept=frozenset("ab"), resident=frozenset({"b.linear"}))
    assert pace(facts, kept, Rates()).copied_bytes == 256 + 2 * 512 + 2 * 512
    twice = Setting(ring_bytes=2047, keep_convolutions=False)
    assert pace(facts, twice, Rates()).copied_bytes == 256 + 3 * 512 + 3 * 512 + 3 * 1024


def test_a_pass_reads_forward_then_block_by_block_backward() -> None:
    facts = two_blocks()
    forward = ["in", "a.conv", "a.linear", "b.linear"]
    backward = ["b.linear", "b.linear", "a.linear", "a.linear", "a.conv"]
    assert pass_order(facts, Setting()) == forward + backward
    kept = Setting(kept=frozenset("a"), resident=frozenset({"b.linear"}))
    assert pass_order(facts, kept) == ["in", "a.conv", "a.linear", "a.linear", "a.conv"]
    twice = ["b.linear", "b.linear", "a.conv", "a.linear", "a.linear", "a.conv"]
    assert pass_order(facts, Setting(keep_convolutions=False)) == forward + twice


@settings(deadline=None)
@given(jobs(), ROOM)
def test_no_more_is_copied_than_is_read(facts: Facts, room: int) -> None:
    plan = planned(facts, room, Wishes())
    sizes = {layer.path: layer.num_bytes for layer in facts.layers}
    passes = facts.passes * -(-facts.batch_size // (plan.setting.micro_batch or facts.batch_size))
    read = passes * sum(sizes[path] for path in pass_order(facts, plan.setting))
    assert plan.pace.copied_bytes <= read
    without_reuse = replace(plan.setting, ring_bytes=0)
    assert pace(facts, without_reuse, Rates()).copied_bytes == read


# What always holds.


@settings(deadline=None)
@given(jobs(), ROOM, RAMS, RECOMPUTE)
def test_a_plan_fits_into_budget_and_ram(facts: Facts, room: int, ram: int, recompute: bool) -> None:
    plan = planned(facts, room, Wishes(recompute=recompute), ram)
    taken = footprint(plan.facts, plan.setting)
    assert taken == plan.footprint
    assert taken.peak + taken.margin <= plan.budget
    assert taken.ram <= ram
    assert taken.margin >= 64 * MIB


@settings(deadline=None)
@given(jobs(), ROOM, ROOM, RAMS, RECOMPUTE)
def test_more_budget_never_gives_a_slower_plan(facts: Facts, one: int, two: int, ram: int, recompute: bool) -> None:
    less, more = sorted((one, two))
    wishes = Wishes(recompute=recompute)
    before, after = planned(facts, less, wishes, ram), planned(facts, more, wishes, ram)
    assert after.pace.seconds <= before.pace.seconds


@settings(deadline=None)
@given(jobs(), RAMS, RECOMPUTE)
def test_the_smallest_budget_of_a_refusal_is_exact(facts: Facts, ram: int, recompute: bool) -> None:
    wishes = Wishes(recompute=recompute)
    needed = smallest(facts, wishes, ram)
    assert make_plan(facts, wishes, card(needed, ram)).footprint.need <= needed
    with pytest.raises(BudgetError) as refused:
        make_plan(facts, wishes, card(needed - 1, ram))
    assert refused.value.needed == needed


def plain_settings(facts: Facts) -> Iterator[Setting]:
    """Yield settings anybody would think of: each technique wholly on or off."""
    everything = frozenset(layer.path for layer in facts.layers)
    keepable = frozenset(b.path for b in facts.steps[1].blocks if not b.writes_in_place)
    rings = {*ring_sizes(facts.layers), *ring_sizes(facts.layers, facts.parts_ring_bytes)}
    weights = [(everything, 0), *((frozenset(), ring) for ring in sorted(rings))]
    micros = [0 if size == facts.batch_size else size for size in facts.steps]
    on_off = (False, True)
    for (resident, ring), kept, micro, *flags in product(weights, (frozenset(), keepable), micros, *[on_off] * 4):
        chunked = frozenset(b.path for b in facts.steps[1].blocks if b.in_parts and flags[3])
        if chunked and 0 < ring < facts.parts_ring_bytes:
            # Weights would be copied anew for each part.
            continue
        yield Setting(
            resident=frozenset(resident),
            ring_bytes=ring,
            kept=frozenset(kept),
            chunked=chunked,
            micro_batch=micro,
            keep_convolutions=flags[0],
            inputs_in_ram=flags[1],
            optimizer_in_ram=flags[2],
        )


@given(jobs(), ROOM, RAMS)
@settings(deadline=None, max_examples=40)
def test_no_plain_setting_that_fits_is_faster(facts: Facts, room: int, ram: int) -> None:
    plan = planned(facts, room, Wishes(), ram)
    for setting in plain_settings(facts):
        taken = footprint(facts, setting)
        if taken.need <= plan.budget and taken.ram <= ram:
            assert plan.pace.seconds <= pace(facts, setting, Rates()).seconds * (1 + 1e-9)


@given(jobs(), RAMS)
@settings(deadline=None, max_examples=40)
def test_nothing_plain_fits_below_the_smallest_budget(facts: Facts, ram: int) -> None:
    needed = smallest(facts, Wishes(), ram)
    for setting in plain_settings(facts):
        taken = footprint(facts, setting)
        assert taken.need >= needed or taken.ram > ram


@settings(deadline=None)
@given(jobs(), ROOM)
def test_streamed_layers_have_a_ring_for_two_of_the_largest(facts: Facts, room: int) -> None:
    plan = planned(facts, room, Wishes())
    streamed = [layer.num_bytes for layer in facts.layers if layer.path not in plan.setting.resident]
    assert plan.setting.ring_bytes >= 2 * max(streamed, default=0)
    assert streamed or plan.setting.ring_bytes == plan.setting.staging_bytes == 0


@settings(deadline=None)
@given(jobs(), ROOM, RECOMPUTE)
def test_blocks_that_write_in_place_never_keep(facts: Facts, room: int, recompute: bool) -> None:
    plan = planned(facts, room, Wishes(recompute=recompute))
    blocks = facts.steps[1].blocks
    assert not {b.path for b in blocks if b.writes_in_place} & plan.setting.kept
    if not recompute:
        assert {b.path for b in blocks if not b.writes_in_place} == plan.setting.kept


# A real job's proportions.


def test_sdxl_streams_in_one_gib_and_runs_at_full_speed_in_many() -> None:
    facts = sdxl()
    small = make_plan(facts, Wishes(), card(GIB))
    assert small.num_resident < 200
    assert small.num_recomputed > 60
    large = make_plan(facts, Wishes(), card(40 * GIB))
    assert large.num_resident == len(facts.layers)
    assert large.num_recomputed == 0
    assert large.pace.copied_bytes == 0
    assert not any((large.setting.inputs_in_ram, large.setting.optimizer_in_ram, large.setting.micro_batch))
    assert large.refusals == ()


def test_every_budget_between_is_no_slower_than_the_one_below() -> None:
    facts = sdxl(4)
    seconds = [make_plan(facts, Wishes(), card(int(gb * GIB))).pace.seconds for gb in (1, 1.5, 2, 4, 6, 8, 12, 24, 40)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_resident_layers_grow_with_the_budget_and_are_spread_over_the_network() -> None:
    plans = [make_plan(sdxl(), Wishes(), card(int(gb * GIB))) for gb in (2.0, 2.5, 3.0)]
    streamed = [plan.setting.resident for plan in plans if plan.num_resident < 1680]
    assert all(less <= more for less, more in pairwise(streamed))
    blocks = [path.split(".")[0] for path in streamed[-1] if path.startswith("block")]
    counts = [blocks.count(f"block{i}") for i in range(70)]
    assert max(counts) - min(counts) <= 5


def test_a_batch_that_does_not_fit_goes_through_in_parts() -> None:
    plan = make_plan(sdxl(4), Wishes(), card(GIB))
    assert plan.setting.micro_batch in (1, 2)
    assert "the whole batch at once" in dict(plan.refusals)


def test_each_refusal_says_what_it_needs_and_how_much_that_is_too_much() -> None:
    plan = make_plan(sdxl(), Wishes(), card(3 * GIB))
    reason = dict(plan.refusals)["all weights resident"]
    everything = frozenset(layer.path for layer in plan.facts.layers)
    need = footprint(plan.facts, replace(plan.setting, resident=everything, ring_bytes=0)).need
    assert reason == f"needs {need / GIB:.2f} GiB, {(need - 3 * GIB) / GIB:.2f} GiB more than the budget"


def test_ram_that_is_short_is_not_used_and_that_is_said() -> None:
    poor = make_plan(sdxl(4), Wishes(), card(GIB + 200 * MIB, ram=0))
    assert not poor.setting.inputs_in_ram
    assert not poor.setting.optimizer_in_ram
    assert poor.setting.staging_bytes == 0
    assert {"inputs of blocks or optimizer state in RAM", "page-locked staging"} <= {name for name, _ in poor.refusals}
    rich = make_plan(sdxl(4), Wishes(), card(GIB + 200 * MIB))
    assert rich.pace.seconds < poor.pace.seconds
    assert 0 < rich.setting.staging_bytes <= 256 * MIB


def test_a_model_without_blocks_is_streamed_layer_by_layer() -> None:
    layers = tuple(LayerFacts(f"l{i}", None, 100 * MIB) for i in range(20))
    step = StepFacts(blocks=(), other_peak=500 * MIB, other_flops=10**12)
    facts = two_blocks(layers=layers, steps={1: step})
    plan = make_plan(facts, Wishes(), card(GIB))
    assert plan.setting.ring_bytes == 200 * MIB
    assert 0 < plan.num_resident < 20
    with pytest.raises(BudgetError, match="no repeated blocks were recognised"):
        make_plan(facts, Wishes(), card(500 * MIB))


# Refusals.


def test_a_budget_too_small_names_the_smallest_to_set() -> None:
    with pytest.raises(BudgetError) as refused:
        make_plan(sdxl(), Wishes(vram_budget_gb=0.25), card(8 * GIB))
    error = refused.value
    least = float(error.remedy.removeprefix("Set vram_budget_gb to ").removesuffix(" or more."))
    assert error.needed <= least * GIB < error.needed + 0.05 * GIB
    assert error.budget == GIB // 4
    assert "vram_budget_gb is 0.25; the smallest budget in which this job fits is" in str(error)
    assert make_plan(sdxl(), Wishes(vram_budget_gb=least), card(8 * GIB)).peak_bytes < least * GIB


def test_where_too_little_is_free_the_budget_is_not_blamed() -> None:
    with pytest.raises(BudgetError, match=r"256\.00 MiB of device memory can be had for training; .*close what else"):
        make_plan(sdxl(), Wishes(), card(256 * MIB, total=8 * GIB))
    with pytest.raises(BudgetError, match="less than vram_budget_gb = 4"):
        make_plan(sdxl(), Wishes(vram_budget_gb=4), card(256 * MIB, total=8 * GIB))
    with pytest.raises(BudgetError, match="This card is too small for the job"):
        make_plan(sdxl(), Wishes(), card(256 * MIB, total=512 * MIB))


def test_a_budget_above_what_is_free_is_planned_into_what_is_free() -> None:
    plan = make_plan(sdxl(), Wishes(vram_budget_gb=6), card(2 * GIB, total=8 * GIB))
    assert plan.budget == 2 * GIB


def test_a_budget_larger_than_the_card_is_refused() -> None:
    almost_8 = 8 * GIB - 100 * MIB
    with pytest.raises(BudgetError, match=r"vram_budget_gb is 12, but the card has 7\.90 GiB") as refused:
        make_plan(sdxl(), Wishes(vram_budget_gb=12), card(7 * GIB, total=almost_8))
    assert isinstance(refused.value, LowVramLoraError)
    # An "8 GB card" reports a little less.
    assert make_plan(sdxl(), Wishes(vram_budget_gb=8), card(7 * GIB, total=almost_8)).budget == 7 * GIB


def test_a_host_without_a_device_is_not_planned() -> None:
    device = replace(card(0), available=None)
    plan = make_plan(sdxl(4), Wishes(vram_budget_gb=0.1), device)
    assert plan.budget is None
    assert (plan.setting.ring_bytes, plan.setting.kept, plan.setting.micro_batch) == (0, frozenset(), 0)
    assert len(make_plan(sdxl(4), Wishes(recompute=False), device).setting.kept) == 70
    assert "the budget is ignored" in describe_plan(plan)


def test_forbidden_recompute_is_refused_with_what_it_would_give() -> None:
    forbidden = Wishes(recompute=False)
    with pytest.raises(BudgetError, match=r"recompute is off; on, .* would be enough"):
        make_plan(sdxl(), forbidden, card(2 * GIB))
    plan = make_plan(sdxl(), forbidden, card(16 * GIB))
    assert plan.num_recomputed == 0


# Changes of the trained numbers.


def test_lossless_always_comes_before_a_change() -> None:
    needed = smallest(sdxl(), Wishes())
    plan = make_plan(sdxl(), Wishes(allow_lossy=True, rank=16), card(needed))
    assert plan.change == Change()
    less = make_plan(sdxl(), Wishes(allow_lossy=True, rank=16), card(needed - 1))
    # A smaller state alone frees next to nothing, since it waits in RAM by then.
    assert less.change == Change(optimizer_dtype=torch.bfloat16, adapter_dtype=torch.bfloat16)
    assert less.setting.optimizer_dtype == less.setting.adapter_dtype == torch.bfloat16


def test_without_leave_the_smallest_change_that_would_fit_is_named() -> None:
    needed = smallest(sdxl(), Wishes())
    with pytest.raises(BudgetError) as refused:
        make_plan(sdxl(), Wishes(rank=16), card(needed - 1))
    assert "with it on, optimizer state in bf16, adapters in bf16 would fit in" in str(refused.value)
    assert "smaller batch (the batch goes through the network in parts" in str(refused.value)


def test_changes_come_in_their_order_and_only_as_far_as_needed() -> None:
    wishes = Wishes(allow_lossy=True, rank=16, precision="fp32")
    job, asked, seen = sdxl(levels=(0, 1, 2, 2, 1, 0)), [], []

    def simulated(change: Change) -> Facts:
        asked.append((change.resolution, change.precision))
        step = job.steps[1]
        share = change.resolution**2 / (2 if change.precision else 1)
        blocks = tuple(
            replace(b, backward_peak=int(b.backward_peak * share), forward_peak=int(b.forward_peak * share))
            for b in step.blocks
        )
        places = tuple(int(place * share) for place in step.between_peaks)
        return replace(job, steps={1: replace(step, blocks=blocks, between_peaks=places)})

    budget = smallest(job, Wishes())
    while True:
        try:
            plan = make_plan(job, wishes, card(budget), simulated)
        except BudgetError as error:
            assert "larger changes (even with" in str(error)
            break
        seen.append(plan.change.words)
        budget = min(int(budget * 0.97), plan.footprint.need - 1)
    assert all(len(less) <= len(more) for less, more in pairwise(seen))
    assert seen[-1] == (
        "optimizer state in bf16",
        "adapters in bf16",
        "resolution times 0.5",
        "rank 1 at the same alpha / rank",
        "precision bf16",
    )
    assert asked[0] == (0.75, "")


def test_facts_that_nobody_can_simulate_are_not_offered() -> None:
    wishes = Wishes(allow_lossy=True, rank=16, precision="fp32")
    with pytest.raises(BudgetError) as refused:
        make_plan(sdxl(), wishes, card(1), lambda change: None)
    assert "resolution" not in str(refused.value.refusals)
    assert "precision" not in str(refused.value.refusals)


# The table.


def test_the_table_adds_up_and_names_every_refusal() -> None:
    plan = make_plan(sdxl(), Wishes(vram_budget_gb=2), card(8 * GIB, reserve=GIB // 2))
    text = describe_plan(plan, seconds_per_step=1.5, total_s=750.0, budget_gb=2)
    lines = [line.split() for line in text.splitlines()]
    by_name = {" ".join(words[:-2]): float(words[-2]) for words in lines if words[-1] == "GiB"}
    names = ("resident weights", "buffers", "small parameters", "adapters", "gradients", "optimizer", "activations")
    parts = sum(by_name[name] for name in (*names, "margin"))
    assert parts == pytest.approx(plan.footprint.need / GIB, abs=0.05)
    assert f"{plan.num_resident} of 1680 layers" in text
    assert f"{plan.num_recomputed} of 70 blocks" in text
    assert "1.50 s/step, 12m30s in all" in text
    assert "vram_budget_gb = 2" in text
    for technique, reason in plan.refusals:
        assert f"{technique}: {reason}" in text


def test_rows_are_plain_numbers() -> None:
    plan = make_plan(sdxl(4), Wishes(), card(2 * GIB))
    row = plan_row(plan, fastest_s=plan.pace.seconds / 2)
    assert row["budget_gb"] == 2
    assert row["relative_time"] == 2
    assert row["micro_batch"] in (1, 2, 4)
    assert row["peak_mib"] + row["margin_mib"] <= 2048
    with pytest.raises(BudgetError) as refused:
        make_plan(sdxl(), Wishes(vram_budget_gb=0.1), card(GIB))
    row = refused_row(0.1, refused.value)
    assert row["needed_mib"] == round(refused.value.needed / MIB, 1)
    assert row["refused"] == str(refused.value)
