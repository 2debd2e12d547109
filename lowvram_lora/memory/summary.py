"""A run's memory in words."""

from collections.abc import Mapping

from ..events import MemoryRecord
from ..units import format_bytes

_NAMES = {
    "ram": "RAM of the process",
    "device_allocated": "VRAM in tensors",
    "device_reserved": "VRAM held by torch",
    "card_used": "VRAM of the card, all programs",
}
_BARS = "▁▂▃▄▅▆▇█"
_CHART_LENGTH = 40


def efficiency(counts: Mapping[str, int]) -> float | None:
    """Return used / allocated in 0..1: tensors over what torch holds of the device, or None without a device."""
    held = counts.get("device_reserved", 0)
    return counts.get("device_allocated", 0) / held if held else None


def describe_memory(latest: MemoryRecord | None, now: Mapping[str, int]) -> str:
    """Return the present state and, where there was a run, its peak, average and history."""
    lines = ["Now", *(f"  {name}: {format_bytes(now[key])}" for key, name in _NAMES.items() if key in now)]
    if latest is None or not latest.history:
        return "\n".join([*lines, "No training run has been measured yet."])
    lines.append(f"Last run: {latest.run}, {latest.steps} steps measured")
    for key, name in _NAMES.items():
        if key in latest.peak:
            peak, average = format_bytes(latest.peak[key]), format_bytes(latest.average[key])
            lines.append(f"  {name}: peak {peak}, average {average}")
            lines.append(f"    {_chart([sample.get(key, 0) for sample in latest.history])}")
    return "\n".join([*lines, _efficiency_line(latest.average)])


def _efficiency_line(average: Mapping[str, int]) -> str:
    share = efficiency(average)
    if share is None:
        return "  efficiency (used/allocated): this device has no memory of its own to allocate"
    return f"  efficiency (used/allocated): {share:.0%}"


def _chart(values: list[int]) -> str:
    """Return a line of bars from the smallest to the largest value."""
    stride = -(-len(values) // _CHART_LENGTH)
    groups = [max(values[i : i + stride]) for i in range(0, len(values), stride)]
    low, high = min(groups), max(groups)
    span = max(high - low, 1)
    return "".join(_BARS[(value - low) * (len(_BARS) - 1) // span] for value in groups)
