"""What a training step needs, found by running one without a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.attach import Adapters, build
from ..config import TrainConfig
from ..data.draw import Batch, Draw
from ..memory.chunks import find_feed_forwards
from ..memory.facts import BlockFacts, Facts, LayerFacts, StepFacts, aligned
from ..memory.frozen import matrices
from ..memory.pace import ring_for_parts
from ..memory.recompute import find_blocks
from ..memory.setting import Setting
from ..memory.simulate import OUTSIDE, LiveBytes, SimulatedDenoiser, SimulatedTransfers
from ..ports import Cancel, Denoiser, Encoding
from .altered import as_configured
from .attached import Engaged, Engine, attached
from .optim import build_optimizer, build_schedule
from .step import Samples, Stepper

META = torch.device("meta")
# Where a block's bytes are counted.
_FORWARD, _RECOMPUTE, _BACKWARD = "forward", "recompute", "backward"


@dataclass(frozen=True)
class OneBatch:
    """``Samples`` that give the same batch at every turn.

    Attributes:
        text: the draw whose caption every sample gets; None leaves each its own.
    """

    samples: Samples
    batch: Batch
    text: Draw | None = None
    seed: int = 0

    def window(self, step: int, accumulation: int) -> list[Batch]:
        """Return the batch once for each turn of a step."""
        return [self.batch] * accumulation

    def shape(self, draw: Draw) -> tuple[int, ...]:
        """Return what tells latents that can be stacked from others."""
        return self.samples.shape(draw)

    def latents(self, draw: Draw) -> Tensor:
        """Return the sample's latents."""
        return self.samples.latents(draw)

    def mask(self, draw: Draw) -> Tensor | None:
        """Return the sample's mask."""
        return self.samples.mask(draw)

    def conditioning(self, draw: Draw) -> Encoding:
        """Return the encoded caption."""
        return self.samples.conditioning(self.text or draw)

    def sent(self, num_bytes: int) -> None:
        """Do nothing: there is no device."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """One simulated step.

    Attributes:
        counter: live bytes by block and phase, and their peak.
        fixed_bytes: small parameters, adapters, and optimizer state while it is on the device.
        small_bytes: the clones of norms and free parameters.
        adapter_bytes: the trained parameters.
        resident_bytes: weights that stayed on the device, and the ring.
        gradient_bytes: by block, the adapters' gradients when its backward pass began.
        input_bytes: by block, what ``inputs_in_ram`` would have freed.
        writes_in_place: by block.
        reads: layer and phase of every use of a weight in the last pass, in order.
    """

    counter: LiveBytes
    fixed_bytes: int
    small_bytes: int
    adapter_bytes: int
    resident_bytes: int
    gradient_bytes: dict[str, int]
    input_bytes: dict[str, int]
    writes_in_place: dict[str, bool]
    reads: list[tuple[nn.Module, str]]


@dataclass(frozen=True, kw_only=True)
class Simulator:
    """Runs steps of one job on ``device``: ``meta``, or another one to compare.

    Attributes:
        layers: those that are adapted, by path.
        dtype: of the network's arithmetic.
        samples: where ``batch`` is read from.
        batch: the one that needs most, of one latent shape.
        text: the draw with the caption that needs most; None leaves each sample its own.
    """

    denoiser: Denoiser
    layers: dict[str, nn.Module]
    config: TrainConfig
    dtype: torch.dtype
    samples: Samples
    batch: Batch
    cancel: Cancel
    device: torch.device = META
    text: Draw | None = None

    def step(
        self, setting: Setting, writes_in_place: dict[str, bool] | None = None, measures: bool = False
    ) -> Simulated:
        """Run one step with ``setting``.

        Args:
            writes_in_place: by block, where it is known; else each block's first run is a cautious one.
            measures: leave inputs on the device and tell what ``inputs_in_ram`` would free.
        """
        counter = LiveBytes(self.device.type)
        denoiser: Any = SimulatedDenoiser(as_configured(self.denoiser, self.config), counter, self.device)
        transfers = SimulatedTransfers(counter, self.device, measures)
        with ExitStack() as undo:
            undo.enter_context(torch.no_grad())
            undo.enter_context(counter)
            for tensor in (*self.denoiser.network.parameters(), *self.denoiser.network.buffers()):
                counter.ignore(tensor)
            adapters = build(self.layers, self.config.lora, 0, self.device, setting.adapter_dtype)
            for parameter in adapters.parameters():
                # Made before it was moved, perhaps.
                counter.add(parameter)
            adapter_bytes = sum(p.nbytes for p in adapters.parameters())
            observer = _Observer(counter, adapters)
            engine = Engine(
                setting=setting, transfers=transfers, writes_in_place=writes_in_place or {}, observe=observer
            )
            engaged = undo.enter_context(attached(denoiser, self.layers, adapters, self.dtype, engine))
            assert engaged.streamed is not None
            resident_bytes = engaged.streamed.resident_bytes + setting.ring_bytes
            small_bytes = counter.live - adapter_bytes - resident_bytes
            stepper = self._stepper(denoiser, adapters, setting, counter, engaged, transfers)
            fixed_bytes = counter.live - resident_bytes
            _, norm = stepper.gradients(0)
            stepper.update(norm)
            return Simulated(
                counter=counter,
                fixed_bytes=fixed_bytes,
                small_bytes=small_bytes,
                adapter_bytes=adapter_bytes,
                resident_bytes=resident_bytes,
                gradient_bytes=observer.gradient_bytes,
                input_bytes=transfers.inputs,
                writes_in_place=engaged.writes_in_place(),
                reads=denoiser.weights.reads,
            )

    def _stepper(
        self,
        denoiser: Any,
        adapters: Adapters,
        setting: Setting,
        counter: LiveBytes,
        engaged: Engaged,
        transfers: SimulatedTransfers,
    ) -> Stepper:
        parameters = adapters.parameters()
        optimizer = build_optimizer(parameters, self.config.optim, setting, transfers=transfers)

        def begin() -> None:
            denoiser.weights.reads.clear()
            engaged.begin()

        return Stepper(
            denoiser=denoiser,
            batches=OneBatch(self.samples, self.batch, self.text),
            parameters=parameters,
            optimizer=optimizer,
            schedule=build_schedule(optimizer, self.config.optim, 1),
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            config=self.config.optim,
            cancel=self.cancel,
            watch=counter,
            begin=begin,
            micro_batch=setting.micro_batch,
            read=lambda _: 0.0,
        )


class _Observer:
    """Counts under the block that runs, and notes what gradients there are when its backward pass begins."""

    def __init__(self, counter: LiveBytes, adapters: Adapters) -> None:
        self.gradient_bytes: dict[str, int] = {}
        self._counter = counter
        self._parameters = adapters.parameters()

    @contextmanager
    def __call__(self, path: str, phase: str) -> Iterator[None]:
        if phase == _RECOMPUTE:
            self.gradient_bytes[path] = sum(p.grad.nbytes for p in self._parameters if p.grad is not None)
        with self._counter.block(path, phase):
            yield


def measured(
    simulators: Mapping[int, Simulator],
    passes: int,
    is_tight: Callable[[Facts], bool] = lambda _: True,
    learned: dict[str, bool] | None = None,
) -> tuple[Facts, dict[str, bool]]:
    """Return what a plan is made from, and which blocks write in place.

    Args:
        simulators: of the same job by micro-batch; each holds that many samples. The batch's size is there, and 1
            unless the batch goes through the network at once whatever it takes.
        passes: batches that make a step.
        is_tight: whether a plan from such facts could do with feed-forwards in parts, which take as long to measure
            as everything else.
        learned: which blocks write in place, where that is known.
    """
    smallest = simulators[min(simulators)]
    setting = Setting(ring_bytes=smallest_ring(smallest.denoiser))
    if not learned:
        learned = smallest.step(setting).writes_in_place
    asked = replace(setting, inputs_in_ram=True)
    runs = {size: simulator.step(asked, learned, measures=True) for size, simulator in simulators.items()}
    first, largest = runs[min(simulators)], simulators[max(simulators)]
    waiting = _waiting_bytes(largest)

    def steps(runs: Mapping[int, Simulated]) -> dict[int, StepFacts]:
        return {size: _step_facts(run, waiting * (len(largest.batch) - size)) for size, run in runs.items()}

    facts = Facts(
        layers=_layers(smallest, first),
        batch_size=max(simulators),
        passes=passes,
        steps=steps(runs),
        small_bytes=first.small_bytes,
        adapter_bytes=first.adapter_bytes,
        update_bytes=_update_bytes(first),
    )
    if is_tight(facts):
        asked = replace(asked, chunked=frozenset(find_blocks(smallest.denoiser.network)))
        runs = {size: simulator.step(asked, learned, measures=True) for size, simulator in simulators.items()}
        facts = _with_parts(facts, steps(runs), smallest.denoiser)
    return facts, learned


def _with_parts(facts: Facts, parted: Mapping[int, StepFacts], denoiser: Denoiser) -> Facts:
    """Return ``facts`` with what ``parted``, of steps with every feed-forward in parts, tell of blocks."""
    steps = {}
    for size, step in facts.steps.items():
        found = {block.path: block for block in parted[size].blocks}
        steps[size] = replace(step, blocks=tuple(_in_parts(block, found[block.path]) for block in step.blocks))
    in_parts = {block.path for step in steps.values() for block in step.blocks if block.in_parts}
    payload, found_parts = denoiser.weights.payload, find_feed_forwards(denoiser.network, in_parts).values()
    sizes = [[payload_bytes(payload(module)) for _, module in matrices(part)] for part in found_parts]
    return replace(facts, steps=steps, parts_ring_bytes=max(map(ring_for_parts, sizes), default=0))


def _in_parts(whole: BlockFacts, found: BlockFacts) -> BlockFacts:
    if found.backward_flops == whole.backward_flops:
        return whole
    in_parts = replace(
        whole,
        forward_peak=found.forward_peak,
        backward_peak=found.backward_peak,
        activation_bytes=found.activation_bytes,
        backward_flops=found.backward_flops,
    )
    return replace(whole, in_parts=in_parts)


def _waiting_bytes(simulator: Simulator) -> int:
    """Return what a sample takes while others of its batch are in the network: latents, noise, mask, sigma, float32."""
    samples, draw = simulator.samples, simulator.batch[0]
    mask = samples.mask(draw)
    return 4 * (2 * samples.latents(draw).numel() + (0 if mask is None else mask.numel()) + 1)


def _update_bytes(run: Simulated) -> int:
    count = run.counter.counts[OUTSIDE, "optimizer"]
    return count.peak - count.began


def smallest_ring(denoiser: Denoiser) -> int:
    """Return the bytes of the smallest ring: one layer is copied while another is used."""
    return 2 * max(payload_bytes(denoiser.weights.payload(module)) for _, module in matrices(denoiser.network))


def payload_bytes(payload: Sequence[Tensor]) -> int:
    """Return the device bytes that a layer's weight takes as it is stored."""
    return sum(aligned(tensor.nbytes) for tensor in payload)


