"""What a plan must respect: the user's wishes and the device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..units import GIB
from .pace import Rates


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The settings of a run that a plan depends on.

    Attributes:
        vram_budget_gb: GiB; 0 for what is free.
        recompute: whether blocks may run again instead of keeping their activations.
        allow_lossy: whether changes of the trained numbers may be made where nothing else fits.
        rank: of the adapters; 0 does not offer a lower one.
        precision: of the arithmetic: ``bf16``, ``fp16`` or ``fp32``.
    """

    vram_budget_gb: float = 0.0
    recompute: bool = True
    allow_lossy: bool = False
    rank: int = 0
    precision: str = "bf16"


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """The device as a run finds it.

    Attributes:
        available: device bytes a run may take: what is free, less the host's reserve. None without a device that has
            memory of its own: nothing is planned there.
        total: the device's memory in bytes, or None if unknown.
        reserve: the part of what is free that is left to the host.
        ram: bytes of RAM that can be taken without paging.
    """

    available: int | None
    total: int | None = None
    reserve: int = 0
    ram: int
    rates: Rates = field(default_factory=Rates)


def ceiling(wishes: Wishes, device: DeviceFacts) -> int | None:
    """Return the bytes a plan must fit into: the budget, or what is available if that is less; None for no device."""
    if device.available is None:
        return None
    if not wishes.vram_budget_gb:
        return device.available
    return min(int(wishes.vram_budget_gb * GIB), device.available)


def exceeds_card(wishes: Wishes, device: DeviceFacts) -> bool:
    """Return whether the budget is larger than the card, in the size its maker gives: a driver reports a bit less."""
    return device.total is not None and wishes.vram_budget_gb > math.ceil(device.total / GIB)
