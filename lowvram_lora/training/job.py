"""Everything a run needs from outside."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..config import TrainConfig
from ..data.batches import BatchRecipe
from ..ports import Cancel, Denoiser, Hardware, Transfers
from .record import RunStore

LOG = logging.getLogger(__name__)


def _no_transfers(staging_bytes: int) -> Transfers | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a run needs from outside.

    Attributes:
        transfers: makes the way to the device, with so many bytes of page-locked RAM; gives None where weights are
            where the network computes.
        say: takes a sentence for the user about a run that ends early; an event can't carry it any more then.
    """

    denoiser: Denoiser
    recipe: BatchRecipe
    config: TrainConfig
    hardware: Hardware
    cancel: Cancel
    loras_root: Path
    store: RunStore
    say: Callable[[str], None] = LOG.warning
    transfers: Callable[[int], Transfers | None] = _no_transfers
