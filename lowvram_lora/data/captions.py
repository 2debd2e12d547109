"""Caption files: where they are looked for, how their bytes become text, where the trigger word goes."""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import DataConfig
from ..units import format_bytes

CAPTION_SUFFIXES = (".txt", ".caption")

# A book of 200,000 words: nobody's caption.
MAX_CAPTION_BYTES = 1 << 20

# GBK writes a Chinese character as two bytes, nearly always both 0x80 or more. Western text in cp1252 has
# such bytes one at a time inside words (é) or beside them (a curly quote), and never four in a row.
_LOOKS_CHINESE = re.compile(rb"[\x80-\xff]{4}|(?<![A-Za-z\x80-\xff])[\x80-\xff]{2}(?![A-Za-z\x80-\xff])")


@dataclass(frozen=True)
class Caption:
    """What was read for one image.

    Attributes:
        text: stripped, with ``\\n`` at its line ends; empty if the file is blank or missing.
        source: the file, or None if there is none.
        warning: what the user should know about the file's bytes, or empty.
    """

    text: str
    source: Path | None = None
    warning: str = ""


def caption_suffixes(config: DataConfig) -> tuple[str, ...]:
    """Return the endings of caption files, the one that is looked for first in front."""
    usual = CAPTION_SUFFIXES if config.caption_extension == "auto" else (config.caption_extension,)
    own = config.custom_extension.strip().strip(".")
    return (f".{own}", *usual) if own else usual


def read_caption(image: Path, suffixes: Sequence[str], files: Collection[Path]) -> Caption:
    """Return the caption of ``image``: that of the first of ``suffixes`` for which there is a file.

    For each, ``aaa.bbb.jpg`` looks for ``aaa.bbb.txt``, then for ``aaa.bbb.jpg.txt``.

    Args:
        files: the files that may be read; one that is not among them counts as missing.
    """
    source = _find(image, suffixes, files)
    if source is None:
        return Caption("")
    try:
        if source.stat().st_size > MAX_CAPTION_BYTES:
            return Caption("", None, f"is larger than {format_bytes(MAX_CAPTION_BYTES)}, so it is not read")
        text, warning = decode(source.read_bytes())
    except OSError as error:
        return Caption("", None, f"can't be read ({error.strerror or error})")
    return Caption(text.replace("\r\n", "\n").replace("\r", "\n").strip(), source, warning)


def decode(data: bytes) -> tuple[str, str]:
    """Return a caption file's text and a warning, empty for Unicode.

    A byte-order mark of UTF-16 or UTF-32 decides first; then zeros, which only UTF-16 is full of; then UTF-8 if it fits
    (its mark is dropped); then GB18030 if it fits and bytes of 0x80 or more come four in a row, or as a pair that
    touches no Latin letter; else Windows-1252, with its undefined bytes replaced. Never raises.
    """
    # First, since the one of UTF-16 is the beginning of it.
    if data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return data.decode("utf-32", errors="replace"), ""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", errors="replace"), ""
    if max(2, len(data) // 4) <= data.count(0) <= len(data) // 2:
        name = "utf-16-le" if data[1::2].count(0) > data[::2].count(0) else "utf-16-be"
        return data.decode(name, errors="replace"), "does not tell its encoding; read as UTF-16"
    try:
        return data.decode("utf-8-sig"), ""
    except UnicodeDecodeError:
        pass
    if _LOOKS_CHINESE.search(data):
        try:
            return data.decode("gb18030"), "is not UTF-8; read as Chinese (GB18030)"
        except UnicodeDecodeError:
            pass
    return data.decode("cp1252", errors="replace"), "is not UTF-8; read as Western (Windows-1252)"


def add_trigger(caption: str, trigger_word: str) -> str:
    """Return ``caption`` with the trigger word in front, or unchanged if it already holds that word.

    Case is ignored; ``sks`` is not found inside ``desks``, but is between Chinese characters.
    """
    trigger = trigger_word.strip()
    if not trigger or _holds(caption, trigger):
        return caption
    return f"{trigger}, {caption}" if caption else trigger


def spellings(name: str) -> Iterable[str]:
    """Return ``name``, and as other systems write it: macOS takes letters and their accents apart."""
    if name.isascii():
        return (name,)
    return dict.fromkeys((name, unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)))


def _holds(caption: str, trigger: str) -> bool:
    before = r"(?<![A-Za-z0-9_])" if _is_latin(trigger[0]) else ""
    after = r"(?![A-Za-z0-9_])" if _is_latin(trigger[-1]) else ""
    return re.search(before + re.escape(trigger) + after, caption, re.IGNORECASE) is not None


def _is_latin(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character == "_")


def _find(image: Path, suffixes: Sequence[str], files: Collection[Path]) -> Path | None:
    stems = [form for stem in (image.stem, image.name) for form in spellings(stem)]
    for suffix in suffixes:
        for stem in stems:
            for ending in dict.fromkeys((suffix, suffix.lower(), suffix.upper(), suffix.title())):
                if image.with_name(stem + ending) in files:
                    return image.with_name(stem + ending)
    return None
