"""Loads the pack the way the host does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

NAME = "pack under test"


def load_pack(root: Path) -> ModuleType:
    """Load the pack at ``root`` by file, under a name that is no package path, as the host does."""
    spec = importlib.util.spec_from_file_location(NAME, root / "__init__.py", submodule_search_locations=[str(root)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module
