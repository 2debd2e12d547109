"""What the checks work with: networks of random numbers, jobs on them, and runs that are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lowvram_lora.adapters.targets import select
from lowvram_lora.config import LoraConfig, OptimConfig, SamplerConfig, TrainConfig
from lowvram_lora.data import store
from lowvram_lora.data.batches import BatchRecipe
from lowvram_lora.data.cache import LATENTS, STRUCTURE, CacheEntry, CacheIndex
from lowvram_lora.data.encodings import pack as pack_encoding
from lowvram_lora.errors import BudgetError
from lowvram_lora.events import Finished, Lowered, Stepped
from lowvram_lora.fakes import FakeCancel
from lowvram_lora.memory.facts import Facts, aligned
from lowvram_lora.memory.frozen import matrices
from lowvram_lora.memory.plan import Plan, make_plan
from lowvram_lora.memory.setting import Setting
from lowvram_lora.memory.wishes import DeviceFacts
from lowvram_lora.training import prepare as planning
from lowvram_lora.training import run as running
from lowvram_lora.training.estimate import payload_bytes
from lowvram_lora.training.job import Job
from lowvram_lora.training.precision import resolve
from lowvram_lora.training.record import RunStore
from tests.bench._full_size import FAMILIES
from tests.gpu.machine import GIB, MIB, Layout, Machine

CPU = torch.device("cpu")
# Random numbers that every weight is cut from. A prime, so that no two rows of a weight are equal.
NUM_DRAWN = 4_194_301
# More than any card has.
LARGE = 1 << 42


def filled(network: nn.Module, seed: int = 0) -> None:
    """Give every parameter random numbers at a scale that keeps activations near 1; seconds for billions of them."""
    drawn = torch.randn(NUM_DRAWN, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    at = 0
    for name, parameter in network.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        scale, flat = parameter[0].numel() ** -0.5, parameter.view(-1)
        for start in range(0, flat.numel(), NUM_DRAWN):
            part = flat[start : start + NUM_DRAWN]
            first = min(part.numel(), NUM_DRAWN - at)
            torch.mul(drawn[at : at + first], scale, out=part[:first])
            torch.mul(drawn[: part.numel() - first], scale, out=part[first:])
            at = (at + part.numel()) % NUM_DRAWN


def made(layout: Layout, device: torch.device) -> Any:
    """Return the host's model of ``layout`` in bfloat16 on ``device``, its numbers not set."""
    import comfy.supported_models

    kind = FAMILIES[layout.family]
    config = getattr(comfy.supported_models, kind.config_class)({**kind.unet_config, **layout.changes})
    config.set_inference_dtype(torch.bfloat16, None)
    # As the host's loaders do: all of it are inference tensors.
    with torch.inference_mode():
        return config.get_model({}, "", device)


def weight_bytes(layout: Layout) -> int:
    """Return the bytes of a network's weights, without making any."""
    return sum(parameter.nbytes for parameter in made(layout, torch.device("meta")).parameters())


def full_size(layout: Layout, device: torch.device) -> Any:
    """Return the host's MODEL of ``layout``, random weights in RAM, to be used on ``device``."""
    model = made(layout, CPU)
    with torch.inference_mode():
        filled(model.diffusion_model)
    return on_device(model, device)


def on_device(model: Any, device: torch.device) -> Any:
    """Return the host's MODEL of a network in RAM that is to be used on ``device``."""
    import comfy.model_patcher

    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=CPU)


def samples(folder: Path, latents: Sequence[int], context: Sequence[int], vector: int, num: int) -> CacheIndex:
    """Write ``num`` samples of random numbers; shapes without the batch."""
    generator = torch.Generator().manual_seed(11)
    entries = []
    for number in range(num):
        picture, text = f"aa{number:02x}", f"bb{number:02x}"
        extra = {"pooled_output": torch.randn(1, vector, generator=generator)} if vector else {}
        encoding = pack_encoding([[torch.randn(1, *context, generator=generator), extra]])
        drawn = {LATENTS: torch.randn(*latents, generator=generator)}
        store.write(store.path_of(folder, "latents", picture), drawn, {})
        store.write(store.path_of(folder, "text", text), encoding.tensors, {STRUCTURE: encoding.structure})
        entries.append(CacheEntry.single(f"noise {number}", picture, text, tuple(latents), 1))
    return CacheIndex(folder, tuple(entries), GIB, "bb")


