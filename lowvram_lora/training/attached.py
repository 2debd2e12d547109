"""The host's network in a state fit for training, for as long as it lasts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..adapters.attach import Adapters, adapted_forwards
from ..memory.chunks import PART_ROWS, chunked_forwards
from ..memory.frozen import BlockMemory, frozen, frozen_forward, matrices, usable_parameters
from ..memory.meter import Observe
from ..memory.recompute import WORTH_MOVING_BYTES, Recompute, RecomputedBlock, learned, recomputed
from ..memory.setting import Setting
from ..memory.stream import Streamed
from ..ports import Denoiser, Transfers, WeightSource


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How a network is run: everything but the network and what it is trained for.

    Attributes:
        setting: what decides memory and time.
        transfers: to the device; None where the weights are where the network computes.
        writes_in_place: by block, where it is known.
        observe: entered around each run of a block.
        worth_moving_bytes: smaller inputs of blocks stay on the device, whatever the setting says.
        part_rows: tokens of a part of a feed-forward.
    """

    setting: Setting = field(default_factory=Setting)
    transfers: Transfers | None = None
    writes_in_place: Mapping[str, bool] = field(default_factory=dict)
    observe: Observe | None = None
    worth_moving_bytes: int = WORTH_MOVING_BYTES
    part_rows: int = PART_ROWS


@dataclass(frozen=True, kw_only=True)
class Engaged:
    """What can be asked while a network is attached.

    Attributes:
        streamed: what weights pass through on their way to the device; None where they stay where they are.
        blocks: the stand-ins of the blocks, by path.
    """

    streamed: Streamed | None
    blocks: Mapping[str, RecomputedBlock]

    def begin(self) -> None:
        """Learn that a pass through the network begins."""
        if self.streamed is not None:
            self.streamed.begin()

    def writes_in_place(self) -> dict[str, bool]:
        """Return by path which blocks write in place, of those that have run."""
        return learned(self.blocks.values())


@contextmanager
def attached(
    denoiser: Denoiser, layers: dict[str, nn.Module], adapters: Adapters, dtype: torch.dtype, engine: Engine
) -> Iterator[Engaged]:
    """Hold the host's network in a state fit for training; every module is as before on every way out."""
    network, setting = denoiser.network, engine.setting
    with ExitStack() as undo:
        undo.enter_context(denoiser.training(dtype))
        undo.enter_context(usable_parameters(network, dtype, denoiser.device, denoiser.weights))
        streamed = _streamed(denoiser, engine, undo)
        source: WeightSource = denoiser.weights if streamed is None else streamed
        memory = BlockMemory(source)
        forwards: dict[nn.Module, Any] = {module: frozen_forward(module, memory) for _, module in matrices(network)}
        forwards.update(adapted_forwards(layers, adapters, memory))
        undo.enter_context(frozen(forwards))
        how = Recompute(
            kept=setting.kept,
            transfers=engine.transfers if setting.inputs_in_ram else None,
            keep_convolutions=setting.keep_convolutions,
            writes_in_place=engine.writes_in_place,
            observe=engine.observe,
            worth_moving_bytes=engine.worth_moving_bytes,
        )
        blocks = dict(recomputed(network, memory, denoiser.device, layers, how))
        undo.enter_context(frozen(dict(blocks)))
        anchor = next((block.shared.anchor for block in blocks.values()), None)
        if anchor is not None:
            chunked = chunked_forwards(network, setting.chunked, layers, anchor, engine.part_rows)
            undo.enter_context(frozen(chunked))
        yield Engaged(streamed=streamed, blocks={block.name: block for block in blocks.values()})


def _streamed(denoiser: Denoiser, engine: Engine, undo: ExitStack) -> Streamed | None:
    if engine.transfers is None:
        return None
    return undo.enter_context(Streamed(denoiser.weights, engine.transfers, denoiser.network, engine.setting))
