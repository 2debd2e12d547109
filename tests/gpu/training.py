"""Checks of whole runs on networks of full size: memory foreseen and real, the ladder, time."""

from __future__ import annotations

import statistics
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lowvram_lora.config import LoraConfig, SamplerConfig
from lowvram_lora.data.batches import BatchRecipe
from lowvram_lora.errors import BudgetError
from lowvram_lora.memory.footprint import footprint
from lowvram_lora.memory.pace import ring_sizes
from lowvram_lora.memory.setting import Setting
from lowvram_lora.training import prepare as planning
from lowvram_lora.training.job import Job
from tests.gpu import work
from tests.gpu.machine import GIB, MIB, Layout, Machine
from tests.gpu.outcome import END, Check, Numbers, SkippedError, mib, require
from tests.gpu.work import Subject, Trained

# Of the simulated peak, what a run need not take. What it takes more is the margin's to cover.
FORESEEN_TOO_HIGH = 0.25
# Of the shorter of computation and copies. Without overlap it is 0, or less.
LEAST_OVERLAP = 0.25
# What CUDA's allocator takes at once. The ceiling is on top of what it has for the adapters, which is rounded up.
SEGMENT_BYTES = 20 * MIB
# "An SDXL job of batch 4, 1024 pixels, rank 32 in 40 % less memory": see lowvram_lora/README.md.
CLAIMED_BATCH = 4
LESS = 0.4


