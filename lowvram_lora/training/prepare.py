"""From a job to a plan: the step that needs most is simulated, then the fastest way inside the budget is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ..config import LoraConfig, TrainConfig
from ..data.batches import BatchRecipe
from ..data.draw import EMPTY_CAPTION, Batch, Draw
from ..data.store import invalidate, path_of
from ..data.tiers import TieredCache
from ..errors import CacheMissError
from ..memory.facts import Facts
from ..memory.footprint import num_passes
from ..memory.frozen import matrices
from ..memory.ladder import next_rung
from ..memory.lossy import Change
from ..memory.plan import Plan, make_plan, runs_freely
from ..memory.recompute import find_blocks
from ..memory.refusal import card_error
from ..memory.ring import copies_of_passes
from ..memory.setting import Setting
from ..memory.table import describe_plan
from ..memory.wishes import DeviceFacts, Wishes, ceiling
from .estimate import Simulated, Simulator, measured, payload_bytes, smallest_ring
from .job import Job
from .precision import DTYPES
from .sizes import Sized, decide
from .step import Batches

# What a network raises that looks at its numbers, where there are none. Not the host's interrupt, whatever its class.
_NEEDS_NUMBERS = (NotImplementedError, RuntimeError, TypeError, ValueError, AssertionError, ArithmeticError)
# Each is simulated once; a plan that still exceeds its budget after so many corrections is taken as it is.
MAX_CORRECTIONS = 3


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run as it will go.

    Attributes:
        config: the job's, with what a lossy plan changes in it.
        plan: None on a host that computes where the weights are, and where there could be none.
        writes_in_place: by block, as far as it is known.
        copies: of the largest batch's first passes: how often a layer's weights go to the device, and their bytes.
        unmeasured: why the job could not be simulated; empty where it could, or need not.
        sized: the sizes of the batches, where memory was asked for them.
    """

    config: TrainConfig
    precision: str
    samples: Batches
    setting: Setting
    wishes: Wishes
    device: DeviceFacts
    plan: Plan | None = None
    writes_in_place: dict[str, bool] = field(default_factory=dict)
    copies: tuple[tuple[int, int], ...] = ()
    unmeasured: str = ""
    sized: Sized | None = None

    @property
    def budget(self) -> int | None:
        """Device bytes that the run may take, or None where there is no device."""
        return ceiling(self.wishes, self.device)

    @property
    def changes(self) -> tuple[str, ...]:
        """What alters the trained numbers, in a few words each."""
        return self.plan.change.words if self.plan else ()

    @property
    def table(self) -> str:
        """The plan in lines of text; empty where there is none."""
        return describe_plan(self.plan, budget_gb=self.config.vram_budget_gb) if self.plan else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about the plan."""
        if self.device.available is None:
            wanted = (
                f" vram_budget_gb = {self.config.vram_budget_gb:g} is ignored." if self.config.vram_budget_gb else ""
            )
            return (f"This ComfyUI computes in RAM, so there is no VRAM to plan.{wanted}",)
        if self.unmeasured:
            return (
                f"What this model needs could not be worked out beforehand ({self.unmeasured}). It is trained in the "
                "way that takes the least memory; the budget is the ceiling.",
            )
        return tuple(f"To fit the budget (allow_lossy is on): {words}." for words in self.changes)


def wishes_of(config: TrainConfig, precision: str) -> Wishes:
    """Return what in ``config`` a plan depends on."""
    return Wishes(
        vram_budget_gb=config.vram_budget_gb,
        recompute=config.recompute,
        allow_lossy=config.allow_lossy,
        rank=config.lora.rank,
        precision=precision,
    )


def device_facts(job: Job) -> DeviceFacts:
    """Return the device as it is now; ask before the model is loaded, for what it holds will be given up."""
    hardware = job.hardware
    return DeviceFacts(available=hardware.available(), total=hardware.total(), ram=hardware.ram_available())


def room_for(config: TrainConfig, device: DeviceFacts) -> int | None:
    """Return the device bytes the run will take at most; None on a host that computes where the weights are."""
    return ceiling(Wishes(vram_budget_gb=config.vram_budget_gb), device)


def budget_problems(config: TrainConfig, device: DeviceFacts) -> list[str]:
    """Return what is wrong with the budget whatever the job is."""
    error = card_error(Wishes(vram_budget_gb=config.vram_budget_gb), device)
    return [] if error is None else [str(error)]


def samples_of(job: Job) -> Batches:
    """Return the job's samples as they are."""
    config = job.config
    cache = TieredCache(job.recipe.cache, config.seed)
    return Batches(recipe=job.recipe, cache=cache, seed=config.seed, steps=config.steps)


