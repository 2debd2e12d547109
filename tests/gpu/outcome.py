"""What a check has to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.gpu.machine import MIB

# A check fills the numbers and raises where something is not as it should be.
Numbers = dict[str, Any]
Check = Callable[[Numbers], None]
# Beginning of the name of what is no check, but ends a group of them.
END = "after "


class SkippedError(Exception):
    """A check that this machine can't run, with the reason."""


def require(is_so: bool, what: str) -> None:
    """Raise ``AssertionError`` unless ``is_so``."""
    if not is_so:
        raise AssertionError(what)


def mib(num_bytes: float) -> float:
    """Return bytes as MiB."""
    return round(num_bytes / MIB, 1)
