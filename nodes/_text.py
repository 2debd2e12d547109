"""The padding that text encoders put behind captions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

PADDING = "lowvram_lora_padding"
"""Where an encoded caption keeps ``[rows, padding]`` of the encoder whose rows come last. The host never gets it."""
MASK = "attention_mask"
"""The host's name of what says which rows are the caption's own."""
STEP = 64
"""What is left of a caption and its padding is a multiple of so many rows."""


def padding_of(tokenizer: Any, tokens: dict[str, Any]) -> list[int] | None:
    """Return ``[rows, padding]`` of the encoder that pads a caption to a length of its own, or None without padding.

    CLIP's encoders work on chunks of 77 tokens and are left out: a chunk is never cut.

    Args:
        tokenizer: the host's, of one encoder or of several.
        tokens: what it made of the caption, by encoder.
    """
    for key, chunks in tokens.items():
        part = getattr(tokenizer, key, None) or getattr(tokenizer, f"clip_{key}", None)
        if getattr(part, "pad_to_max_length", True) or getattr(part, "pad_left", False) or len(chunks) != 1:
            continue
        rows = [token[0] for token in chunks[0]]
        padding = 0
        while padding < len(rows) and isinstance(rows[-1 - padding], int) and rows[-1 - padding] == part.pad_token:
            padding += 1
        if padding:
            return [len(rows), padding]
    return None


def without_padding(conditioning: list[Any], is_masked: bool, cuts: bool) -> list[Any]:
    """Return an encoded caption without the rows behind it that need not be there.

    Args:
        is_masked: the network hides what the caption's mask says, so that those rows have no effect.
        cuts: leave out padding that the network sees.
    """
    return [
        [tokens, dict(more)] if tokens is None else _cut(tokens, more, is_masked, cuts) for tokens, more in conditioning
    ]


def _cut(tokens: Tensor, more: dict[str, Any], is_masked: bool, cuts: bool) -> list[Any]:
    kept = {key: value for key, value in more.items() if key != PADDING}
    num = tokens.shape[1]
    mask = kept.get(MASK)
    is_fitting = isinstance(mask, Tensor) and mask.shape[-1] == num
    if is_masked and is_fitting:
        own = mask.reshape(-1, num).any(0).nonzero()
        rows = min(num, _in_steps(int(own.max()) + 1 if len(own) else 1))
    elif cuts and PADDING in more:
        length, padding = more[PADDING]
        rows = num - length + min(length, _in_steps(length - padding))
    else:
        rows = num
    if rows == num:
        return [tokens, kept]
    if is_fitting:
        kept[MASK] = mask[..., :rows]
    return [tokens[:, :rows], kept]


def _in_steps(rows: int) -> int:
    return -(-max(rows, 1) // STEP) * STEP