def prepare(job: Job, layers: dict[str, nn.Module], precision: str, device: DeviceFacts) -> Prepared:
    """Return how the run goes.

    Raises:
        BudgetError: it fits into no way.
    """
    unsized = prepared = _unplanned(job, precision, device)
    if device.available is None:
        return prepared

    def is_tight(facts: Facts) -> bool:
        return prepared.wishes.recompute and not runs_freely(facts, prepared.wishes, device)

    try:
        prepared = _sized(job, layers, prepared)
        job = replace(job, recipe=prepared.samples.recipe)
        facts, learned, facts_for = _measured(job, layers, prepared, is_tight)
    except _NEEDS_NUMBERS as error:
        return _thriftiest(job, unsized, next(iter(str(error).splitlines()), type(error).__name__))
    plan = make_plan(facts, prepared.wishes, device, facts_for)
    final = replace(changed(prepared, plan.change), plan=plan, setting=plan.setting, writes_in_place=learned)
    return _verified(job, layers, final)


def _unplanned(job: Job, precision: str, device: DeviceFacts) -> Prepared:
    kept: frozenset[str] = frozenset() if job.config.recompute else frozenset(find_blocks(job.denoiser.network))
    return Prepared(
        config=job.config,
        precision=precision,
        samples=samples_of(job),
        setting=Setting(kept=kept),
        wishes=wishes_of(job.config, precision),
        device=device,
    )


def _sized(job: Job, layers: dict[str, nn.Module], prepared: Prepared) -> Prepared:
    """Return ``prepared`` with the sizes of its batches, where they are left to memory."""
    if not job.recipe.asks_memory:
        return prepared
    text = longest_text(job.recipe)

    def simulator_for(batch: Batch) -> Simulator:
        return _simulator(job, layers, prepared, batch, text)

    sized = decide(job.recipe, simulator_for, job.config.optim.accumulation, prepared.wishes, prepared.device)
    samples = replace(prepared.samples, recipe=sized.recipe)
    return replace(prepared, samples=samples, sized=sized, writes_in_place=sized.writes_in_place)


def _thriftiest(job: Job, prepared: Prepared, reason: str) -> Prepared:
    """Return the run that takes the least memory of all, whatever that is."""
    setting = Setting(
        chunked=frozenset(find_blocks(job.denoiser.network)),
        ring_bytes=smallest_ring(job.denoiser),
        micro_batch=1,
        inputs_in_ram=True,
        optimizer_in_ram=True,
        keep_convolutions=False,
    )
    return replace(prepared, setting=setting, unmeasured=reason)


def facts_of(
    job: Job, layers: dict[str, nn.Module], precision: str, device: DeviceFacts
) -> tuple[Facts, Callable[[Change], Facts | None]]:
    """Return what a plan for ``job`` is made from, and from what if the job is changed."""
    facts, _, facts_for = _measured(job, layers, _unplanned(job, precision, device), lambda _: True)
    return facts, facts_for


def _measured(
    job: Job, layers: dict[str, nn.Module], prepared: Prepared, is_tight: Callable[[Facts], bool]
) -> tuple[Facts, dict[str, bool], Callable[[Change], Facts | None]]:
    passes, known = job.config.optim.accumulation, prepared.writes_in_place
    facts, learned = measured(_simulators(job, layers, prepared), passes, is_tight, known)

    def facts_for(change: Change) -> Facts | None:
        if change.precision and not job.denoiser.supports(DTYPES[change.precision]):
            return None
        # The rank is reckoned with by the plan itself.
        altered = changed(prepared, replace(change, rank=0))
        return measured(_simulators(job, layers, altered), passes)[0]

    return facts, learned, facts_for


def simulated(job: Job, layers: dict[str, nn.Module], prepared: Prepared) -> Simulated:
    """Run the step that needs most as ``prepared`` says, without a device; of its passes two, if there are more."""
    micro_batch = prepared.setting.micro_batch
    group = largest_batch(job.recipe, micro_batch)
    size = min(len(group), 2 * (micro_batch or len(group)))
    simulator = _simulator(job, layers, prepared, group[:size], longest_text(job.recipe))
    if size == len(group) and prepared.config.optim.accumulation > 1:
        simulator = replace(simulator, config=with_accumulation(simulator.config, 2))
    learned = prepared.writes_in_place or simulator.step(prepared.setting).writes_in_place
    return simulator.step(prepared.setting, learned)


