"""Fixtures that tests/host and tests/browser share. One ComfyUI serves both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.checkpoint import cached_sd15
from tests.harness.host import HostProcess
from tests.harness.photos import PHOTOS, make_dataset

HOST_KEY = pytest.StashKey[HostProcess]()
DATASET_NAME = "pictures"


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """Return a small random SD 1.5 checkpoint."""
    return cached_sd15()


@pytest.fixture(scope="session")
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> HostProcess:
    """Return a running ComfyUI with the pack, the checkpoint and the ``dataset`` in its input folder."""
    # Two conftest files import this fixture, which makes it two fixtures; the stash keeps it one process.
    stash = request.config.stash
    if HOST_KEY not in stash:
        base = tmp_path_factory.mktemp("host")
        make_dataset(base / "input" / DATASET_NAME, PHOTOS[:3])
        process = HostProcess(base, search_paths={"checkpoints": checkpoint.parent})
        request.config.add_cleanup(process.close)
        process.start()
        stash[HOST_KEY] = process
    return stash[HOST_KEY]


@pytest.fixture(scope="session")
def dataset() -> str:
    """Return what to type into Load Dataset's ``folder``: three photographs, one in ``2_cat``."""
    return DATASET_NAME
