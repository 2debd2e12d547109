"""The padding that text encoders put behind captions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..lowvram_lora.data.text_window import TextWindow

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


def of_loaded(clip: Any, tokens: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of encoders that are there: the host tokenizes for T5 also where an SD3 has none."""
    parts = clip.cond_stage_model
    is_gone = {key: any(getattr(parts, name, parts) is None for name in (key, f"clip_{key}")) for key in tokens}
    return {key: chunks for key, chunks in tokens.items() if not is_gone[key]}


UNLIMITED = 100_000
"""An encoder whose window is this or more reads any caption at once: the host writes 99999999 for T5 and its like."""
EMBEDDING = "embedding:"
"""How a caption names vectors of its own, which stand for any number of tokens."""


def window_of(clip: Any) -> TextWindow | None:
    """Return the smallest window of a CLIP's encoders, or None where each reads a caption of any length at once.

    The host cuts nothing: what goes beyond a window is encoded as another one (``SDTokenizer.tokenize_with_weights``),
    and the rows are joined; the pooled vector is the first one's (``ClipTokenWeightEncoder``). Nothing but the
    tokenizer is asked for it.
    """
    parts = dict(_parts(clip.tokenizer, of_loaded(clip, clip.tokenize(""))))
    limited = {key: part for key, part in parts.items() if part.max_length < UNLIMITED}
    if not limited:
        return None
    key, part = min(limited.items(), key=lambda item: item[1].max_length)
    unlimited = tuple(name for name in parts if name not in limited)

    def read(caption: str, num_tokens: int) -> tuple[int, str]:
        num_bytes = len(caption.encode("utf-8", "replace"))
        if EMBEDDING not in caption and num_bytes < num_tokens:
            return num_bytes, ""  # no token is less than a byte: it fits, and most captions are done at once
        chunks = clip.tokenize(caption, return_word_ids=True)[key]
        # Word 0 is what the host put there: start, end and padding.
        own = [[token for token, _, word in chunk if word != 0] for chunk in chunks]
        return sum(map(len, own)), _text_of(part, [token for chunk in own[1:] for token in chunk])

    return TextWindow(num_tokens=part.max_length - _num_marks(part), read=read, is_chunked=True, unlimited=unlimited)


def _parts(tokenizer: Any, tokens: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the host's tokenizers of single encoders, by the names under which they put tokens."""
    for key in tokens:
        part = getattr(tokenizer, key, None) or getattr(tokenizer, f"clip_{key}", None)
        if hasattr(part, "max_length"):
            yield key, part


def _num_marks(part: Any) -> int:
    return sum(getattr(part, name, None) is not None for name in ("start_token", "end_token"))


def _text_of(part: Any, tokens: list[Any]) -> str:
    """Return the text of tokens; a vector of its own has none."""
    text: str = part.tokenizer.decode([token for token in tokens if isinstance(token, int)])
    return text.strip(" \ufffd")  # a letter of several tokens may begin in the window before


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
