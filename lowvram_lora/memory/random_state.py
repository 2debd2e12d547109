"""The global generators' state, kept and put back.

A network of the host may draw random numbers of its own (tile sizes, dropout in a patch). Its second run must draw
what the first drew, or the gradient belongs to another function than the loss.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The state of the CPU's generator, and of the device's where it has one."""

    device: torch.device
    cpu: Tensor
    own: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        """Return the present state."""
        own = torch.get_device_module(device).get_rng_state(device) if _has_generator(device) else None
        return cls(device, torch.get_rng_state(), own)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw from this state until the context ends; the generators are then as before."""
        with forked(self.device):
            torch.set_rng_state(self.cpu)
            if self.own is not None:
                torch.get_device_module(self.device).set_rng_state(self.own, self.device)
            yield


@contextmanager
def forked(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Leave the global generators as they were; inside, draw from ``seed`` if there is one."""
    devices = [device] if _has_generator(device) else []
    kind = device.type if devices else "cuda"
    with torch.random.fork_rng(devices=devices, device_type=kind):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def _has_generator(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")
