"""Makes the shared fixtures known to the tests of this folder."""

from tests.harness.fixtures import checkpoint, dataset, host

__all__ = ["checkpoint", "dataset", "host"]
