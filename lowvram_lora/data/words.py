"""The words of a caption."""

from __future__ import annotations

import re

# Han, kana and their extensions: written without spaces, so each character counts as a word.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
_WORD = re.compile(rf"[{_CJK}]|(?:(?![{_CJK}])[\w'’-])+")


def words(caption: str) -> list[str]:
    """Return the words in their order, as they are written; a Chinese or Japanese character is one."""
    return _WORD.findall(caption)
