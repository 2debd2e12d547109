"""Tests that import the host's own modules; ``dev.py test`` runs them in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOST = Path(os.environ["LOWVRAM_HOST"])


def _enter_host() -> None:
    """Put the host first on the path, as its own main.py does, and choose the CPU before torch is asked."""
    sys.path[:0] = [str(HOST), str(Path(__file__).parent)]
    import comfy.cli_args

    comfy.cli_args.args.cpu = True


def _load_pack() -> ModuleType:
    """Load the pack the way the host does: by file, under a name that is no package path."""
    spec = importlib.util.spec_from_file_location(
        "pack under test", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pack under test"] = module
    spec.loader.exec_module(module)
    return module


_enter_host()


@pytest.fixture(scope="session")
def pack() -> ModuleType:
    """The pack as the host loads it."""
    return _load_pack()
