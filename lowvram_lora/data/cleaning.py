"""Keeps the cache on disk below a limit: what was not used for the longest time goes first."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from .lock import names_in_use
from .store import KINDS, invalidate, is_encoding, is_temporary

# A temporary file is renamed within seconds; one that is older was left by a process that died.
_DEAD_AFTER_S = 24 * 3600
_FOLDER = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True)
class Cleaned:
    """What a clean-up found and did.

    Attributes:
        num_removed: encodings.
        freed_bytes: of them.
        total_bytes: what the cache takes now.
    """

    num_removed: int
    freed_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class _File:
    path: str
    name: str
    num_bytes: int
    used_at: float


def clean(root: Path, limit_bytes: int, keep: Collection[str] = ()) -> Cleaned:
    """Remove the encodings that were not used for the longest time until the cache takes ``limit_bytes`` at most.

    What is in ``keep`` or in use by another process stays, even if the cache is larger for it. Where something was
    removed, the cache gets a new generation, so that Build Tiered Cache runs again and encodes what it then misses.

    Args:
        limit_bytes: 0 removes nothing but what processes that died have left half-written.
        keep: names of files.

    Raises:
        PathError: something was removed and ``root`` can't be written to any more.
    """
    files = sorted(_files(root), key=lambda file: file.used_at)
    total = sum(file.num_bytes for file in files)
    if not limit_bytes or total <= limit_bytes:
        return Cleaned(0, 0, total)
    kept = {*keep, *names_in_use(root)}
    removed = freed = 0
    for file in files:
        if total - freed <= limit_bytes:
            break
        if file.name not in kept and _remove(file.path):
            removed, freed = removed + 1, freed + file.num_bytes
    if removed:
        invalidate(root)
    return Cleaned(removed, freed, total - freed)


def _files(root: Path) -> Iterator[_File]:
    """Yield every encoding; remove what was never finished. What the cache has not written itself, it leaves alone."""
    for kind in KINDS:
        for folder in _folders(root / kind):
            for entry in _entries(folder):
                try:
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    status = entry.stat(follow_symlinks=False)
                except OSError:  # another process cleans, too
                    continue
                if is_encoding(entry.name) and entry.name[:2] == folder.name:
                    yield _File(entry.path, entry.name, status.st_size, status.st_mtime)
                elif is_temporary(entry.name) and time.time() - status.st_mtime > _DEAD_AFTER_S:
                    _remove(entry.path)


def _folders(kind: Path) -> Iterator[Path]:
    """Yield the folders that encodings are in; no link is followed."""
    if kind.is_symlink():
        return
    for entry in _entries(kind):
        if _FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _remove(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:  # open on Windows, or gone
        return False
    return True
