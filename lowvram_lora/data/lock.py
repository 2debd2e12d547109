"""Several processes on one cache: who encodes what, and what is in use.

No lock is needed for the cache to be right: files come into being by a rename, and what has the same name has the same
content. Locks save work (what one process encodes, another waits for) and keep the clean-up off what a run still
reads. They are the operating system's, so a process that dies leaves none behind. Where the file system knows no locks,
work may be done twice.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

_LOCKS = "locks"
_IN_USE = "in_use"
_ASK_AGAIN_S = 0.2


@contextmanager
def claimed(root: Path, key: str, waiting: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold the claim to encode ``key`` until the context ends; yield whether it could be had.

    Args:
        waiting: called every now and then while another process holds the claim, which is then waited for; may raise.
            None does not wait.
    """
    # A few files for all keys: two keys of one file wait for each other, which does no harm.
    lock = FileLock(root / _LOCKS / f"{key[:2]}.lock")
    is_held = _acquire(lock, waiting)
    try:
        yield is_held
    finally:
        lock.release()


def _acquire(lock: FileLock, waiting: Callable[[], None] | None) -> bool:
    while True:
        try:
            Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0 if waiting is None else _ASK_AGAIN_S)
        except Timeout:
            if waiting is None:
                return False
            waiting()
        except (OSError, RuntimeError):
            return True
        else:
            return True


class Lease:
    """Says to other processes that the files of some keys are in use, until ``release`` or the process's end."""

    def __init__(self, root: Path, names: Collection[str]) -> None:
        """Take the lease.

        Args:
            names: of files, as in ``Path.name``.
        """
        self._list = root / _IN_USE / f"{secrets.token_hex(8)}.txt"
        # Whichever thread lets go of the last reference releases it.
        self._lock = FileLock(self._list.with_suffix(".lock"), thread_local=False)
        # A folder that can't be written to is not cleaned either.
        with suppress(OSError, RuntimeError):
            self._list.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            # Whole or not at all, for whoever cleans at this moment.
            half = self._list.with_suffix(".half")
            half.write_text("\n".join(names), encoding="utf-8")
            os.replace(half, self._list)
        self.release = weakref.finalize(self, _release, self._lock, self._list)


def _release(lock: FileLock, listed: Path) -> None:
    lock.release()
    for path in (listed, Path(lock.lock_file)):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def names_in_use(root: Path) -> frozenset[str]:
    """Return the names of files that running processes hold leases on; forget the leases of dead ones."""
    names: set[str] = set()
    for listed in (root / _IN_USE).glob("*.txt"):
        lock = FileLock(listed.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except (OSError, RuntimeError):
            with suppress(OSError, ValueError):
                names.update(listed.read_text(encoding="utf-8").split("\n"))
        else:
            _release(lock, listed)
    return frozenset(names)
