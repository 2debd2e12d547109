"""A plan in words and in plain numbers."""

from __future__ import annotations

from typing import Any

from ..errors import BudgetError
from ..units import GIB, MIB, format_bytes, format_duration
from .chunks import PART_ROWS
from .footprint import step_facts
from .plan import Plan

_WHERE = {"outside": "outside blocks", "optimizer": "in the optimizer"}


def describe_plan(
    plan: Plan, seconds_per_step: float | None = None, total_s: float | None = None, budget_gb: float | None = None
) -> str:
    """Return the plan as a table in text.

    Args:
        seconds_per_step: as foreseen from the first measured steps.
        total_s: of the whole run, as foreseen from them.
        budget_gb: what the user set; 0 for what is free.
    """
    lines = [_title(plan, budget_gb), *_device_lines(plan), *_way_lines(plan)]
    if seconds_per_step is not None:
        total = "" if total_s is None else f", {format_duration(total_s)} in all"
        lines.append(_row("time", f"{seconds_per_step:.2f} s/step{total} (from the first steps)"))
    lines += [_row("changed", words) for words in plan.change.words]
    lines += [f"  not used: {technique}: {reason}" for technique, reason in plan.refusals]
    return "\n".join(lines)


def plan_row(plan: Plan, fastest_s: float | None = None) -> dict[str, Any]:
    """Return the plan as plain numbers.

    Args:
        fastest_s: nominal seconds of a step that ``relative_time`` is told in: those of the plan without a limit, say.
    """
    setting, parts = plan.setting, plan.footprint
    return {
        "budget_gb": None if plan.budget is None else round(plan.budget / GIB, 3),
        "peak_mib": _mib(parts.peak),
        "margin_mib": _mib(parts.margin),
        "resident_mib": _mib(parts.resident),
        "ring_mib": _mib(parts.ring),
        "small_mib": _mib(parts.small),
        "adapters_mib": _mib(parts.adapters),
        "gradients_mib": _mib(parts.gradients),
        "optimizer_mib": _mib(parts.optimizer),
        "activations_mib": _mib(parts.activations),
        "ram_mib": _mib(parts.ram),
        "phase": parts.phase,
        "block": parts.block,
        "resident_layers": plan.num_resident,
        "recomputed_blocks": plan.num_recomputed,
        "chunked_blocks": len(setting.chunked),
        "micro_batch": setting.micro_batch or plan.facts.batch_size,
        "keep_convolutions": setting.keep_convolutions,
        "inputs_in_ram": setting.inputs_in_ram,
        "optimizer_in_ram": setting.optimizer_in_ram,
        "copied_mib_per_step": _mib(plan.pace.copied_bytes),
        "tflop_per_step": round(plan.pace.flops / 1e12, 3),
        "relative_time": round(plan.pace.seconds / (fastest_s or plan.pace.seconds), 3),
        "lossy": list(plan.change.words),
        "not_used": [f"{technique}: {reason}" for technique, reason in plan.refusals],
        "refused": None,
    }


def refused_row(budget_gb: float, error: BudgetError) -> dict[str, Any]:
    """Return the row of a budget in which nothing fits."""
    needed = None if error.needed is None else _mib(error.needed)
    return {"budget_gb": budget_gb, "needed_mib": needed, "refused": str(error)}


def _title(plan: Plan, budget_gb: float | None) -> str:
    if plan.budget is None:
        return "Plan: none; this host computes in RAM"
    source = "what is free" if budget_gb == 0 else f"vram_budget_gb = {budget_gb:g}" if budget_gb else "the budget"
    return f"Plan for {_gib(plan.budget).strip()} of device memory ({source})"


def _device_lines(plan: Plan) -> list[str]:
    parts = plan.footprint
    if plan.budget is None:
        return []
    where = f"in {parts.phase} of {parts.block}" if parts.block else _WHERE[parts.phase]
    rows = (
        ("resident weights", parts.resident),
        ("buffers", parts.ring),
        ("small parameters", parts.small),
        ("adapters", parts.adapters),
        ("gradients", parts.gradients),
        ("optimizer", parts.optimizer),
        ("activations", parts.activations),
        ("margin", parts.margin),
    )
    lines = [_row(name, _gib(num_bytes)) for name, num_bytes in rows]
    lines.append(_row("total", f"{_gib(parts.need)} of {_gib(plan.budget).strip()}; most live {where}"))
    if plan.reserve:
        lines.append(_row("reserve", f"{_gib(plan.reserve)} left to the host, outside the budget"))
    return [*lines, _row("RAM", _gib(parts.ram))]


def _way_lines(plan: Plan) -> list[str]:
    setting = plan.setting
    micro = setting.micro_batch or plan.facts.batch_size
    blocks = step_facts(plan.facts, setting).blocks
    to_ram = {"inputs of blocks": setting.inputs_in_ram, "optimizer state": setting.optimizer_in_ram}
    outside = " and ".join(name for name, is_so in to_ram.items() if is_so)
    lines = [
        _row("recomputed", f"{plan.num_recomputed} of {len(blocks)} blocks"),
        _row("micro-batch", f"{micro} of {plan.facts.batch_size}"),
    ]
    if plan.budget is not None:
        copied = format_bytes(plan.pace.copied_bytes)
        lines.insert(0, _row("resident", f"{plan.num_resident} of {len(plan.facts.layers)} layers"))
        lines.insert(1, _row("copied", f"{copied} a step at most"))
    if setting.chunked:
        in_parts = f"in parts of {PART_ROWS} tokens in {len(setting.chunked)} of {len(blocks)} blocks"
        lines.append(_row("feed-forward", in_parts))
    if not setting.keep_convolutions:
        lines.append(_row("convolutions", "run again with their blocks"))
    return [*lines, _row("waits in RAM", outside)] if outside else lines


def _row(name: str, value: str) -> str:
    return f"  {name:<18}{value}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:5.2f} GiB"


def _mib(num_bytes: int) -> float:
    return round(num_bytes / MIB, 1)
