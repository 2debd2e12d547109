"""What the checks run on: a card, or in a rehearsal CPU memory that plays one."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowvram_lora.fakes import LateTransfers
from lowvram_lora.memory.simulate import LiveBytes

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Layout:
    """A network to train on.

    Attributes:
        family: one of ``_full_size.FAMILIES``.
        resolution: of the pictures, pixels a side.
        changes: what of the family's sizes is different.
    """

    family: str
    resolution: int
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the checks are.

    Attributes:
        cap_bytes: the ceiling that is tried.
        copied_bytes: of the tensors whose copies are timed, ``num_copied`` of them.
        staging_bytes: page-locked RAM that they pass through.
        steps: of a run; the first one is not timed.
    """

    layouts: tuple[Layout, ...]
    cap_bytes: int
    copied_bytes: int
    num_copied: int
    staging_bytes: int
    steps: int


class Card:
    """A CUDA device, through the pack's own services of the host."""

    is_real = True
    sizes = Sizes(
        layouts=(Layout("sd15", 512), Layout("sdxl", 1024)),
        cap_bytes=512 * MIB,
        copied_bytes=16 * MIB,
        num_copied=48,
        staging_bytes=256 * MIB,
        steps=5,
    )

    def __init__(self, pack: Any) -> None:
        self._host = pack.nodes._host
        self.device: torch.device = self._host.compute_device()

    def describe(self) -> dict[str, Any]:
        """Return what the numbers depend on."""
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "device": properties.name,
            "device_mib": properties.total_memory // MIB,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda or torch.version.hip,
            "allocator": torch.cuda.get_allocator_backend(),
        }

    @property
    def ceiling_counts(self) -> str:
        """Name of the count that the allocator's ceiling is for: cudaMallocAsync's holds for what is in use alone."""
        return "device_reserved" if torch.cuda.get_allocator_backend() == "native" else "device_allocated"

    def hardware(self, network: Any = None) -> Any:
        """Return the ``Hardware`` that training gets."""
        return self._host.ProcessHardware(self.device)

    def transfers(self, staging_bytes: int = 0) -> Any:
        """Return the ``Transfers`` that training gets."""
        return self._host.transfers(self.device, staging_bytes)

    def page_locked(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies in page-locked RAM."""
        return [tensor.pin_memory() for tensor in tensors]

    def in_use(self) -> dict[str, int]:
        """Return the bytes of all tensors on the device, and what the allocator holds for them, by name."""
        allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        return {"device_allocated": allocated, "device_reserved": reserved}

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        torch.cuda.synchronize(self.device)

    def tidy(self) -> None:
        """Give all memory back that nothing refers to."""
        gc.collect()
        self.synchronize()
        torch.cuda.empty_cache()


# A U-Net of two levels, 64 channels wide.
_TINY = {
    "model_channels": 64,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1],
    "transformer_depth_middle": 1,
}


class Rehearsal:
    """The CPU in the place of a card: every tensor counts as device memory, and every mistake in copying shows."""

    is_real = False
    ceiling_counts = "device_reserved"
    sizes = Sizes(
        layouts=(Layout("sd15", 128, {**_TINY, "num_heads": 4}), Layout("sdxl", 128, _TINY)),
        cap_bytes=8 * MIB,
        copied_bytes=MIB // 4,
        num_copied=8,
        staging_bytes=MIB,
        steps=3,
    )

    def __init__(self, pack: Any) -> None:
        self.device = torch.device("cpu")
        self.counter: CountedBytes | None = None

    def describe(self) -> dict[str, Any]:
        """Return what the numbers depend on."""
        return {"device": "none: a rehearsal on the CPU", "device_mib": CountedHardware.TOTAL // MIB}

    def hardware(self, network: Any = None) -> Any:
        """Return a ``Hardware`` that counts everything but the weights of ``network``."""
        return CountedHardware(self, network)

    def transfers(self, staging_bytes: int = 0) -> Any:
        """Return ``Transfers`` within RAM."""
        return LateTransfers()

    def page_locked(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors: nothing can be page-locked here."""
        return list(tensors)

    def in_use(self) -> dict[str, int]:
        """Return the bytes of all tensors that are counted, by name."""
        live = self.counter.live if self.counter is not None else 0
        return {"device_allocated": live, "device_reserved": live}

    def synchronize(self) -> None:
        """Do nothing: what was asked for is done."""

    def tidy(self) -> None:
        """Let go of what nothing refers to."""
        gc.collect()


Machine = Card | Rehearsal


class CountedBytes(LiveBytes):
    """Counts tensors in RAM and raises out-of-memory, as an allocator with a ceiling does."""

    def __init__(self, limit: int) -> None:
        super().__init__("cpu")
        self._limit = limit

    def add(self, tensor: Tensor) -> None:
        """Count a tensor. Raises ``torch.OutOfMemoryError`` if the limit has no room for it."""
        storage = tensor.untyped_storage()
        is_new = tensor.device.type == "cpu" and storage._cdata not in self._known
        if is_new and self.live + storage.nbytes() > self._limit:
            raise torch.OutOfMemoryError(f"out of memory: {storage.nbytes()} more bytes, {self.live} are live")
        super().add(tensor)


class CountedHardware:
    """A ``Hardware`` of counted bytes; it counts while it is capped, as a planned run is."""

    TOTAL = 64 * GIB

    def __init__(self, machine: Rehearsal, network: Any) -> None:
        self._machine = machine
        self._kept = [] if network is None else [*network.parameters(), *network.buffers()]

    def sample(self) -> dict[str, int]:
        """Return the peak since the last sample."""
        counter = self._machine.counter
        if counter is None:
            return dict.fromkeys(("ram", "device_allocated", "device_reserved"), 0)
        peak, counter.peak = counter.peak, counter.live
        return {"ram": 0, "device_allocated": peak, "device_reserved": peak, "device_total": self.TOTAL}

    def available(self) -> int:
        """Return the made-up card's bytes."""
        return self.TOTAL

    def total(self) -> int:
        """Return the made-up card's bytes."""
        return self.TOTAL

    def ram_available(self) -> int:
        """Return enough."""
        return self.TOTAL

    @contextmanager
    def capped(self, num_bytes: int) -> Iterator[None]:
        """Count, and raise above ``num_bytes``, until the context ends; for no less than there is, do nothing."""
        if num_bytes >= self.TOTAL:
            yield
            return
        counter = CountedBytes(num_bytes)
        for tensor in self._kept:
            counter.ignore(tensor)
        self._machine.counter = counter
        try:
            with counter:
                yield
        finally:
            self._machine.counter = None

    def release_cached(self) -> None:
        """Do nothing: nothing is held for later."""
