"""Checks of what training asks of the device: a ceiling on its memory, and copies."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import torch

from tests.gpu import work
from tests.gpu.machine import GIB, Machine
from tests.gpu.outcome import Check, Numbers, mib, require


@dataclass(frozen=True)
class Services:
    """The checks of the pack's own services."""

    machine: Machine

    def checks(self) -> list[tuple[str, Check]]:
        """Return the checks by name."""
        return [("cap", self.cap), ("copies", self.copies)]

    def cap(self, numbers: Numbers) -> None:
        """The allocator raises instead of exceeding its ceiling, which is lifted afterwards."""
        machine, limit = self.machine, self.machine.sizes.cap_bytes
        hardware, held, num_parts = machine.hardware(), [], 16
        part = limit // (num_parts // 2)
        machine.tidy()
        before, is_raised = machine.in_use(), False
        with hardware.capped(limit):
            hardware.sample()
            try:
                while len(held) < num_parts:
                    held.append(torch.empty(part, dtype=torch.uint8, device=machine.device))
            except torch.OutOfMemoryError as error:
                is_raised = True
                numbers["raised"] = str(error).splitlines()[0]
            peak = hardware.sample()
        taken = {name: peak[name] - num_bytes for name, num_bytes in before.items()}
        numbers.update(
            limit_mib=mib(limit),
            refused_at_mib=mib((len(held) + 1) * part),
            allocated_mib=mib(taken["device_allocated"]),
            reserved_mib=mib(taken["device_reserved"]),
            before_mib=mib(before["device_reserved"]),
        )
        require(is_raised, "no error above the ceiling")
        require(taken["device_allocated"] <= limit, "more was given than the ceiling allows")
        require(taken[machine.ceiling_counts] <= limit, "more was reserved than the ceiling allows")
        while len(held) < num_parts:
            held.append(torch.empty(part, dtype=torch.uint8, device=machine.device))
        numbers["afterwards_mib"] = mib(len(held) * part)

    def copies(self, numbers: Numbers) -> None:
        """Copies arrive whole, each way that they can go; the speed of each."""
        machine, sizes = self.machine, self.machine.sizes
        generator = torch.Generator().manual_seed(3)
        plain = [
            torch.randint(256, (sizes.copied_bytes,), dtype=torch.uint8, generator=generator)
            for _ in range(sizes.num_copied)
        ]
        numbers["gib"] = round(work.num_bytes([plain]) / GIB, 3)
        ways = {"pageable": (0, plain), "staged": (sizes.staging_bytes, plain), "page_locked": (0, None)}
        for name, (staging, tensors) in ways.items():
            payloads = [[tensor] for tensor in tensors or machine.page_locked(plain)]
            with closing(machine.transfers(staging)) as transfers:
                work.copying_seconds(machine, transfers, payloads[:2])
                seconds = work.copying_seconds(machine, transfers, payloads)
            numbers[f"{name}_gb_per_s"] = round(work.num_bytes(payloads) / seconds / 1e9, 2)
        with closing(machine.transfers()) as transfers:
            # Twice, so that the buffer in RAM is used again.
            for tensor in plain[:2]:
                there = tensor.to(machine.device)
                back = transfers.from_ram(transfers.to_ram(there))
                require(torch.equal(back.cpu(), tensor), "other numbers came back from RAM than were sent there")