@dataclass(kw_only=True)
class Training:
    """The checks on one network.

    Attributes:
        folder: for everything that is written.
        is_first: check also what is the same for every network.
        subject: the network, between the first check, which makes it, and the last.
    """

    pack: Any
    machine: Machine
    layout: Layout
    folder: Path
    is_first: bool
    subject: Subject | None = field(default=None, init=False)

    def checks(self) -> list[tuple[str, Check]]:
        """Return the checks by name."""
        family = self.layout.family
        found: list[tuple[str, Check]] = [(f"network {family}", self.network)]
        found += [
            (f"peak {family} {name}", partial(self.peak, name=name)) for name in ("largest", "middle", "smallest")
        ]
        found += [(f"ladder {family}", self.ladder)] if self.is_first else []
        found += [(f"speed {family}", self.speed)]
        found += [(f"share {family}", self.share)] if family == "sdxl" else []
        return [*found, (f"{END}{family}", self.forget)]

    def network(self, numbers: Numbers) -> None:
        """A network of random weights, and the budgets that it is trained in."""
        machine, layout = self.machine, self.layout
        kind = work.FAMILIES[layout.family]
        weights, free = work.weight_bytes(layout), machine.hardware().ram_available()
        numbers.update(weights_mib=mib(weights), ram_free_mib=mib(free))
        # The weights, and a quarter of them and 1 GiB for all the rest.
        if weights * 5 // 4 + GIB > free:
            raise SkippedError(f"the weights take {mib(weights)} MiB of RAM, {mib(free)} MiB are free")
        folder = self.folder / layout.family
        side = layout.resolution // 8
        patcher = work.full_size(layout, machine.device)
        subject = Subject(
            machine=machine,
            denoiser=self.pack.nodes._models.HostDenoiser(patcher),
            index=work.samples(folder, (kind.channels, side, side), kind.context, kind.vector, CLAIMED_BATCH),
            folder=folder,
        )
        subject.measure()
        numbers["samples_mib"] = mib(sum(path.stat().st_size for path in folder.rglob("*.safetensors")))
        numbers.update({f"{name}_mib": mib(num_bytes) for name, num_bytes in subject.budgets.items()})
        self.subject = subject

    def forget(self, numbers: Numbers) -> None:
        """Let go of the network."""
        import comfy.model_management

        self.subject = None
        comfy.model_management.unload_all_models()

    def _made(self) -> Subject:
        if self.subject is None:
            raise SkippedError("there is no network")
        return self.subject

    def _fitting(self, name: str) -> int:
        """Return the budget, if the card holds it."""
        subject = self._made()
        needed, free = subject.budgets[name], subject.free()
        if needed > free:
            raise SkippedError(f"needs {mib(needed)} MiB, {mib(free)} MiB are free")
        return needed

    def peak(self, numbers: Numbers, name: str) -> None:
        """What a planned run really takes is what was simulated, and it stays inside its budget."""
        budget, subject = self._fitting(name), self._made()
        trained = work.train(self.machine, subject.job(budget))
        prepared = trained.prepared
        simulated = planning.simulated(subject.job(budget), subject.layers, prepared).counter.peak
        self._note_run(numbers, trained, simulated)
        require(not trained.lowered, "memory ran out inside the budget")
        taken = max(trained.steps(self.machine.ceiling_counts))
        require(taken <= budget + SEGMENT_BYTES, f"the run exceeded its budget: it took {mib(taken)} MiB")
        plan, real = prepared.plan, trained.peak("device_allocated")
        assert plan is not None
        require(real <= plan.footprint.need, "the margin does not cover what was not foreseen")
        require(real >= (1 - FORESEEN_TOO_HIGH) * simulated, "much less is needed than was foreseen")

    def _note_run(self, numbers: Numbers, trained: Trained, simulated: int) -> None:
        prepared = trained.prepared
        plan, setting = prepared.plan, prepared.setting
        assert plan is not None and plan.budget is not None
        real, reserved = trained.peak("device_allocated"), trained.peak("device_reserved")
        numbers.update(
            budget_mib=mib(plan.budget),
            simulated_mib=mib(simulated),
            planned_mib=mib(plan.peak_bytes),
            need_mib=mib(plan.footprint.need),
            real_mib=mib(real),
            error_pct=round(100 * (real - simulated) / simulated, 2),
            planned_error_pct=round(100 * (real - plan.peak_bytes) / plan.peak_bytes, 2),
            reserved_mib=mib(reserved),
            fragments_pct=round(100 * (1 - real / reserved), 2),
            before_mib=mib(trained.before["device_reserved"]),
            first_step_mib=mib(trained.steps("device_allocated")[0]),
            s_per_step=round(statistics.median(trained.seconds), 4),
            precision=prepared.precision,
            adapters_mib=mib(plan.footprint.adapters),
            resident=f"{plan.num_resident} of {len(plan.facts.layers)}",
            recomputed=plan.num_recomputed,
            ring_mib=mib(setting.ring_bytes),
            staging_mib=mib(setting.staging_bytes),
            inputs_in_ram=setting.inputs_in_ram,
            optimizer_in_ram=setting.optimizer_in_ram,
            phases={
                name: mib(counts["device_allocated"] - trained.before["device_allocated"])
                for name, counts in trained.finished.record.memory.phases.items()
            },
            losses=list(trained.finished.record.losses),
        )

    def ladder(self, numbers: Numbers) -> None:
        """A run whose plan turns out to be too large goes down until it fits, and is finished."""
        subject = self._made()
        name = next((n for n in ("largest", "middle") if subject.budgets[n] <= subject.free()), None)
        if name is None:
            raise SkippedError("the card holds the smallest budget at most")
        budget = subject.budgets[name]
        ceiling = subject.plan(budget).peak_bytes * 3 // 4
        job = subject.job(budget)
        job = replace(job, hardware=Tight(job.hardware, ceiling))
        trained = work.train(self.machine, job)
        parameters = trained.finished.record.num_parameters
        numbers.update(
            budget_mib=mib(budget),
            planned_mib=mib(subject.plan(budget).peak_bytes),
            ceiling_mib=mib(ceiling),
            rungs=len(trained.lowered),
            steps=[event.step for event, _ in trained.lowered],
            causes=[event.cause for event, _ in trained.lowered],
            left_mib=[mib(left) for _, left in trained.lowered],
            adapters_mib=mib(4 * parameters),
            real_mib=mib(trained.peak("device_allocated")),
            s_per_step=round(statistics.median(trained.seconds), 4),
            losses=list(trained.finished.record.losses),
        )
        require(trained.finished.record.steps == job.config.steps, "the run did not do all its steps")
        require(len(trained.lowered) > 0, "memory did not run out")
        # The adapters were there before the ceiling.
        most = ceiling + 4 * parameters
        require(max(trained.steps("device_allocated")) <= most, "more was allocated than the ceiling allows")
        # Adapters, gradients and the optimizer's two moments, all float32, and a bit for the rest.
        most = 4 * 4 * parameters + 64 * MIB
        require(all(left <= most for _, left in trained.lowered), "the failed step left tensors on the device")

    def speed(self, numbers: Numbers) -> None:
        """Copies run beside the computation: a streamed step takes less than computing plus copying."""
        subject, machine = self._made(), self.machine
        assert subject.facts is not None
        facts = subject.facts
        resident = Setting(resident=subject.every_layer)
        needed, free = footprint(facts, resident).need, subject.free()
        if needed > free:
            raise SkippedError(f"all weights resident need {mib(needed)} MiB, {mib(free)} MiB are free")
        computing = self._seconds_per_step(resident, work.CopyLog(machine))
        numbers["resident_s"] = round(computing, 4)
        layer_ring, block_ring, *_ = *ring_sizes(facts.layers), ring_sizes(facts.layers)[-1]
        staging = machine.sizes.staging_bytes
        ways = {"layer": (layer_ring, staging), "block": (block_ring, staging), "unstaged": (block_ring, 0)}
        for name, (ring, staged) in ways.items():
            log = work.CopyLog(machine)
            seconds = self._seconds_per_step(Setting(ring_bytes=ring, staging_bytes=staged), log)
            with closing(machine.transfers(staged)) as transfers:
                copying = work.copying_seconds(machine, transfers, log.last)
            overlap = (computing + copying - seconds) / min(computing, copying)
            numbers.update(
                {
                    f"{name}_s": round(seconds, 4),
                    f"{name}_copies": len(log.last),
                    f"{name}_copied_mib": mib(work.num_bytes(log.last)),
                    f"{name}_copying_s": round(copying, 4),
                    f"{name}_gb_per_s": round(work.num_bytes(log.last) / copying / 1e9, 2),
                    f"{name}_page_locked": all(t.is_pinned() for payload in log.last for t in payload),
                    f"{name}_overlap": round(overlap, 3),
                }
            )
        numbers["overlapped"] = numbers["block_overlap"] >= LEAST_OVERLAP
        if machine.is_real:
            require(numbers["overlapped"], "copies do not run beside the computation")

    def share(self, numbers: Numbers) -> None:
        """What 40 % less memory costs in time, for the job that this project claimed it for."""
        whole = work.train(self.machine, self._claimed())
        made = whole.prepared.plan
        assert made is not None
        # A plan keeps its margin free, so what it takes is the share.
        budget = int((1 - LESS) * whole.peak("device_allocated")) + made.footprint.margin
        try:
            share = work.train(self.machine, self._claimed(budget))
        except BudgetError as refused:
            assert refused.needed is not None
            budget = -(-refused.needed // MIB) * MIB
            share = work.train(self.machine, self._claimed(budget))
        numbers["share_budget_mib"] = mib(budget)
        for name, trained in (("whole", whole), ("share", share)):
            plan = trained.prepared.plan
            assert plan is not None
            numbers.update(
                {
                    f"{name}_mib": mib(trained.peak("device_allocated")),
                    f"{name}_s": round(statistics.median(trained.seconds), 4),
                    f"{name}_resident": f"{plan.num_resident} of {len(plan.facts.layers)}",
                    f"{name}_recomputed": plan.num_recomputed,
                    f"{name}_micro_batch": trained.prepared.setting.micro_batch,
                }
            )
        numbers["time_ratio"] = round(numbers["share_s"] / numbers["whole_s"], 3)
        require(not share.lowered, "memory ran out inside the budget")
        require(share.peak("device_allocated") <= budget + SEGMENT_BYTES, "the run exceeded its budget")

    def _claimed(self, budget: int = 0) -> Job:
        """Return the job of the claim, with ``budget`` bytes; 0 takes what is free."""
        subject = self._made()
        job = subject.job(budget)
        recipe = BatchRecipe(subject.index, SamplerConfig(batch_size=CLAIMED_BATCH, seed=1))
        lora = LoraConfig(rank=32, alpha=16.0, targets="attention")
        return replace(job, recipe=recipe, config=replace(job.config, lora=lora))

    def _seconds_per_step(self, setting: Setting, log: work.CopyLog) -> float:
        subject = self._made()
        job = subject.job(transfers=log.transfers)
        trained = work.train(self.machine, job, work.fixed(setting), on_step=log.next_step)
        return statistics.median(trained.seconds)


class Tight:
    """A ``Hardware`` with less memory than it says: its ceiling is ``num_bytes``, whatever it is asked for."""

    def __init__(self, hardware: Any, num_bytes: int) -> None:
        self._hardware, self._num_bytes = hardware, num_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hardware, name)

    def capped(self, num_bytes: int) -> Any:
        return self._hardware.capped(min(num_bytes, self._num_bytes))