def _layers(simulator: Simulator, run: Simulated) -> tuple[LayerFacts, ...]:
    """Return every layer that the step read, in the order in which it did so first."""
    network = simulator.denoiser.network
    paths = {module: path for path, module in matrices(network)}
    blocks = list(find_blocks(network))
    phases: dict[nn.Module, set[str]] = {}
    for module, phase in run.reads:
        phases.setdefault(module, set()).add(phase)
    return tuple(
        LayerFacts(
            path=paths[module],
            block=next((block for block in blocks if paths[module].startswith(f"{block}.")), None),
            num_bytes=payload_bytes(simulator.denoiser.weights.payload(module)),
            read_again=_RECOMPUTE in seen,
            read_backward=_BACKWARD in seen,
        )
        for module, seen in phases.items()
    )


def _step_facts(run: Simulated, waiting_bytes: int) -> StepFacts:
    counter = run.counter
    over = run.fixed_bytes + run.resident_bytes - waiting_bytes
    # A block that trains nothing and needs no gradient has no backward pass, and holds nothing for one.
    order = [
        path for path, phase in counter.counts if path and phase == _FORWARD and (path, _BACKWARD) in counter.counts
    ]
    gradients = [run.adapter_bytes, *(run.gradient_bytes[path] for path in order)]
    between = [0] * len(gradients)
    place = {path: index for index, path in enumerate(order)}
    for (phase, path), live in counter.between.items():
        if phase == _RECOMPUTE:
            # Between its second run and its backward pass a block is not left.
            continue
        is_after = phase == _BACKWARD
        index = place.get(path, -1) + (not is_after)
        between[index] = max(between[index], live - over - gradients[index] * is_after)
    return StepFacts(
        blocks=tuple(_block_facts(run, path, over) for path in order),
        other_peak=max(between),
        other_flops=counter.counts[OUTSIDE, _FORWARD].flops,
        between_peaks=tuple(between),
    )


def _block_facts(run: Simulated, path: str, over: int) -> BlockFacts:
    counts = run.counter.counts
    forward, again, backward = (counts[path, phase] for phase in (_FORWARD, _RECOMPUTE, _BACKWARD))
    # The second run is answered with what the first one's convolutions gave, and lets it go on the way.
    convolution_bytes = forward.convolved - again.convolved
    gradients = run.gradient_bytes[path]
    return BlockFacts(
        path=path,
        flops=forward.flops,
        forward_peak=forward.peak - over,
        backward_peak=max(again.peak, backward.peak) - over - gradients,
        activation_bytes=again.ended - again.began + convolution_bytes,
        input_bytes=run.input_bytes.get(path, 0),
        convolution_bytes=convolution_bytes,
        gradient_bytes=gradients,
        writes_in_place=run.writes_in_place[path],
        convolution_flops=forward.flops - again.flops,
        backward_flops=backward.flops,
    )
