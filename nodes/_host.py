"""Services of the host: folders, progress, interrupt, memory.

This file and ``_models.py`` are the only ones that use the host beyond its public node API.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import comfy.model_management
import comfy.utils
import folder_paths
import numpy as np
import numpy.typing as npt
import torch
from comfy_api.latest import io, ui

from ..lowvram_lora.ports import Transfers
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


def measures_root() -> Path:
    """Return the folder that holds what is known of pictures by their content."""
    return cache_root() / "measures"


def images_root() -> Path:
    """Return the folder that holds images from other nodes as files; the host empties it when it starts."""
    return Path(folder_paths.get_temp_directory()) / "lowvram_lora" / "images"


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


def reported(
    *values: Any, report: str, node_id: str | None, picture: npt.NDArray[np.uint8] | None = None
) -> io.NodeOutput:
    """Return a node's outputs with ``report`` as the last; show it on the node and keep it in the history.

    Args:
        picture: RGB ``[H, W, 3]``; it comes after the report, as an IMAGE, and is shown too.
    """
    LOG.info("%s", report)
    if node_id is not None:
        _send_text(report, node_id)
    shown = report.encode("utf-8", "replace").decode("utf-8")
    if picture is None:
        return io.NodeOutput(*values, shown, ui=ui.PreviewText(shown))
    image_BHWC = torch.from_numpy(picture).float().div(255.0)[None]
    seen = {**ui.PreviewText(shown).as_dict(), **ui.PreviewImage(image_BHWC).as_dict()}
    return io.NodeOutput(*values, shown, image_BHWC, ui=seen)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave the inference mode that the host runs every prompt in, and stop recording gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def run_store() -> RunStore:
    """Return the store of finished runs."""
    return RunStore(runs_root())


# More than any device has: the host's own way to ask for all there is.
_EVERYTHING = 1e18


def has_own_memory(device: torch.device) -> bool:
    """Return whether ``device`` has memory beside the RAM, and torch counts what is taken of it."""
    return hasattr(getattr(torch, device.type, None), "memory_allocated")


def load_model(patcher: Any, room: int | None) -> None:
    """Load a model by the host's own means, so that its patches act and the host knows where it is.

    Args:
        room: device bytes that are needed beside the model, whose weights then stay in RAM. None, or a device without
            memory of its own, leaves it to the host where the weights are.
    """
    management = comfy.model_management
    with torch.inference_mode():
        if room is None or not has_own_memory(patcher.load_device):
            management.load_models_gpu([patcher])
        elif getattr(patcher, "is_dynamic", bool)():
            _load_on_demand(patcher, room)
        else:
            # Nothing of the model goes to the device only if the host thinks that all of it is needed.
            management.load_models_gpu([patcher], memory_required=_EVERYTHING)
            # What was there before, or got there since some hosts load a share of every model in any case.
            patcher.partially_unload(torch.device("cpu"), _EVERYTHING)
            management.soft_empty_cache()


def _load_on_demand(patcher: Any, room: int) -> None:
    """Load a model whose weights the host brings to the device when a layer asks, which training never does."""
    management, device = comfy.model_management, patcher.load_device
    # Pages from earlier use leave; so do small weights, which loading brings back.
    patcher.partially_unload(torch.device("cpu"), _EVERYTHING)
    management.load_models_gpu([patcher], memory_required=room)
    # Other models of this kind would only leave when their pages are claimed, which our memory does not do.
    ours = [loaded for loaded in management.current_loaded_models if loaded.model is patcher]
    management.free_memory(room + management.extra_reserved_memory(), device, keep_loaded=ours)
    management.soft_empty_cache()


def transfers(device: torch.device, staging_bytes: int = 0) -> Transfers | None:
    """Return how tensors get from RAM to ``device`` and back, or None where both are the same memory."""
    if not has_own_memory(device):
        return None
    from ..lowvram_lora.memory.transfers import DeviceTransfers

    return DeviceTransfers(device, staging_bytes)


class ProcessHardware:
    """The core's ``Hardware``: RAM of the process, torch's counters, NVML where there is an NVIDIA card."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_separate = has_own_memory(device)

    def sample(self) -> dict[str, int]:
        """Return byte counts by name; device counts only where there is a device with memory of its own.

        Those of torch are peaks since the last sample or ``reset_peaks``. A training step takes several samples.
        """
        ram = {"ram": self._process.memory_info().rss, "ram_total": self._ram_total}
        return {**ram, **self._torch_memory(), **self._card_memory()}

    @cached_property
    def _process(self) -> Any:
        import psutil

        return psutil.Process()

    @cached_property
    def _ram_total(self) -> int:
        import psutil

        return int(psutil.virtual_memory().total)

    @cached_property
    def _device_total(self) -> int:
        return int(comfy.model_management.get_total_memory(self._device))

    @cached_property
    def _card_memory(self) -> Callable[[], dict[str, int]]:
        return _nvml(self._device)

    def reset_peaks(self) -> None:
        """Let the next sample see only what is used from now on."""
        if self._is_separate:
            torch.get_device_module(self._device).reset_peak_memory_stats(self._device)

    def _torch_memory(self) -> dict[str, int]:
        if not self._is_separate:
            return {}
        # One call instead of two that make this one each.
        stats = torch.get_device_module(self._device).memory_stats(self._device)
        counts = {
            "device_allocated": stats.get("allocated_bytes.all.peak", 0),
            "device_reserved": stats.get("reserved_bytes.all.peak", 0),
            "device_total": self._device_total,
        }
        self.reset_peaks()
        return counts

    def available(self) -> int | None:
        """Return what is free on the device and what loaded models would give up, less the host's reserve."""
        if not self._is_separate:
            return None
        management = comfy.model_management
        leaving = sum(model.loaded_size() for model in self._loaded_models())
        free = management.get_free_memory(self._device) + leaving - management.extra_reserved_memory()
        return max(int(free), 0)

    def _loaded_models(self) -> list[Any]:
        """Return the host's models that are loaded for the device."""
        loaded = comfy.model_management.current_loaded_models
        models = [each.model for each in loaded if each.device == self._device]
        return [model for model in models if model is not None]

    def total(self) -> int | None:
        """Return the device's memory in bytes, or None without a device."""
        return self._device_total if self._is_separate else None

    def ram_available(self) -> int:
        """Return the RAM in bytes that can be taken without paging."""
        import psutil

        return int(psutil.virtual_memory().available)

    @contextmanager
    def capped(self, num_bytes: int) -> Iterator[None]:
        """Let torch's allocator raise out-of-memory ``num_bytes`` above what it holds now; where it can't, do nothing.

        What is there already is not the run's: models of the host that have stayed, tensors of other packs.
        """
        total = self.total()
        backend = torch.get_device_module(self._device) if self._is_separate else None
        limit: Callable[..., None] | None = getattr(backend, "set_per_process_memory_fraction", None)
        if limit is None or not total:
            yield
            return
        # Memory that is only held for later counts as well.
        self.release_cached()
        num_bytes += int(backend.memory_reserved(self._device)) if backend is not None else 0
        try:
            limit(min(num_bytes / total, 1.0), self._device)
        except RuntimeError as error:
            LOG.warning("torch's allocator takes no limit here: %s", error)
            yield
            return
        try:
            yield
        finally:
            limit(1.0, self._device)

    def release_cached(self) -> None:
        """Give memory that the allocator holds for later back to the device."""
        comfy.model_management.soft_empty_cache()


def _nvml(device: torch.device) -> Callable[[], dict[str, int]]:
    """Return what counts the memory of an NVIDIA card, that of all processes; it counts nothing on another device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return dict
    try:
        import pynvml
    except ImportError:
        return dict
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except (pynvml.NVMLError, AttributeError):
        return dict

    def count() -> dict[str, int]:
        try:
            info = pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError:
            return {}
        return {"card_used": int(info.used), "card_total": int(info.total)}

    return count


def compute_device() -> torch.device:
    """Return the device the host computes on."""
    return comfy.model_management.get_torch_device()
