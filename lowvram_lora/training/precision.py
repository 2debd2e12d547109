"""Which arithmetic the network computes in."""

from collections.abc import Callable

import torch

from ..config import Precision
from ..ports import Denoiser

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def resolve(wanted: Precision, denoiser: Denoiser) -> tuple[str, str | None]:
    """Return the precision to train with and, where it is not the one asked for, a note that says why."""
    if wanted == "auto":
        return _first(denoiser.prefers), None
    if denoiser.supports(DTYPES[wanted]):
        return wanted, None
    chosen = _first(denoiser.supports)
    return chosen, f"precision {wanted} is not supported by {denoiser.device}; {chosen} is used instead."


def _first(accepts: Callable[[torch.dtype], bool]) -> str:
    return next((name for name in ("bf16", "fp16") if accepts(DTYPES[name])), "fp32")
