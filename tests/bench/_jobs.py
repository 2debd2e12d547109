"""Jobs of ours at full size, without a device, and the ledger of one step of each in any setting."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.bench import _full_size
from tests.bench.memory import LARGE

Model = Callable[[str], Any]
"""Family to the host's MODEL without data."""


@dataclass(frozen=True)
class Case:
    """A job: square pictures, adapters on attention alone.

    Attributes:
        side: of the latents; an eighth of the picture's pixels.
        text_rows: tokens of each caption.
        train: other fields of ``TrainConfig``.
    """

    family: str
    batch: int
    side: int
    text_rows: int
    rank: int = 32
    train: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What it is, in words."""
        return (
            f"{self.family}, batch {self.batch}, {8 * self.side} px, {self.text_rows} text tokens, rank {self.rank}, "
            "attention"
        )


@dataclass(frozen=True)
class Ours:
    """A job of ours, and what settings are made of.

    Attributes:
        layers: those that are adapted.
        blocks: paths of all blocks.
        matrices: paths of all layers whose weights may stay on the device.
        ring_bytes: of the smallest ring.
        writes_in_place: by block, as the first step has found out.
    """

    core: Any
    job: Any
    layers: Any
    blocks: frozenset[str]
    matrices: frozenset[str]
    ring_bytes: int
    writes_in_place: dict[str, bool] = field(default_factory=dict)

    def counter(self, **setting: Any) -> Any:
        """Return the ledger of a step in the ``Setting`` of these fields."""
        prepare = self.core.training.prepare
        prepared = prepare.Prepared(
            config=self.job.config,
            precision="bf16",
            samples=prepare.samples_of(self.job),
            setting=self.core.memory.setting.Setting(**setting),
            wishes=prepare.wishes_of(self.job.config, "bf16"),
            device=prepare.device_facts(self.job),
            writes_in_place=self.writes_in_place,
        )
        run = prepare.simulated(self.job, self.layers, prepared)
        self.writes_in_place.update(run.writes_in_place)
        return run.counter

    def space(self) -> tuple[Any, Any]:
        """Return all lossless ways to run the job, as a plan is chosen from them, and the device."""
        prepare = self.core.training.prepare
        device = prepare.device_facts(self.job)
        facts, _ = prepare.facts_of(self.job, self.layers, "bf16", device)
        return self.core.memory.search.Space(facts, device.rates, True, torch.float32, torch.float32), device


@contextmanager
def opened(pack: Any, case: Case, model: Model = _full_size.model) -> Iterator[Ours]:
    """Yield the job of ``case``; its files are gone afterwards."""
    core = core_of(pack)
    with tempfile.TemporaryDirectory() as folder:
        job = _job(pack, case, model(case.family), Path(folder))
        network = job.denoiser.network
        yield Ours(
            core=core,
            job=job,
            layers=core.adapters.targets.select(network, job.config.lora.targets),
            blocks=frozenset(core.memory.recompute.find_blocks(network)),
            matrices=frozenset(path for path, _ in core.memory.frozen.matrices(network)),
            ring_bytes=core.training.estimate.smallest_ring(job.denoiser),
        )


def core_of(pack: Any) -> Any:
    """Return the core of the pack, with the parts that no node has imported."""
    core = pack.lowvram_lora
    for name in ("fakes", "memory.simulate", "memory.search", "memory.setting", "training.prepare"):
        importlib.import_module(f"{core.__name__}.{name}")
    return core


def _job(pack: Any, case: Case, patcher: Any, folder: Path) -> Any:
    core = pack.lowvram_lora
    index = _full_size.cache(pack, case.family, 8 * case.side, case.batch, folder, case.text_rows)
    lora = core.config.LoraConfig(rank=case.rank, alpha=case.rank, targets="attention")
    return core.training.job.Job(
        denoiser=pack.nodes._models.HostDenoiser(patcher),
        recipe=core.data.batches.BatchRecipe(index, core.config.SamplerConfig(batch_size=case.batch)),
        config=core.config.TrainConfig(precision="bf16", lora=lora, **case.train),
        hardware=core.fakes.FakeHardware(available_bytes=LARGE, total_bytes=LARGE),
        cancel=core.fakes.FakeCancel(),
        loras_root=folder,
        store=core.training.record.RunStore(folder / "runs"),
    )
