"""The pack's nodes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .cache import BuildTieredCache
from .complexity import ScoreComplexity
from .dataset import LoadDataset
from .monitor import VramMonitor
from .sampler import SparseBatchSampler
from .train import LoraTrain

NODES: tuple[type[io.ComfyNode], ...] = (
    LoadDataset,
    ScoreComplexity,
    BuildTieredCache,
    SparseBatchSampler,
    LoraTrain,
    VramMonitor,
)


class LowVramLora(ComfyExtension):
    """The pack as the host sees it."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return the node classes."""
        return list(NODES)


async def comfy_entrypoint() -> LowVramLora:
    """Return the extension; the host calls this once, when it loads the pack."""
    return LowVramLora()
