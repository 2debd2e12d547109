"""How much of a caption a text encoder takes in, and what is left over."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A letter of the scripts that are written without spaces; a digit; up to six letters of a word; any other sign.
# Blanks in front belong to it, so that the pieces joined are the caption.
_PIECE = re.compile(r"\s*(?:[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|\d|[^\W\d_]{1,6}|\S)|\s+$")


def rough_pieces(caption: str) -> list[str]:
    """Return ``caption`` in pieces of about one token each, for where no tokenizer is at hand."""
    return _PIECE.findall(caption)


def by_pieces(pieces: Callable[[str], Sequence[str]]) -> Callable[[str, int], tuple[int, str]]:
    """Return a reader for ``TextWindow`` from what splits a caption into texts that, joined, are the caption."""

    def read(caption: str, num_tokens: int) -> tuple[int, str]:
        parts = pieces(caption)
        return len(parts), "".join(parts[num_tokens:]).strip()

    return read


rough = by_pieces(rough_pieces)


@dataclass(frozen=True, kw_only=True)
class TextWindow:
    """What a text encoder reads at once.

    Attributes:
        num_tokens: without those that mark start and end: 75 for CLIP.
        read: takes a caption and ``num_tokens``; returns the caption's number of tokens (an upper limit where it fits)
            and the text beyond the window.
        is_chunked: whether a longer caption is read in several windows, as the host does for CLIP, instead of cut.
        unlimited: names of the encoders beside it that read a caption of any length at once.
    """

    num_tokens: int
    read: Callable[[str, int], tuple[int, str]] = rough
    is_chunked: bool = False
    unlimited: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether a tokenizer counts."""
        return self.read is not rough

    def left_over(self, caption: str) -> tuple[int, str]:
        """Return the caption's number of tokens and the text beyond the first window, empty if it fits."""
        return self.read(caption, self.num_tokens)
