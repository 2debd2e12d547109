"""Checks of numbers, on tiny networks: the device gives what the CPU does, however the network is run."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowvram_lora.adapters.attach import Adapters, build
from lowvram_lora.config import LoraConfig
from lowvram_lora.data.draw import Draw
from lowvram_lora.data.tiers import TieredCache
from lowvram_lora.memory.setting import Setting
from lowvram_lora.training.attached import Engine, attached
from tests.gpu import work
from tests.gpu.machine import MIB, Machine
from tests.gpu.outcome import Check, Numbers, SkippedError, require
from tests.gpu.work import Subject
from tests.inhost import tiny

# Sums in another order: float32 has 24 bits, and a network's errors add up.
GRADIENT_ERROR = 1e-4
# Losses in half of float32's bits or fewer, against float32's.
PRECISION_ERROR = 0.05
FAMILIES = ("sd15", "flux")


@dataclass(frozen=True)
class Arithmetic:
    """The checks of numbers.

    Attributes:
        folder: for everything that is written.
    """

    pack: Any
    machine: Machine
    folder: Path

    def checks(self) -> list[tuple[str, Check]]:
        """Return the checks by name."""
        found: list[tuple[str, Check]] = []
        for family in FAMILIES:
            found.append((f"gradients {family}", partial(self.gradients, family=family)))
            found.append((f"same losses {family}", partial(self.same_losses, family=family)))
        return [*found, ("precisions", self.precisions)]

    def gradients(self, numbers: Numbers, family: str) -> None:
        """Gradients with streaming on the device are those of the CPU."""
        machine = self.machine
        with work.exact():
            expected = self._gradients(family, work.CPU, None)
            with closing(machine.transfers(4 * MIB)) as transfers:
                found = self._gradients(family, machine.device, transfers)
        require(found.keys() == expected.keys() and len(found) > 0, "other layers got gradients")
        errors = {name: relative_error(found[name], expected[name]) for name in expected}
        worst = max(errors, key=lambda name: errors[name])
        total = relative_error(torch.cat([*found.values()]), torch.cat([*expected.values()]))
        numbers.update(tensors=len(errors), relative_error=total, worst_error=errors[worst], worst=worst)
        require(all(float(tensor.norm()) > 0 for tensor in expected.values()), "a gradient is zero on the CPU")
        require(total <= GRADIENT_ERROR, f"gradients differ by {total:.2e}")
        # A tensor of small numbers that were large ones' difference has fewer bits.
        require(errors[worst] <= 10 * GRADIENT_ERROR, f"the gradient of {worst} differs by {errors[worst]:.2e}")

    def _gradients(self, family: str, device: torch.device, transfers: Any) -> dict[str, Tensor]:
        """Return the gradients of a tiny network in float32, flat and in float64 on the CPU."""
        subject = self.tiny_subject(family, device)
        denoiser, layers = subject.denoiser, subject.layers
        adapters = drawn_adapters(subject, device)
        ring = 3 * subject.largest_payload
        setting = Setting(ring_bytes=ring, inputs_in_ram=transfers is not None)
        engine = Engine(setting=setting, transfers=transfers, worth_moving_bytes=0)
        tiers, draws = TieredCache(subject.index), [Draw(index) for index in range(len(subject.index.entries))]
        latents = torch.stack([tiers.latents(draw) for draw in draws]).to(device)
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(4)).to(device)
        with torch.inference_mode(False), torch.no_grad():
            denoiser.load(None if transfers is None else 1 << 28)
            with attached(denoiser, layers, adapters, torch.float32, engine) as engaged:
                # In the second pass the order is known, and weights are loaded ahead.
                for _ in range(2):
                    for parameter in adapters.parameters():
                        parameter.grad = None
                    engaged.begin()
                    table = denoiser.sigmas
                    sigma = table[[len(table) // 2, len(table) // 4]].to(device)
                    noised = denoiser.add_noise(denoiser.scale_latents(latents), noise, sigma)
                    captions = [tiers.conditioning(draw) for draw in draws]
                    ((_, conditioning),) = denoiser.condition(captions, noise)
                    with torch.enable_grad():
                        out = denoiser.predict_x0(noised, sigma, conditioning)
                        (out.square().flatten(1).mean(1) * denoiser.loss_weight(sigma)).sum().backward()
        return {
            f"{path} {half}": getattr(layer, half)["default"].weight.grad.cpu().double().flatten()
            for path, layer in adapters.layers.items()
            for half in ("lora_A", "lora_B")
        }

    def tiny_subject(self, family: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Subject:
        """Return a tiny network that computes on ``device``."""
        folder = self.folder / f"tiny {family}"
        patcher = work.on_device(tiny.FAMILIES[family](dtype).model, device)
        return Subject(
            machine=self.machine,
            denoiser=self.pack.nodes._models.HostDenoiser(patcher),
            index=work.samples(folder, tiny.LATENTS[family], (7, tiny.CONTEXT), tiny.VECTOR, 2),
            folder=folder,
            precision="fp32",
            rank=4,
            batch_size=2,
        )

    def same_losses(self, numbers: Numbers, family: str) -> None:
        """Streamed or resident, kept or recomputed, a run's losses are the same to the last bit."""
        subject = self.tiny_subject(family, self.machine.device)
        every = subject.every_layer
        ring = 3 * subject.largest_payload
        resident = Setting(resident=every)
        streamed = Setting(ring_bytes=ring)
        settings = {
            "resident": resident,
            "resident again": resident,
            "streamed": streamed,
            "streamed, staged": replace(streamed, staging_bytes=4 * MIB),
            "everything in RAM": replace(streamed, inputs_in_ram=True, optimizer_in_ram=True),
        }
        losses: dict[str, tuple[float, ...]] = {}
        loras: dict[str, dict[str, Tensor]] = {}
        with work.exact():
            for name, setting in settings.items():
                trained = work.train(self.machine, subject.job(), work.fixed(setting))
                record = trained.finished.record
                losses[name], loras[name] = record.losses, record.lora
        numbers["losses"] = list(losses["resident"])
        if losses["resident again"] != losses["resident"]:
            raise SkippedError("two equal runs differ on this device, so nothing can be compared")
        require(len(set(losses["resident"])) > 1, "the loss does not change")
        for name, found in losses.items():
            require(found == losses["resident"], f"losses differ: {name}: {found}")
            same = all(torch.equal(tensor, loras["resident"][key]) for key, tensor in loras[name].items())
            require(same, f"the LoRA differs: {name}")

    def precisions(self, numbers: Numbers) -> None:
        """Every precision trains, with the gradient scaler of fp16 and with adapters and state in bfloat16."""
        subject = self.tiny_subject("flux", self.machine.device)
        plain = Setting(ring_bytes=3 * subject.largest_payload)
        low_bit = replace(plain, adapter_dtype=torch.bfloat16, optimizer_dtype=torch.bfloat16, optimizer_in_ram=True)
        ways = {"fp32": ("fp32", plain), "bf16": ("bf16", plain), "fp16": ("fp16", plain), "low_bit": ("bf16", low_bit)}
        losses: dict[str, Tensor] = {}
        for name, (precision, setting) in ways.items():
            trained = work.train(self.machine, replace(subject, precision=precision).job(), work.fixed(setting))
            losses[name] = torch.tensor(trained.finished.record.losses, dtype=torch.float64)
            numbers[f"{name}_error"] = round(relative_error(losses[name], losses["fp32"]), 5)
            numbers[f"{name}_ran_in"] = trained.prepared.precision
        require(all(bool(found.isfinite().all()) for found in losses.values()), "a loss is not a number")
        worst = max(numbers[f"{name}_error"] for name in ways)
        require(worst <= PRECISION_ERROR, f"losses differ from those of float32 by {worst:.3f}")


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of ``expected``."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def drawn_adapters(subject: Subject, device: torch.device) -> Adapters:
    """Return adapters whose output is not zero, so that each of their matrices gets a gradient."""
    adapters = build(subject.layers, LoraConfig(rank=4, alpha=7.0), seed=2, device=device)
    generator = torch.Generator().manual_seed(3)
    for layer in adapters.layers.values():
        up = layer.lora_B["default"].weight
        up.data.copy_(torch.randn(up.shape, generator=generator) * 0.1)
    return adapters