def _verified(job: Job, layers: dict[str, nn.Module], prepared: Prepared) -> Prepared:
    """Simulate the plan itself; where it needs more than was worked out, take the next lower one."""
    for _ in range(MAX_CORRECTIONS):
        plan = prepared.plan
        assert plan is not None and plan.budget is not None
        run = simulated(job, layers, prepared)
        prepared = _with_copies(job, prepared, plan, run)
        peak = run.counter.peak
        if prepared.sized is not None:
            shape = prepared.samples.shape(largest_batch(job.recipe)[0])
            peak += prepared.sized.excess(plan.facts, shape, prepared.setting)
        if peak <= plan.peak_bytes or peak + plan.footprint.margin <= plan.budget:
            break
        lower = next_rung(plan, prepared.wishes, prepared.device, peak)
        if lower is None:
            break
        prepared = replace(prepared, plan=lower, setting=lower.setting)
    return prepared


def _with_copies(job: Job, prepared: Prepared, plan: Plan, run: Simulated) -> Prepared:
    """Return ``prepared`` with what each pass will copy; ``run`` tells in which order weights are read."""
    weights, setting = job.denoiser.weights, prepared.setting
    paths = {module: path for path, module in matrices(job.denoiser.network)}
    order = [module for module, _ in run.reads if paths[module] not in setting.resident]
    payloads: dict[Any, Sequence[Tensor]] = {module: weights.payload(module) for module in order}
    sizes = {module: payload_bytes(payload) for module, payload in payloads.items()}
    copies = tuple(
        (len(loaded), sum(tensor.nbytes for module in loaded for tensor in payloads[module]))
        for loaded in copies_of_passes(order, sizes, setting.ring_bytes)
    )
    copied_bytes = copies[-1][1] * num_passes(plan.facts, setting.micro_batch)
    return replace(prepared, plan=replace(plan, pace=replace(plan.pace, copied_bytes=copied_bytes)), copies=copies)


def changed(prepared: Prepared, change: Change) -> Prepared:
    """Return ``prepared`` with what ``change`` does to the job."""
    config, lora = prepared.config, prepared.config.lora
    if change.rank:
        # The strength stays: alpha shrinks with the rank.
        lora = LoraConfig(rank=change.rank, alpha=lora.alpha * change.rank / lora.rank, targets=lora.targets)
    return replace(
        prepared,
        config=replace(config, lora=lora),
        precision=change.precision or prepared.precision,
        samples=replace(prepared.samples, latent_scale=change.resolution),
    )


def _simulators(job: Job, layers: dict[str, nn.Module], prepared: Prepared) -> dict[int, Simulator]:
    """Return what simulates the batch that needs most, at each micro-batch worth trying."""
    text = longest_text(job.recipe)
    return {
        size: _simulator(job, layers, prepared, largest_batch(job.recipe, size)[:size], text)
        for size in _sizes(len(largest_batch(job.recipe)))
    }


def _simulator(job: Job, layers: dict[str, nn.Module], prepared: Prepared, batch: Batch, text: Draw) -> Simulator:
    return Simulator(
        denoiser=job.denoiser,
        layers=layers,
        config=with_accumulation(prepared.config, 1),
        dtype=DTYPES[prepared.precision],
        samples=prepared.samples,
        batch=batch,
        text=text,
        cancel=job.cancel,
    )


def with_accumulation(config: TrainConfig, accumulation: int) -> TrainConfig:
    """Return ``config`` with so many batches to a step."""
    return replace(config, optim=replace(config.optim, accumulation=accumulation))


def _sizes(batch_size: int) -> tuple[int, ...]:
    """Return the micro-batches worth trying: the whole batch, halves of it, and single samples."""
    sizes = {1}
    while batch_size > 1:
        sizes.add(batch_size)
        batch_size = -(-batch_size // 2)
    return tuple(sorted(sizes))


def largest_batch(recipe: BatchRecipe, micro_batch: int = 0) -> Batch:
    """Return draws of a batch that need at least as much as any in ``recipe`` that go through the network together.

    Args:
        micro_batch: so many go through it at once; 0 for all of one shape. What is returned may be more.
    """
    return recipe.planner.largest(micro_batch or None)


def longest_text(recipe: BatchRecipe) -> Draw:
    """Return a draw with a caption that needs at least as much as any in ``recipe``."""
    cache = recipe.cache
    draws = [
        Draw(index, caption=caption)
        for index, entry in enumerate(cache.entries)
        for caption in range(len(entry.text_keys))
    ]
    if cache.caption_dropout:
        draws.append(Draw(0, caption=EMPTY_CAPTION))

    def size(draw: Draw) -> int:
        try:
            return path_of(cache.root, "text", cache.text_key(draw)).stat().st_size
        except FileNotFoundError as error:
            # So that Build Tiered Cache runs at the next Queue.
            invalidate(cache.root)
            raise CacheMissError(cache.entries[draw.entry].name) from error

    return max(draws, key=size)
