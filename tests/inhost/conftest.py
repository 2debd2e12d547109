"""Tests that import the host's own modules; ``dev.py test`` runs them in a process of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

# Before the host is on the path: it has a package of this name, too.
import tests.toyworld  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
HOST = Path(os.environ["LOWVRAM_HOST"])


def _enter_host() -> None:
    """Put the host first on the path, as its own main.py does, and choose the CPU before torch is asked."""
    sys.path[:0] = [str(HOST), str(Path(__file__).parent)]
    import comfy.cli_args

    comfy.cli_args.args.cpu = True


_enter_host()


@pytest.fixture(scope="session")
def pack() -> ModuleType:
    """The pack as the host loads it."""
    from pack import load_pack

    return load_pack(ROOT)
