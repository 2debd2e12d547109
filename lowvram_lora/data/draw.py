"""What one place of a batch is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AS_STORED", "EMPTY_CAPTION", "Batch", "Draw", "Epoch"]

# The caption of a draw whose caption was dropped.
EMPTY_CAPTION = -1
# The precision of latents that are used as they are on disk.
AS_STORED = "full"


@dataclass(frozen=True)
class Draw:
    """One sample in one configuration.

    Attributes:
        entry: index into the cache's entries.
        scale: of the bucket; one that the entry lists.
        image: which of the picture's encoded variants.
        caption: which of the caption's variants, or ``EMPTY_CAPTION``.
        precision: the encoding the latents pass through on their way, in the words of ``data.precision``.
    """

    entry: int
    scale: float = 1.0
    image: int = 0
    caption: int = 0
    precision: str = AS_STORED


Batch = tuple[Draw, ...]
Epoch = tuple[Batch, ...]
