"""Captions in one file for many images: ``metadata.jsonl`` and ``metadata.csv``, as Hugging Face lays them out."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..units import format_bytes
from .captions import decode, spellings
from .dataset import name_some

NAMES = ("metadata.jsonl", "metadata.csv")

# Captions of a million images.
MAX_SIDECAR_BYTES = 1 << 28

_FILE_COLUMNS = ("file_name", "filename", "file", "image")
_TEXT_COLUMN = re.compile(r"(text|caption|captions|prompt)(_?[0-9]+)?")
_DELIMITERS = (",", ";", "\t")
_MAX_NAMED = 5


@dataclass(frozen=True)
class Sidecars:
    """What the sidecar files of a folder say.

    Attributes:
        captions: by image; several where rows or columns give several.
        notes: what the user should know, one sentence each.
    """

    captions: Mapping[Path, tuple[str, ...]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Row:
    line: int
    file: str
    captions: tuple[str, ...]


@dataclass(frozen=True)
class _Fault:
    """Why a line, or the whole file if ``line`` is empty, is not used."""

    line: str
    text: str


def is_sidecar(path: Path) -> bool:
    """Return whether ``path`` is a file of captions for the images beside and below it."""
    return path.name.lower() in NAMES


def read_sidecars(files: Iterable[Path], folder: Path, known: Collection[Path]) -> Sidecars:
    """Return the captions of all sidecar files among ``files``, and what is wrong with them, by line.

    Args:
        known: the files that a row may name; a name is relative to the sidecar's own folder.
    """
    captions: dict[Path, tuple[str, ...]] = {}
    notes: list[str] = []
    for path in files:
        if is_sidecar(path):
            notes += _read(path, path.relative_to(folder).as_posix(), known, captions)
    return Sidecars(captions, tuple(notes))


def _read(path: Path, name: str, known: Collection[Path], captions: dict[Path, tuple[str, ...]]) -> Iterator[str]:
    try:
        if path.stat().st_size > MAX_SIDECAR_BYTES:
            yield f"{name} is larger than {format_bytes(MAX_SIDECAR_BYTES)}; its captions are not used"
            return
        text, warning = decode(path.read_bytes())
    except OSError as error:
        yield f"{name} can't be read ({error.strerror or error}); its captions are not used"
        return
    if warning:
        yield f"{name} {warning}"
    lines: dict[str, list[str]] = {}
    for row in (_json_rows if path.suffix.lower() == ".jsonl" else _csv_rows)(text):
        fault = _take(row, path.parent, known, captions) if isinstance(row, _Row) else row
        if fault is not None:
            lines.setdefault(fault.text, []).extend([fault.line] if fault.line else [])
    for fault_text, where in lines.items():
        yield f"{name}{' line ' + name_some(where, _MAX_NAMED) if where else ''}: {fault_text}"


def _take(row: _Row, folder: Path, known: Collection[Path], captions: dict[Path, tuple[str, ...]]) -> _Fault | None:
    """Put a row's captions to its image; return what is wrong with it, if anything."""
    parts = row.file.replace("\\", "/").split("/")
    where = f"{row.line} ({row.file[:80]})"
    if ".." in parts or not parts[0] or ":" in parts[0]:
        return _Fault(where, "names a file outside its folder; the row is left out")
    found = (folder.joinpath(*form.split("/")) for form in spellings("/".join(parts)))
    image = next((path for path in found if path in known), None)
    if image is None:
        return _Fault(where, "there is no such file; the row is left out")
    before = captions.get(image, ())
    if before and set(row.captions) <= set(before):
        return _Fault(where, "repeats an earlier row")
    captions[image] = tuple(dict.fromkeys((*before, *row.captions)))
    return None


def _json_rows(text: str) -> Iterator[_Row | _Fault]:
    # Not splitlines: JSON text may hold other line separators unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            yield _Fault(str(number), "is no JSON; the row is left out")
            continue
        is_row = isinstance(value, dict)
        yield _row(number, value) if is_row else _Fault(str(number), "is no JSON object; the row is left out")


def _csv_rows(text: str) -> Iterator[_Row | _Fault]:
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    first, _, rest = text.partition("\n")
    skipped = 0
    if first.strip().lower().startswith("sep="):
        # Excel's own way to name the delimiter.
        text, skipped, first = rest, 1, rest.partition("\n")[0]
    delimiter = next((one for one in _DELIMITERS if _is_header(_cells(first, one))), None)
    if delimiter is None:
        yield _Fault("", f"the first line must name the columns, such as file_name,text; it is {first.strip()[:80]!r}")
        return
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    header: list[str] = []
    try:
        for cells in reader:
            if not header:
                header = [cell.strip().lower() for cell in cells]
            elif any(cell.strip() for cell in cells):
                yield _csv_row(reader.line_num + skipped, header, cells)
    except csv.Error as error:
        yield _Fault(str(reader.line_num + skipped), f"can't be read ({error}); nothing below it is used")


def _csv_row(line: int, header: Sequence[str], cells: Sequence[str]) -> _Row | _Fault:
    if len(cells) != len(header):
        what = f"has {len(cells)} cells where the first line has {len(header)}; put captions in quotes"
        return _Fault(str(line), f"{what}. The row is left out")
    return _row(line, dict(zip(header, cells, strict=True)))


def _cells(line: str, delimiter: str) -> list[str]:
    return [cell.strip().strip('"').lower() for cell in line.split(delimiter)]


def _is_header(cells: Sequence[str]) -> bool:
    return any(cell in _FILE_COLUMNS for cell in cells) and any(_TEXT_COLUMN.fullmatch(cell) for cell in cells)


def _row(line: int, fields: Mapping[str, Any]) -> _Row | _Fault:
    named = {str(key).strip().lower(): value for key, value in fields.items()}
    file = next((named[key] for key in _FILE_COLUMNS if isinstance(named.get(key), str)), "").strip()
    if not file:
        return _Fault(str(line), "has no file_name; the row is left out")
    texts = [text for key, value in named.items() if _TEXT_COLUMN.fullmatch(key) for text in _texts(value)]
    if not texts:
        return _Fault(str(line), "has no text or caption; the row is left out")
    # A blank cell beside others is no caption of its own.
    return _Row(line, file, tuple(dict.fromkeys(text for text in texts if text)) or ("",))


def _texts(value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    # JSON can spell halves of characters, which no text encoder takes.
    return [text.strip().encode("utf-8", "replace").decode("utf-8") for text in values if isinstance(text, str)]
