"""What was measured of pictures, on disk by their content, so that no picture is measured twice.

<root>/<settings>/<1 hex>.json   {digest of the picture's file: {measure: value}}

A file that is missing, damaged or not what it should be counts as empty and is written anew.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

LOG = logging.getLogger(__name__)

Value = float | str
Row = dict[str, Value]
T = TypeVar("T")

_LOCK_WAIT_S = 10.0
_SHARDS = "0123456789abcdef"


class MeasuredStore:
    """Rows of measures on disk, shared by all datasets and processes.

    It only saves time: where its folder can't be read or written, pictures are measured again, and the log says why.
    """

    def __init__(self, root: Path, settings: str) -> None:
        """Use the folder for ``settings``, a digest of what the measures depend on beside the picture."""
        self._folder = root / settings

    def known(self, image_digests: Collection[str]) -> dict[str, Row]:
        """Return the rows of those pictures that have one."""
        found: dict[str, Row] = {}
        for shard, digests in _by_shard({digest: digest for digest in image_digests}).items():
            rows = _read(self._path(shard))
            found |= {digest: rows[digest] for digest in digests if digest in rows}
        return found

    def everything(self) -> dict[str, Row]:
        """Return all rows."""
        found: dict[str, Row] = {}
        for shard in _SHARDS:
            found |= _read(self._path(shard))
        return found

    def add(self, rows: Mapping[str, Row]) -> None:
        """Write ``rows``, by picture digest, beside what other processes have written meanwhile."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self._folder / "lock", timeout=_LOCK_WAIT_S):
                for shard, new in _by_shard(rows).items():
                    content = _merged(_read(self._path(shard)), new)
                    _replace(self._path(shard), json.dumps(content).encode("ascii"))
        except (OSError, Timeout, NotImplementedError) as error:  # the last: a disk that knows no locks
            LOG.warning("Measures of pictures are not kept, %s: %s", self._folder, error)

    def _path(self, shard: str) -> Path:
        return self._folder / f"{shard}.json"


def _by_shard(rows: Mapping[str, T]) -> dict[str, dict[str, T]]:
    shards: dict[str, dict[str, T]] = defaultdict(dict)
    for digest, row in rows.items():
        shards[digest[:1]][digest] = row
    return shards


def _merged(old: Mapping[str, Row], new: Mapping[str, Row]) -> dict[str, Row]:
    return {**old, **{digest: {**old.get(digest, {}), **row} for digest, row in new.items()}}


def _read(path: Path) -> dict[str, Row]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {digest: row for digest, row in content.items() if _is_row(row)}


def _is_row(row: object) -> bool:
    return isinstance(row, dict) and all(isinstance(value, float | str) for value in row.values())


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
