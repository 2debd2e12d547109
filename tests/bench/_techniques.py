"""What the data side's techniques take and save in device bytes at full size, simulated.

SDXL with rank 32 on attention, unless a row says otherwise. Weights are resident; blocks keep their activations
(``kept``) or run again (``recomputed``). Work is that of the forward pass. Attention stands for a fused kernel, whose
memory grows with the tokens and not with their square.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.bench._jobs import Case, Model, core_of, opened
from tests.bench.memory import mib

SIDE, BATCH = 128, 4
SIDES = (128, 96, 64)
CHUNKS = (77, 154, 231)
LARGE_SIDE = 256
LOCAL = {"local_attention_tokens": 4096, "local_attention_window": 32}


def rows(pack: Any, model: Model) -> Iterator[dict[str, Any]]:
    """Yield a row for each technique on and off."""
    for technique, way, case in cases(core_of(pack)):
        yield {"technique": technique, "way": way, "label": case.label, **step(pack, case, model)}


def cases(core: Any) -> Iterator[tuple[str, str, Case]]:
    """Yield technique, way and job of every row."""
    for side in SIDES:
        yield "adaptive resolution", f"all at {8 * side} px", Case("sdxl", BATCH, side, 77)
    for side, count in budgeted(core):
        yield "token budget", f"{count} at {8 * side} px", Case("sdxl", count, side, 77)
    for num in CHUNKS:
        yield "dynamic text length", f"longest of the batch: {num} rows", Case("sdxl", BATCH, SIDE, num)
    for num in (141, 154):
        yield "dynamic text length", f"T5 to 64 rows or all 77: {num} rows", Case("sd3", BATCH, SIDE, num)
    for num in (64, 128, 256):
        yield "dynamic text length", f"T5 of a short, a longer and any caption: {num} rows", Case("flux", 1, SIDE, num)
    for family, num in (("sdxl", 77), ("sd3", 154), ("flux", 256)):
        yield "local attention", "off", Case(family, 1, LARGE_SIDE, num)
        yield "local attention", "windows of 32 x 32", Case(family, 1, LARGE_SIDE, num, train=LOCAL)


def budgeted(core: Any) -> Iterator[tuple[int, int]]:
    """Yield for each smaller size how many pictures the budget of a batch of large ones holds."""
    tokens, text = core.data.tokens, 77
    limit = tokens.by_tokens(BATCH * (SIDE * SIDE + text), BATCH)
    for side in SIDES[1:]:
        yield side, min(limit.max_count, limit.capacity // (tokens.latent_tokens((4, side, side)) + text))


def step(pack: Any, case: Case, model: Model) -> dict[str, Any]:
    """Return the device bytes and the work of a step of ``case``."""
    with opened(pack, case, model) as ours:
        kept = ours.counter(resident=ours.matrices, kept=ours.blocks)
        again = ours.counter(resident=ours.matrices)
    forward = sum(count.flops for (_, phase), count in kept.counts.items() if phase == "forward")
    return {"kept_mib": mib(kept.peak), "recomputed_mib": mib(again.peak), "forward_tflop": round(forward / 1e12, 3)}


def encoded(core: Any) -> dict[str, dict[str, int]]:
    """Return the bytes of a picture's latents in RAM at each precision; on the device they are float32 always."""
    precision = core.data.precision
    shapes = {"sdxl, 1024 px": (4, 128, 128), "sd3 or flux, 1024 px": (16, 128, 128)}
    return {
        label: {name: precision.num_bytes(name, shape) for name in ("full", "bands", "half")}
        for label, shape in shapes.items()
    }
