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


@dataclass(frozen=True, kw_only=True)
class TextWindow:
    """What a text encoder reads at once.

    Attributes:
        num_tokens: without those that mark start and end: 75 for CLIP.
        pieces: splits a caption into the texts of its tokens; joined they are the caption.
        is_chunked: whether a longer caption is read in several windows, as the host does for CLIP, instead of cut.
    """

    num_tokens: int
    pieces: Callable[[str], Sequence[str]] = rough_pieces
    is_chunked: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the pieces are those of a tokenizer."""
        return self.pieces is not rough_pieces

    def left_over(self, caption: str) -> tuple[int, str]:
        """Return the caption's number of tokens and the text beyond the first window, empty if it fits."""
        pieces = self.pieces(caption)
        return len(pieces), "".join(pieces[self.num_tokens :]).strip()
