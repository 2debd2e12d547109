"""What the judge's numbers must show, as sentences about what they do not show.

Each measure of a trainer is a list with a number for each seed. Its spread is the distance between the greatest and the
least of them; two trainers are as good as each other where their means are no further apart than the larger spread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

LOW, HIGH = ("loss", "drift"), ("shape", "strict")
OURS, REFERENCE, NATIVE = ("ours_on", "ours_off"), "reference", "native"
LOSS_TOLERANCE = 1e-5
"""Relative, of a step's loss, where a technique changes the order of a sum."""

Measures = Mapping[str, Mapping[str, Sequence[float]]]
"""By trainer and measure."""


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, spread and the values themselves."""
    rounded = [round(value, 5) for value in values]
    return {"mean": round(statistics.fmean(values), 5), "spread": round(spread(values), 5), "values": rounded}


def spread(values: Sequence[float]) -> float:
    """Return the distance between the greatest and the least value."""
    return max(values) - min(values)


def behind(measures: Measures, ours: str, other: str) -> list[str]:
    """Return a sentence for every measure on which ``ours`` is worse than ``other`` by more than the spread."""
    found = []
    for measure in (*LOW, *HIGH):
        one, two = measures[ours][measure], measures[other][measure]
        worse = statistics.fmean(one) - statistics.fmean(two)
        worse = worse if measure in LOW else -worse
        allowed = max(spread(one), spread(two))
        # So written that a NaN is a fault.
        if not worse <= allowed + 1e-9:
            found.append(
                f"{ours} is behind {other}: {measure} {statistics.fmean(one):.4f} against {statistics.fmean(two):.4f}, "
                f"where the seeds differ by {allowed:.4f}."
            )
    return found


def problems(measures: Measures) -> list[str]:
    """Return what is wrong between trainers; with one seed there is no spread, and nothing is compared."""
    if len(measures[REFERENCE]["loss"]) < 2:
        return []
    return [sentence for ours in OURS for other in (REFERENCE, NATIVE) for sentence in behind(measures, ours, other)]


def unreal(measures: Measures) -> list[str]:
    """Return a sentence for every measure that is not a finite number with some seed."""
    return [
        f"{trainer}: {measure} is not a number: {list(values)}."
        for trainer, each in measures.items()
        for measure, values in each.items()
        if not all(map(math.isfinite, values))
    ]


def heavier(device_bytes: Mapping[str, int | None]) -> list[str]:
    """Return a sentence for each of ours whose step takes more device bytes than the plain loop's."""
    most = device_bytes[REFERENCE] or 0
    return [
        f"{ours} takes {device_bytes[ours]} device bytes a step, more than the {most} of {REFERENCE}."
        for ours in OURS
        if (device_bytes[ours] or 0) > most
    ]


def unequal(differing: Sequence[str], distance: float) -> list[str]:
    """Return what is wrong between ours with techniques on and off.

    Args:
        differing: names of what the exact techniques have changed.
        distance: the greatest relative difference of a step's loss with all techniques on.
    """
    found = []
    if differing:
        found.append(f"The exact techniques have changed numbers: {len(differing)} tensors, first {differing[0]}.")
    if not distance <= LOSS_TOLERANCE:
        found.append(f"With all techniques on, a loss differs by {distance:.1e}; {LOSS_TOLERANCE:.0e} is allowed.")
    return found


def below_floor(shapes: Sequence[float], floor: float) -> list[str]:
    """Return what is wrong with the held-out shape scores of ours."""
    if all(shape >= floor for shape in shapes):
        return []
    low = min(shapes)
    return [f"ours_on draws the new shape in {low:.2f} of the unseen captions; {floor:.2f} is the least allowed."]
