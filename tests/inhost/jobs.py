"""A training job on a tiny host model with a cache of made-up pictures."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny
import torch
from PIL import Image
from torch import Tensor, nn

from lowvram_lora.config import DataConfig, LoraConfig, OptimConfig, SamplerConfig, TrainConfig
from lowvram_lora.data import store
from lowvram_lora.data.batches import BatchRecipe
from lowvram_lora.data.cache import LATENTS, STRUCTURE, CacheEntry, CacheIndex, CachePlan, build
from lowvram_lora.data.encodings import pack
from lowvram_lora.data.scan import scan
from lowvram_lora.events import Event, Finished, Stepped
from lowvram_lora.fakes import FakeCancel, FakeCodec, FakeHardware, FakeTextEncoder, LateTransfers
from lowvram_lora.memory.facts import aligned
from lowvram_lora.memory.frozen import matrices
from lowvram_lora.memory.setting import Setting
from lowvram_lora.training import run as run_module
from lowvram_lora.training.job import Job
from lowvram_lora.training.record import RunStore

COLOURS = ((200, 30, 30), (30, 200, 30), (30, 30, 200))


def cache(folder: Path, captions: tuple[str, ...] = ("a red square", "a green square", "蓝色方块")) -> CacheIndex:
    """Build a cache of plain pictures, one a caption."""
    pictures = folder / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    for number, caption in enumerate(captions):
        Image.new("RGB", (64, 64), COLOURS[number]).save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text(caption, encoding="utf-8")
    dataset = scan(DataConfig(folder=str(pictures), resolution=64), [folder])
    encoder = FakeTextEncoder(width=tiny.CONTEXT)
    return build(dataset, FakeCodec(), encoder, folder / "cache", lambda *_: None, CachePlan(ram_cache_bytes=1 << 20))[
        0
    ]


def family_cache(folder: Path, family: str, num: int = 2) -> CacheIndex:
    """Write ``num`` samples of random numbers in the shapes that ``family`` takes."""
    generator = torch.Generator().manual_seed(11)
    entries = []
    for number in range(num):
        picture, text = f"aa{number:02x}", f"bb{number:02x}"
        latents = torch.randn(tiny.LATENTS[family], generator=generator)
        context = torch.randn(1, 7, tiny.CONTEXT, generator=generator)
        encoding = pack([[context, {"pooled_output": torch.randn(1, tiny.VECTOR, generator=generator)}]])
        store.write(store.path_of(folder, "latents", picture), {LATENTS: latents}, {})
        store.write(store.path_of(folder, "text", text), encoding.tensors, {STRUCTURE: encoding.structure})
        entries.append(CacheEntry.single(f"noise {number}", picture, text, tuple(latents.shape), 1))
    return CacheIndex(folder, tuple(entries), 1 << 20, "bb")


def family_job(folder: Path, denoiser: Any, family: str, batch_size: int = 2, **changes: Any) -> Job:
    """Return a job on two samples of random numbers."""
    recipe = BatchRecipe(family_cache(folder / "cache", family), SamplerConfig(batch_size=batch_size, seed=1))
    return replace(job(folder, denoiser, **changes), recipe=recipe)


def config(**changes: Any) -> TrainConfig:
    """Return short-run settings; alpha differs from rank."""
    lora = LoraConfig(rank=4, alpha=7.0, targets=changes.pop("targets", "attention + feed-forward"))
    optim = OptimConfig(learning_rate=changes.pop("learning_rate", 1e-2), schedule="constant")
    return replace(
        TrainConfig(steps=3, seed=5, precision="fp32", output_name="tiny", lora=lora, optim=optim), **changes
    )


def job(folder: Path, denoiser: Any, *, batch_size: int = 1, cancel: FakeCancel | None = None, **changes: Any) -> Job:
    """Return a job whose files all go under ``folder``."""
    return Job(
        denoiser=denoiser,
        recipe=BatchRecipe(cache(folder), SamplerConfig(batch_size=batch_size, seed=1)),
        config=config(**changes),
        hardware=FakeHardware(),
        cancel=cancel or FakeCancel(),
        loras_root=folder / "loras",
        store=RunStore(folder / "runs"),
    )


class Device(LateTransfers):
    """A device played by RAM, which knows what it has given out.

    Attributes:
        given: bytes of each buffer so far.
        alive: of those that somebody still holds.
        num_to_ram: tensors that were sent to RAM.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []
        self.alive: list[int] = []
        self.num_to_ram = 0

    def empty(self, num_bytes: int) -> Tensor:
        made = super().empty(num_bytes)
        self.given.append(num_bytes)
        self.alive.append(num_bytes)
        weakref.finalize(made.untyped_storage(), self.alive.remove, num_bytes).atexit = False
        return made

    def to_ram(self, tensor: Tensor) -> Any:
        self.num_to_ram += 1
        return super().to_ram(tensor)


def on_device(job: Job, device: Device, available: int | None = None) -> Job:
    """Return ``job`` with its computation on ``device``.

    Args:
        available: device bytes to plan with; None plans nothing.
    """
    hardware = FakeHardware(available_bytes=available, total_bytes=None if available is None else 1 << 40)
    return replace(job, transfers=lambda staging_bytes: device, hardware=hardware)


def forced(monkeypatch: Any, setting: Setting) -> None:
    """Let runs go as ``setting`` says from now on, whatever was planned."""
    prepare = run_module.prepare

    def with_setting(*args: Any) -> Any:
        return replace(prepare(*args), setting=setting)

    monkeypatch.setattr(run_module, "prepare", with_setting)


def ring(network: nn.Module, weights: Any, num: float = 2) -> int:
    """Return the bytes of ``num`` of the largest layers."""
    payloads = (weights.payload(module) for _, module in matrices(network))
    return int(num * max(sum(aligned(tensor.nbytes) for tensor in payload) for payload in payloads))


def finish(job: Job) -> Finished:
    """Run ``job`` to its end."""
    *_, last = run_module.run(job)
    assert isinstance(last, Finished)
    return last


def losses(events: list[Event]) -> list[float]:
    """Return the loss of each step."""
    return [event.loss for event in events if isinstance(event, Stepped)]
