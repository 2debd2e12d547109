"""Services of the host: folders, progress, interrupt, memory.

This file and ``_models.py`` are the only ones that use the host beyond its public node API.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import comfy.model_management
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import io, ui

from ..lowvram_lora.training.record import RunStore

LOG = logging.getLogger(__name__)

DATASETS_KEY = "datasets"
CATEGORY = "training/low-VRAM LoRA"


def schema(**fields: Any) -> io.Schema:
    """Build one of the pack's node schemas, leaving out fields that this host's version does not know.

    Every node stands in one category and knows its own id, which ``reported`` and ``Progress`` need.
    """
    known = {f.name for f in dataclasses.fields(io.Schema)}
    fields = {"category": CATEGORY, "hidden": [io.Hidden.unique_id], **fields}
    return io.Schema(**{name: value for name, value in fields.items() if name in known})


def choice(name: str, literal: Any, default: str, tooltip: str, optional: bool = False) -> Any:
    """Return a widget that offers the values of ``literal``, a setting's type, so that the two can't differ."""
    return io.Combo.Input(name, options=list(get_args(literal)), default=default, tooltip=tooltip, optional=optional)


def dataset_roots() -> tuple[Path, ...]:
    """Return the folders datasets may be read from: the input folder, then every ``datasets`` path.

    Users list more under ``datasets:`` in the host's ``extra_model_paths.yaml``.
    """
    listed = folder_paths.folder_names_and_paths.get(DATASETS_KEY, ([], set()))[0]
    return tuple(Path(root) for root in (folder_paths.get_input_directory(), *listed))


def cache_root() -> Path:
    """Return the folder that holds cached latents and conditioning."""
    return Path(folder_paths.get_user_directory()) / "lowvram_lora" / "cache"


def runs_root() -> Path:
    """Return the folder that holds the records of finished runs."""
    return Path(folder_paths.get_user_directory()) / "lowvram_lora" / "runs"


def loras_root() -> Path:
    """Return the first registered LoRA folder."""
    return Path(folder_paths.get_folder_paths("loras")[0])


def check_interrupt() -> None:
    """Raise the host's interrupt if the user pressed Cancel."""
    comfy.model_management.throw_exception_if_processing_interrupted()


class InterruptButton:
    """The host's Cancel as the core's ``Cancel`` port."""

    def check(self) -> None:
        """Raise the host's interrupt if the user pressed Cancel."""
        check_interrupt()


class Progress:
    """A node's progress bar and the line of text under it."""

    def __init__(self, total: int, node_id: str | None) -> None:
        self._bar = comfy.utils.ProgressBar(total, node_id=node_id)
        self._node_id = node_id

    def update(self, value: int, text: str = "") -> None:
        """Move the bar to ``value`` and show ``text`` on the node. Raises the interrupt on Cancel."""
        self._bar.update_absolute(value)
        if text and self._node_id is not None:
            _send_text(text, self._node_id)

    def say(self, text: str) -> None:
        """Show ``text`` on the node and in the log, where the bar stays."""
        LOG.warning("%s", text)
        if self._node_id is not None:
            _send_text(text, self._node_id)


def _send_text(text: str, node_id: str) -> None:
    import server

    instance = getattr(server.PromptServer, "instance", None)
    if instance is not None:
        # File names may hold halves of characters, which no message can carry.
        instance.send_progress_text(text.encode("utf-8", "replace").decode("utf-8"), node_id)


def reported(*values: Any, report: str, node_id: str | None) -> io.NodeOutput:
    """Return a node's outputs with ``report`` as the last; show it on the node and keep it in the history."""
    LOG.info("%s", report)
    if node_id is not None:
        _send_text(report, node_id)
    shown = report.encode("utf-8", "replace").decode("utf-8")
    return io.NodeOutput(*values, shown, ui=ui.PreviewText(shown))


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave the inference mode that the host runs every prompt in, and stop recording gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def run_store() -> RunStore:
    """Return the store of finished runs."""
    return RunStore(runs_root())


class ProcessHardware:
    """The core's ``Hardware``: RAM of the process, torch's counters, NVML where there is an NVIDIA card."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def sample(self) -> dict[str, int]:
        """Return byte counts by name; device counts only where there is a device with memory of its own."""
        return {**_process_memory(), **_torch_memory(self._device), **_nvml_memory(self._device)}


def _process_memory() -> dict[str, int]:
    import psutil

    process = psutil.Process()
    info = process.memory_info()
    return {"ram": info.rss, "ram_total": psutil.virtual_memory().total}


def _torch_memory(device: torch.device) -> dict[str, int]:
    backend = getattr(torch, device.type, None)
    if not hasattr(backend, "memory_allocated"):
        return {}
    # The peaks since the last sample, so that what a step needs for a moment is seen; counters then start again.
    counts = {
        "device_allocated": backend.max_memory_allocated(device),
        "device_reserved": backend.max_memory_reserved(device),
        "device_total": comfy.model_management.get_total_memory(device),
    }
    backend.reset_peak_memory_stats(device)
    return counts


def _nvml_memory(device: torch.device) -> dict[str, int]:
    if device.type != "cuda" or torch.version.cuda is None:
        return {}
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except (pynvml.NVMLError, AttributeError):
        return {}
    return {"card_used": info.used, "card_total": info.total}


def compute_device() -> torch.device:
    """Return the device the host computes on."""
    return comfy.model_management.get_torch_device()
