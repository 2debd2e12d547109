"""Which images are held out of training: decided by their content, whatever their names and order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def held_out(image_digests: Iterable[str], share: float) -> frozenset[str]:
    """Return the digests of the images to hold out: ``share`` of the different ones, rounded.

    At least one if ``share`` is above 0, and never all. The same image under two names is on one side. The order in
    which images are taken depends on each one's bytes alone, so adding images moves few others.
    """
    different = sorted(set(image_digests), key=_rank)
    if share <= 0.0 or len(different) < 2:
        return frozenset()
    count = min(max(round(share * len(different)), 1), len(different) - 1)
    return frozenset(different[:count])


def _rank(digest: str) -> str:
    return hashlib.sha256(f"validation/{digest}".encode()).hexdigest()
