"""The next plan after an out-of-memory: lossless, and clearly smaller."""

from __future__ import annotations

from dataclasses import replace

from ..units import format_bytes
from .plan import Plan, fastest
from .refusal import changed_space
from .wishes import DeviceFacts, Wishes

# A rung that is not clearly lower would fail again; one that is much lower would be slower than it must.
RUNG_SHARE = 0.92


def next_rung(failed: Plan, wishes: Wishes, device: DeviceFacts, measured_peak: int | None = None) -> Plan | None:
    """Return the fastest plan whose peak is at most ``RUNG_SHARE`` of that of ``failed``; None at the last rung.

    The job stays as it ran: its facts, dtypes and changes are those of ``failed``. Each rung has a lower peak than the
    one before, by a fixed share, so a ladder has an end.

    Args:
        measured_peak: device bytes that were in use when memory ran out. Where they exceed what was foreseen, the next
            plan must fit even if it is exceeded by the same factor.
    """
    if failed.budget is None:
        return None
    limit = int(failed.peak_bytes * RUNG_SHARE)
    if measured_peak is not None and measured_peak > failed.peak_bytes:
        limit = min(limit, failed.budget * failed.peak_bytes // measured_peak)
    space = changed_space(failed.facts, failed.change, wishes, device)
    plan = fastest(space, failed.change, device, failed.budget, limit)
    if plan is None:
        return None
    used = format_bytes(failed.peak_bytes if measured_peak is None else measured_peak)
    return replace(plan, refusals=(("the plan before", f"memory ran out with {used} in use"), *plan.refusals))
