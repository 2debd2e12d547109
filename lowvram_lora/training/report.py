"""A finished run in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..config import TrainConfig
from ..events import Record
from ..units import format_bytes, format_duration


def describe_run(record: Record, path: Path, config: TrainConfig, notes: Sequence[str], reused: bool) -> str:
    """Return the report LoRA Train shows."""
    lines = [
        "Nothing changed since this LoRA was trained: it was taken from disk, no step was run."
        if reused
        else f"Trained {record.steps} steps in {format_duration(record.seconds)} "
        f"({record.seconds / record.steps:.2f} s/step).",
        f"LoRA file: {path}",
        f"Loss: {record.losses[0]:.4f} at the first step, {record.losses[-1]:.4f} at the last.",
        f"{record.num_layers} layers, {record.num_parameters:,} parameters, rank {config.lora.rank}, "
        f"alpha {config.lora.alpha:g}, precision {record.precision}, adapters float32.",
        _memory_line(record),
        _budget_line(config.vram_budget_gb),
        *notes,
    ]
    return "\n".join(lines)


def _memory_line(record: Record) -> str:
    peak = record.memory.peak
    device = peak.get("device_allocated")
    words = f"Peak memory: {format_bytes(peak.get('ram', 0))} RAM of the process"
    return f"{words}, {format_bytes(device)} on the device." if device else f"{words}."


def _budget_line(budget_gb: float) -> str:
    wanted = f"vram_budget_gb = {budget_gb:g}" if budget_gb else "vram_budget_gb = 0 (what is free)"
    return f"{wanted}: not yet enforced in this version; the host decides what it loads."
