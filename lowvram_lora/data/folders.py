"""Folders datasets may be read from, and the files in them. Nothing outside the roots is ever opened."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import PathError

_IGNORED = ("__macosx", "thumbs.db", "desktop.ini")
MAX_PART_BYTES = 255
_NUMBERED = re.compile(r"([0-9]+)_")
_HOW_TO_ADD = (
    "To allow another folder, add it under 'datasets:' in ComfyUI's extra_model_paths.yaml, for example\n"
    "  my_datasets:\n    datasets: /path/to/my datasets\nand restart ComfyUI."
)


@dataclass(frozen=True)
class Listing:
    """The files below a folder.

    Attributes:
        files: in natural order (img2 before img10), the same on every machine.
        refused: ``(path, reason)`` of what was left out.
    """

    files: tuple[Path, ...]
    refused: tuple[tuple[Path, str], ...]


def resolve_folder(typed: str, roots: Sequence[Path]) -> Path:
    """Return the folder the user means.

    Quotes, outer spaces and trailing slashes are dropped. A relative name is tried under each root in order;
    an absolute one must lie inside a root, links followed.

    Raises:
        PathError: no such folder inside a root; the message lists what was tried and the roots.
    """
    text = typed.strip().strip("\"'").strip()
    if not text:
        raise PathError("folder", f"no folder is given. Type the name of one.\n{_allowed(roots)}")
    if not _can_be_path(text):
        raise PathError(ascii(text[:80]), f"this can't be a folder's name. Type another.\n{_allowed(roots)}")
    if ".." in re.split(r"[/\\]", text):
        raise PathError(text, f"'..' is not allowed in folder. Type the full path.\n{_allowed(roots)}")
    tried = _candidates(text, roots)
    for candidate in tried:
        if candidate.is_dir() and is_inside(candidate, roots):
            return candidate
    raise PathError(", ".join(map(str, tried)), f"{_why_unusable(tried, roots)}\n{_allowed(roots)}")


def is_inside(path: Path, roots: Sequence[Path]) -> bool:
    """Return whether ``path``, links followed, lies in one of ``roots``."""
    try:
        real = path.resolve()
        return any(real.is_relative_to(root.resolve()) for root in roots)
    except (OSError, RuntimeError, ValueError):
        return False  # a link to itself, or no name that the system can hold


def list_files(folder: Path, roots: Sequence[Path]) -> Listing:
    """Return every file below ``folder``, in natural order.

    Dot-files and what macOS and Windows leave behind are passed over without a word. Links are followed
    where they stay inside ``roots``. The time grows with the number of files, not faster.
    """
    files: list[Path] = []
    refused: list[tuple[Path, str]] = []
    visited: set[Path] = set()
    pending = [folder]
    while pending:
        here = pending.pop()
        real = here.resolve()
        if real in visited:
            continue
        visited.add(real)
        for child, reason, is_folder in _children(here, roots):
            if reason:
                refused.append((child, reason))
            elif is_folder:
                pending.append(child)
            else:
                files.append(child)
    in_order = sorted(files, key=lambda path: natural_key(path.relative_to(folder).parts))
    return Listing(tuple(in_order), tuple(sorted(refused)))


def numbered_folder(file: Path, folder: Path) -> tuple[str, int]:
    """Return the name and number of the nearest ``N_name`` folder above ``file``, up to ``folder`` itself.

    Without one, the name of the folder the file is in, and 1.
    """
    above = (folder.name, *file.relative_to(folder).parts[:-1])
    for name in reversed(above):
        match = _NUMBERED.match(name)
        if match:
            return name, int(match[1])
    return above[-1], 1


def _candidates(text: str, roots: Sequence[Path]) -> list[Path]:
    if Path(text).is_absolute():
        return [Path(os.path.abspath(text))]
    return [Path(os.path.abspath(root / text.replace("\\", "/"))) for root in roots]


def _can_be_path(text: str) -> bool:
    """Return whether a file system can be asked for ``text``: no control characters, no halves, no endless part."""
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text):
        return False
    return all(len(part.encode("utf-8")) <= MAX_PART_BYTES for part in re.split(r"[/\\]", text))


def _why_unusable(tried: Sequence[Path], roots: Sequence[Path]) -> str:
    inside = [path for path in tried if is_inside(path, roots)]
    # Whether a path outside exists is nobody's business: the page may be open to others.
    if not inside:
        return "this lies outside the folders datasets may be read from (links are followed)."
    if any(path.is_file() for path in inside):
        return "this is a file; folder must name the folder it is in."
    return "no such folder. Make it and put your pictures there, or type the name of another one."


def _allowed(roots: Sequence[Path]) -> str:
    listed = "\n".join(f"- {root}" for root in roots)
    return f"Datasets may be read from:\n{listed}\n{_HOW_TO_ADD}"


def _children(here: Path, roots: Sequence[Path]) -> Iterator[tuple[Path, str, bool]]:
    """Yield what is in ``here``, the reason to refuse it or an empty one, and whether it is a folder."""
    try:
        with os.scandir(here) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        yield here, f"this folder can't be opened ({error.strerror or error})", True
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name.casefold() in _IGNORED:
            continue
        is_folder = _is_so(entry.is_dir)
        # A plain file is where its folder is. Folders are few, and Windows has links that do not look like one.
        if (is_folder or entry.is_symlink()) and not is_inside(here / entry.name, roots):
            reason = "a link that leads outside the folders datasets may be read from"
        else:
            reason = "" if is_folder or _is_so(entry.is_file) else "not a file, or a link to nothing"
        yield here / entry.name, reason, is_folder


def _is_so(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError:
        return False  # a link to itself, or gone since it was listed


def natural_key(parts: Sequence[str]) -> tuple[tuple[tuple[str | int, ...], ...], tuple[str, ...]]:
    """Return what sorts the parts of a path as people do: img2 before img10, upper and lower case alike."""
    return tuple(_natural_part(part) for part in parts), tuple(parts)


def _natural_part(part: str) -> tuple[str | int, ...]:
    # The split alternates text, digits, text: a number is only ever compared with a number.
    pieces = re.split(r"([0-9]+)", unicodedata.normalize("NFC", part).casefold())
    return tuple(int(piece) if index % 2 else piece for index, piece in enumerate(pieces))
