"""What the judge's numbers must show, as sentences about what they do not show.

Each measure of a trainer is a list with a number for each seed. Its spread is the distance between the greatest and the
least of them. Ours may be behind another trainer by the other's spread, never by its own: a trainer that is unsteady is
not excused by it. One seed has no spread; then fixed margins stand for it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

LOW, HIGH = ("loss", "drift"), ("shape", "strict")
OURS, REFERENCE, NATIVE = ("ours_on", "ours_off"), "reference", "native"
MARGINS = {"loss": 0.03, "drift": 0.1, "shape": 0.15, "strict": 0.15}
"""By how much one seed may put ours behind. The loss is relative to the other's."""
PICTURE = 1 / 48
"""What can be told apart of the shares of pictures drawn right, when the judge draws its usual number."""
LEAST_LEARNED = 0.2
"""Shape score above the base's, below which a trainer has not learned and nothing can be said by it."""
MOST_DRIFT = 0.1
"""Of ours; another trainer that loses twice as much is no measure of drift."""
LEAST_OLD = 0.5
"""Strict score of what the base knows."""
LOSS_TOLERANCE = 1e-5
"""Relative, of the validation loss after a training, where a technique changes the order of a sum.

Not of every step's loss: what a rounding changes grows with the steps. The plain loop's own losses of single steps
change as much (2.5e-5 in 200 steps at a rate of 8e-3) when each of its batches is merely turned round.
"""

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
    """Return a sentence for every measure on which ``ours`` is worse than ``other`` by more than is allowed."""
    found = []
    for measure in (*LOW, *HIGH):
        one, two = measures[ours][measure], measures[other][measure]
        worse = statistics.fmean(one) - statistics.fmean(two)
        worse = worse if measure in LOW else -worse
        allowed = _allowed(measure, two)
        # So written that a NaN is a fault.
        if not worse <= allowed + 1e-9:
            found.append(
                f"{ours} is behind {other}: {measure} {statistics.fmean(one):.4f} against {statistics.fmean(two):.4f}, "
                f"where {allowed:.4f} is allowed."
            )
    return found


def _allowed(measure: str, values: Sequence[float]) -> float:
    if len(values) < 2:
        return MARGINS[measure] * (abs(values[0]) if measure == "loss" else 1)
    return max(spread(values), 0.0 if measure == "loss" else PICTURE)


def problems(measures: Measures) -> list[str]:
    """Return what is wrong between trainers, and between ours with techniques and without."""
    pairs = [(ours, other) for ours in OURS for other in (REFERENCE, NATIVE)]
    return [sentence for ours, other in [*pairs, OURS] for sentence in behind(measures, ours, other)]


def unlearned(measures: Measures, base: Mapping[str, float]) -> list[str]:
    """Return what is wrong between the base and the trainers: who has not learned, who has forgotten."""
    found = []
    for name in measures:
        mean = {measure: statistics.fmean(values) for measure, values in measures[name].items()}
        for measure in HIGH:
            if not mean[measure] >= base[measure] + LEAST_LEARNED:
                found.append(f"{name} has not learned: {measure} {mean[measure]:.2f}, the base's {base[measure]:.2f}.")
        if not mean["loss"] < base["loss"]:
            found.append(f"{name} has not learned: loss {mean['loss']:.4f}, the base's {base['loss']:.4f}.")
        if not mean["drift"] <= (MOST_DRIFT if name in OURS else 2 * MOST_DRIFT):
            found.append(f"{name} has forgotten {mean['drift']:.2f} of the old.")
    if not base["old_strict"] >= LEAST_OLD:
        found.append(f"The base draws only {base['old_strict']:.2f} of the old right: nothing shows what is forgotten.")
    return found


def unreal(measures: Measures) -> list[str]:
    """Return a sentence for every measure that is not a finite number with some seed."""
    return [
        f"{trainer}: {measure} is not a number: {list(values)}."
        for trainer, each in measures.items()
        for measure, values in each.items()
        if not all(map(math.isfinite, values))
    ]


def heavier(device_bytes: Mapping[str, int | None]) -> list[str]:
    """Return a sentence for each of ours whose step takes more device bytes than it may.

    With the techniques on it must take less than without, and without no more than the plain loop.
    """
    on, off = (device_bytes[name] for name in OURS)
    most = device_bytes[REFERENCE]
    if on is None or off is None or most is None:
        return [f"Device bytes are not known: {dict(device_bytes)}."]
    found = [] if on < off else [f"ours_on takes {on} device bytes a step, not less than the {off} of ours_off."]
    return found if off <= most else [*found, f"ours_off takes {off} device bytes a step, the plain loop {most}."]


def distance(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the greatest relative difference of two trainers' losses, seed by seed; NaN where one is none."""
    return greatest([abs(one - other) / (abs(other) or math.nan) for one, other in zip(ones, others, strict=True)])


def greatest(values: Sequence[float]) -> float:
    """Return the greatest value; NaN if any is not finite, which ``max`` would pass over."""
    return max(values) if all(map(math.isfinite, values)) else math.nan


def unequal(differing: Sequence[str], distance: float) -> list[str]:
    """Return what is wrong between ours with techniques on and off.

    Args:
        differing: names of what the exact techniques have changed.
        distance: the greatest relative difference of a validation loss with all techniques on.
    """
    found = []
    if differing:
        found.append(f"The exact techniques have changed numbers: {len(differing)} tensors, first {differing[0]}.")
    if not distance <= LOSS_TOLERANCE:
        found.append(f"With all techniques on, a loss differs by {distance:.1e}; {LOSS_TOLERANCE:.0e} is allowed.")
    return found


def below_floor(shapes: Sequence[float], floor: float) -> list[str]:
    """Return what is wrong with the held-out shape scores of ours."""
    if shapes and all(shape >= floor for shape in shapes):
        return []
    if not shapes:
        return ["ours_on has no shape score."]
    low = min(shapes)
    return [f"ours_on draws the new shape in {low:.2f} of the unseen captions; {floor:.2f} is the least allowed."]
