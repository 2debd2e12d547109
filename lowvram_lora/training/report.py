"""A finished run in words."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from ..events import Record
from ..units import counted, format_bytes, format_duration


def describe_run(record: Record, path: Path, plan: str, notes: Sequence[str], reused: bool) -> str:
    """Return the report LoRA Train shows.

    Args:
        plan: how the run went, in lines of text; empty where there was none.
        notes: further sentences, one a line.
    """
    # As it was trained, which a lossy plan may have made other than as it was asked for.
    rank, alpha = record.metadata["ss_network_dim"], float(record.metadata["ss_network_alpha"])
    lossy = record.metadata.get("ss_training_comment")
    lines = [
        "Nothing changed since this LoRA was trained: it was taken from disk, no step was run."
        if reused
        else f"Trained {counted(record.steps, 'step')} in {format_duration(record.seconds)} "
        f"({record.seconds / record.steps:.2f} s/step).",
        f"LoRA file: {path}",
        f"Loss: {record.losses[0]:.4f} at the first step, {record.losses[-1]:.4f} at the last.",
        *_validation_lines(record.validation),
        f"{record.num_layers} layers, {record.num_parameters:,} parameters, rank {rank}, "
        f"alpha {alpha:g}, precision {record.precision}.",
        *([f"Changed to fit the budget ({lossy})."] if lossy else []),
        *_batch_lines(record.metadata.get("ss_batch_sizes")),
        *_memory_lines(record),
        *notes,
        *([plan] if plan else []),
    ]
    return "\n".join(lines)


def _validation_lines(measured: Sequence[tuple[int, float]]) -> list[str]:
    if not measured:
        return []
    parts = [f"{loss:.4f} {_after(done)}" for done, loss in measured]
    best, least = min(measured, key=lambda each: (not math.isfinite(each[1]), each[1]))
    line = f"Loss on held-out pictures, always with the same noise: {', '.join(parts)}."
    if best == measured[-1][0]:
        return [line]
    since = "if it goes on rising, the training pictures are being learned by heart"
    return [f"{line} It was least, {least:.4f}, {_after(best)}; {since}."]


def _after(done: int) -> str:
    return f"after {counted(done, 'step')}" if done else "before step 1"


def _batch_lines(sizes: str | None) -> list[str]:
    """Return how many samples made a batch, by resolution.

    Args:
        sizes: as the file's metadata has them; None where memory was not asked.
    """
    if sizes is None:
        return []
    by_size: dict[int, list[str]] = {}
    for resolution, size in json.loads(sizes).items():
        by_size.setdefault(size, []).append(resolution)
    parts = (f"{size} of {', '.join(found)}" for size, found in sorted(by_size.items()))
    return [f"Samples a batch, as memory allowed (adaptive_batch): {'; '.join(parts)}."]


def _memory_lines(record: Record) -> list[str]:
    peak = record.memory.peak
    device, reserved = peak.get("device_allocated"), peak.get("device_reserved", 0)
    words = f"Peak memory: {format_bytes(peak.get('ram', 0))} RAM of the process"
    if not device:
        return [f"{words}."]
    free = f", {1 - device / reserved:.0%} of it fragments" if reserved else ""
    by_phase = ", ".join(
        f"{name} {format_bytes(counts['device_allocated'])}"
        for name, counts in record.memory.phases.items()
        if "device_allocated" in counts
    )
    return [
        f"{words}, {format_bytes(device)} in tensors on the device; torch held {format_bytes(reserved)}{free}.",
        f"Peak in tensors by phase: {by_phase}.",
    ]