@dataclass(kw_only=True)
class Subject:
    """A network to train on, with its samples.

    Attributes:
        facts: what plans are made from; None until ``measure``.
        budgets: by name, in bytes; each a whole number of MiB.
    """

    machine: Machine
    denoiser: Any
    index: CacheIndex
    folder: Path
    precision: str = "bf16"
    rank: int = 16
    batch_size: int = 1
    facts: Facts | None = None
    budgets: dict[str, int] = field(default_factory=dict)

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The layers that are adapted, by path."""
        return select(self.denoiser.network, "attention + feed-forward")

    @property
    def every_layer(self) -> frozenset[str]:
        """Paths of all matrices."""
        return frozenset(path for path, _ in matrices(self.denoiser.network))

    @property
    def largest_payload(self) -> int:
        """Device bytes of the largest layer's weights."""
        payload = self.denoiser.weights.payload
        return max(payload_bytes(payload(module)) for _, module in matrices(self.denoiser.network))

    def job(self, budget: int = 0, **changes: Any) -> Job:
        """Return a job whose files go to a folder of its own; 0 takes what is free."""
        folder = self._new_folder()
        config = TrainConfig(
            steps=self.machine.sizes.steps,
            seed=5,
            precision=self.precision,  # type: ignore[arg-type]
            vram_budget_gb=budget / GIB,
            lora=LoraConfig(rank=self.rank, alpha=self.rank / 2, targets="attention + feed-forward"),
            optim=OptimConfig(learning_rate=1e-4, schedule="constant"),
        )
        job = Job(
            denoiser=self.denoiser,
            recipe=BatchRecipe(self.index, SamplerConfig(batch_size=self.batch_size, seed=1)),
            config=config,
            hardware=self.machine.hardware(self.denoiser.network),
            cancel=FakeCancel(),
            loras_root=folder,
            store=RunStore(folder / "runs"),
            transfers=self.machine.transfers,
        )
        return replace(job, **changes)

    def _new_folder(self) -> Path:
        folder = self.folder / f"run {len(list(self.folder.iterdir()))}"
        folder.mkdir()
        return folder

    def measure(self) -> None:
        """Simulate a step; find the smallest budget, the one that needs nothing but the card, and one between."""
        job = self.job()
        precision, _ = resolve(job.config.precision, job.denoiser)
        self.facts, _ = planning.facts_of(job, self.layers, precision, self._unlimited())
        smallest, largest = self._smallest(), self.plan(0).footprint.need
        for name, num_bytes in (("smallest", smallest), ("middle", (smallest + largest) // 2), ("largest", largest)):
            self.budgets[name] = -(-num_bytes // MIB) * MIB

    def plan(self, budget: int) -> Plan:
        """Return the plan for ``budget`` bytes on a card of any size; 0 for no limit."""
        assert self.facts is not None
        wishes = planning.wishes_of(self.job(budget).config, self.precision)
        return make_plan(self.facts, wishes, self._unlimited())

    def _smallest(self) -> int:
        try:
            return self.plan(MIB).footprint.need
        except BudgetError as refused:
            assert refused.needed is not None
            return refused.needed

    def _unlimited(self) -> DeviceFacts:
        ram = self.machine.hardware().ram_available()
        return DeviceFacts(available=LARGE, total=LARGE, ram=ram)

    def free(self) -> int:
        """Return the device bytes that a run may take now."""
        return int(self.machine.hardware().available())


@dataclass(kw_only=True)
class Trained:
    """A run and what was measured of it.

    Attributes:
        prepared: how it started.
        seconds: of each step but the first.
        before: device bytes in use when it began, by name.
        lowered: where memory ran out: the event, and the bytes of tensors there are then that the run has made.
    """

    prepared: planning.Prepared
    finished: Finished
    seconds: list[float]
    before: dict[str, int]
    lowered: list[tuple[Lowered, int]]

    def steps(self, name: str) -> list[int]:
        """Return the peak of each step, in bytes that the run has taken; the first step also sets things up."""
        return [sample[name] - self.before[name] for sample in self.finished.record.memory.history]

    def peak(self, name: str) -> int:
        """Return the peak of all steps but the first, in bytes that the run has taken."""
        return max(self.steps(name)[1:])


Prepare = Callable[..., planning.Prepared]


def train(
    machine: Machine,
    job: Job,
    prepare: Prepare = planning.prepare,
    on_step: Callable[[], None] = lambda: None,
) -> Trained:
    """Run ``job`` as LoRA Train does, and measure it.

    Args:
        prepare: decides how it goes, in place of the product's own plan.
        on_step: called after each step.
    """
    seen: list[planning.Prepared] = []
    lowered, times, finished = [], [], None

    def noted(*arguments: Any) -> planning.Prepared:
        seen.append(prepare(*arguments))
        return seen[-1]

    machine.tidy()
    before = machine.in_use()
    # What the next sample sees has come since.
    job.hardware.sample()
    outside = torch.inference_mode(False), torch.no_grad()
    with patch.object(running, "prepare", noted), outside[0], outside[1], closing(running.run(job)) as events:
        for event in events:
            if isinstance(event, Stepped):
                machine.synchronize()
                times.append(time.perf_counter())
                on_step()
            elif isinstance(event, Lowered):
                name = "device_allocated"
                lowered.append((event, machine.in_use()[name] - before[name]))
            elif isinstance(event, Finished):
                finished = event
    assert finished is not None
    seconds = [end - begin for begin, end in pairwise(times)]
    return Trained(prepared=seen[0], finished=finished, seconds=seconds, before=before, lowered=lowered)


def fixed(setting: Setting) -> Prepare:
    """Return a ``prepare`` that makes no plan: the run goes as ``setting`` says."""

    def prepare(job: Job, layers: Any, precision: str, device: DeviceFacts) -> planning.Prepared:
        return planning.Prepared(
            config=job.config,
            precision=precision,
            samples=planning.samples_of(job),
            setting=setting,
            wishes=planning.wishes_of(job.config, precision),
            device=device,
        )

    return prepare


Payload = Sequence[Tensor]


class CopyLog:
    """Remembers what a step copies to the device."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._now: list[Payload] = []
        self.last: list[Payload] = []

    def transfers(self, staging_bytes: int) -> Any:
        """Return ``Transfers`` that are watched."""
        return _Watched(self._machine.transfers(staging_bytes), self._now)

    def next_step(self) -> None:
        """Learn that a step is over."""
        self.last = list(self._now)
        self._now.clear()


class _Watched:
    def __init__(self, transfers: Any, seen: list[Payload]) -> None:
        self._transfers, self._seen = transfers, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfers, name)

    def copy_in(self, targets: Payload, sources: Payload, after: Sequence[Any] = ()) -> Any:
        self._seen.append(list(sources))
        return self._transfers.copy_in(targets, sources, after)


def num_bytes(payloads: Sequence[Payload]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for payload in payloads for tensor in payload)


def copying_seconds(machine: Machine, transfers: Any, payloads: Sequence[Payload]) -> float:
    """Return the time to copy ``payloads`` one after the other through two places, as a ring does; nothing computes.

    Raises:
        AssertionError: what arrived is something else.
    """
    half = max(sum(aligned(tensor.nbytes) for tensor in payload) for payload in payloads)
    ring = transfers.empty(2 * half)
    fences: list[tuple[Any, ...]] = [(), ()]
    under_way: tuple[Any, int] | None = None
    machine.synchronize()
    began = time.perf_counter()
    for number, payload in enumerate(payloads):
        place = number % 2
        targets = _laid_out(ring[place * half : (place + 1) * half], payload)
        copy = transfers.copy_in(targets, payload, fences[place])
        if under_way is not None:
            before, there = under_way
            transfers.wait(before)
            fences[there] = (transfers.released(before),)
        under_way = copy, place
    transfers.wait(copy)
    machine.synchronize()
    seconds = time.perf_counter() - began
    arrived = all(torch.equal(target.to(CPU), source) for target, source in zip(targets, payload, strict=True))
    transfers.released(copy)
    assert arrived, "other numbers arrived on the device than were sent"
    return seconds


def _laid_out(region: Tensor, payload: Payload) -> list[Tensor]:
    """Return places for ``payload`` in ``region``, bytes."""
    targets, start = [], 0
    for tensor in payload:
        targets.append(region[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += aligned(tensor.nbytes)
    return targets


@contextmanager
def exact() -> Iterator[None]:
    """Compute in full float32, the same numbers every time as far as that is known, until the context ends."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32
    was_repeatable = torch.are_deterministic_algorithms_enabled()
    try:
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32 = False, True, False, False
        # What has no such way only warns. And new memory is filled with NaN, so that a read of it shows.
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32 = before
        torch.use_deterministic_algorithms(was_repeatable)


def warm_up(machine: Machine) -> int:
    """Let the libraries take the workspaces that they keep; return their bytes on the device."""
    before = machine.in_use()["device_allocated"]
    with torch.enable_grad():
        x = torch.randn(64, 64, device=machine.device, dtype=torch.float16, requires_grad=True)
        # The backward pass runs in a thread of its own, with workspaces of its own.
        nn.functional.linear(x, x.detach(), x.detach()[0]).float().sum().backward()
    del x
    machine.tidy()
    return machine.in_use()["device_allocated"] - before
