"""How a step runs: what decides its memory and its time."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run a training step.

    Nothing here but the two dtypes changes what is trained. Micro-batches and parts of feed-forwards change the order
    of sums, all else not one bit.

    Attributes:
        resident: paths of the layers whose weights stay on the device, as our own copies.
        kept: paths of the blocks that keep their activations; all others run again in the backward pass.
        chunked: paths of the blocks whose feed-forward runs in parts, and again in the backward pass.
        ring_bytes: device memory that the other layers' weights pass through.
        staging_bytes: page-locked RAM that they pass through before; 0 copies from where they are.
        micro_batch: samples that go through the network at once; 0 for the whole batch.
        inputs_in_ram: the inputs that recomputed blocks keep wait in RAM.
        optimizer_in_ram: the optimizer's state waits in RAM while gradients are computed.
        keep_convolutions: a recomputed block keeps what its frozen convolutions gave instead of running them twice.
        adapter_dtype: of the trained parameters and their gradients.
        optimizer_dtype: of the optimizer's state.
    """

    resident: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    chunked: frozenset[str] = frozenset()
    ring_bytes: int = 0
    staging_bytes: int = 0
    micro_batch: int = 0
    inputs_in_ram: bool = False
    optimizer_in_ram: bool = False
    keep_convolutions: bool = True
    adapter_dtype: torch.dtype = torch.float32
    optimizer_dtype: torch.dtype = torch.float32
