"""A step without a device: the same code on tensors that have no data, with every live byte counted.

A real training step runs with its computation on torch's ``meta`` device. Tensors there have a shape and a type, and
storage of a size, but no memory; weights stay where the host keeps them and are never read. What would be device
memory is counted by storage, from the operation that makes it to the moment its last reference goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..ports import Denoiser, Encoding, StoredWeights, Weights
from .frozen import is_matrix
from .shapes import Shapes

OUTSIDE = ""


@dataclass
class BlockCount:
    """What was seen of one block in one phase.

    Attributes:
        began: live bytes at its beginning.
        ended: live bytes at its end.
        peak: the most in between.
        flops: of its operations.
        convolved: bytes that convolutions gave.
    """

    began: int = 0
    ended: int = 0
    peak: int = 0
    flops: int = 0
    convolved: int = 0


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the live bytes of one kind of device while it is entered.

    Attributes:
        live: bytes now.
        peak: the most so far.
        peak_phase: the phase at the peak.
        peak_block: path of the block at the peak; ``OUTSIDE`` for none.
        counts: by block and phase. ``OUTSIDE`` gathers what runs in no block.
        between: the most live bytes outside blocks, by the phase and path of the block that ran last.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.peak_phase = self.peak_block = ""
        self.counts: dict[tuple[str, str], BlockCount] = {}
        self.between: dict[tuple[str, str], int] = {}
        self._last = ("", OUTSIDE)
        self._device_type = device_type
        self._shapes = Shapes() if device_type == "meta" else None
        self._known: set[int] = set()
        self._phase, self._block = "setup", OUTSIDE
        self._count = self._counted(OUTSIDE, "setup")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and count the storages it made."""
        kwargs = kwargs or {}
        out = self._shapes.run(func, args, kwargs) if self._shapes else func(*args, **kwargs)
        if isinstance(out, Tensor):
            self.add(out)
        elif isinstance(out, list | tuple):
            for item in out:
                if isinstance(item, Tensor):
                    self.add(item)
        flops = flop_registry.get(func._overloadpacket)
        if flops is not None:
            self._count.flops += flops(*args, **kwargs, out_val=out)
            if func._overloadpacket is torch.ops.aten.convolution:
                self._count.convolved += out.nbytes
        return out

    def add(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` from now on, unless it is counted already."""
        if tensor.device.type != self._device_type:
            return
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        weakref.finalize(storage, self._gone, key, num_bytes).atexit = False
        self.live += num_bytes
        self._note()

    def ignore(self, tensor: Tensor) -> None:
        """Never count the storage of ``tensor``, which outlives this counter."""
        self._known.add(tensor.untyped_storage()._cdata)

    def work(self, flops: int) -> None:
        """Count work that no operation stands for."""
        self._count.flops += flops

    @property
    def current_phase(self) -> str:
        """Name of the phase of the step or of the block that runs now."""
        return self._phase

    @property
    def current_block(self) -> str:
        """Path of the block that runs now."""
        return self._block

    def phase(self, name: str) -> None:
        """Enter the phase ``name`` of the step."""
        self._switch(name, self._block)
        self._count.began = self.live

    @contextmanager
    def block(self, path: str, phase: str) -> Iterator[None]:
        """Count under the block ``path`` until the context ends."""
        before = self._phase, self._block
        self._switch(phase, path)
        count = self._count
        count.began = self.live
        try:
            yield
        finally:
            count.ended = self.live
            self._last = phase, path
            self._switch(*before)

    def _switch(self, phase: str, block: str) -> None:
        self._phase, self._block = phase, block
        self._count = self._counted(block, phase)
        self._note()

    def _counted(self, block: str, phase: str) -> BlockCount:
        return self.counts.setdefault((block, phase), BlockCount())

    def _note(self) -> None:
        self._count.peak = max(self._count.peak, self.live)
        if not self._block and self._phase in ("forward", "backward"):
            self.between[self._last] = max(self.between.get(self._last, 0), self.live)
        if self.live > self.peak:
            self.peak, self.peak_phase, self.peak_block = self.live, self._phase, self._block

    def _gone(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes


class _FusedAttention(torch.autograd.Function):
    """The memory of a fused attention kernel (Dao, FlashAttention-2, arXiv:2307.08691), without its numbers.

    It keeps its inputs, its output and one log-sum-exp a row; backward gathers the query's gradient in float32.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty(*q.shape[:-1], v.shape[-1])
        row_sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, row_sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        gathered = torch.empty_like(q, dtype=torch.float32)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        return gathered.to(q.dtype), dk, dv


def fused_attention(counter: LiveBytes) -> Callable[..., Tensor]:
    """Return a stand-in for attention that has a fused kernel's memory and tells ``counter`` its work."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, heads, rows, width = q.shape
        counter.work(2 * batch * heads * rows * k.shape[-2] * (width + v.shape[-1]))
        out: Tensor = _FusedAttention.apply(q, k, v)
        return out

    return attend


class SimulatedWeights:
    """A ``StoredWeights`` that reads nothing of another.

    Attributes:
        reads: layer and phase of every use, in order.
    """

    def __init__(self, weights: StoredWeights, counter: LiveBytes) -> None:
        self.reads: list[tuple[nn.Module, str]] = []
        self._weights = weights
        self._counter = counter

    @contextmanager
    def fetch(self, module: nn.Module, like: Tensor) -> Iterator[Weights]:
        """Yield the weights as if they had been on the device."""
        yield self.finish(module, [torch.empty_like(t, device=like.device) for t in self.payload(module)], like)

    def payload(self, module: nn.Module) -> tuple[Tensor, ...]:
        """Return the host's own tensors, where they are."""
        return self._weights.payload(module)

    def finish(self, module: nn.Module, payload: Sequence[Tensor], like: Tensor) -> Weights:
        """Return what the host makes of ``payload``; without its inner steps where they need the numbers."""
        if is_matrix(module):
            self.reads.append((module, self._counter.current_phase))
        try:
            return self._weights.finish(module, payload, like)
        except (NotImplementedError, RuntimeError):
            return Weights(_like(module.weight, like), _like(module.bias, like), False)  # type: ignore[arg-type]


def _like(parameter: Any, like: Tensor) -> Tensor | None:
    return None if parameter is None else torch.empty(parameter.shape, dtype=like.dtype, device=like.device)


class SimulatedDenoiser:
    """A ``Denoiser`` that computes on tensors without data, through the network of another.

    Args:
        denoiser: the real one; nothing of it is loaded, moved or read.
        device: ``meta``; another one only to compare.
    """

    def __init__(self, denoiser: Denoiser, counter: LiveBytes, device: torch.device) -> None:
        self._denoiser = denoiser
        self._attention = fused_attention(counter)
        self.device = device
        self.weights = SimulatedWeights(denoiser.weights, counter)

    def __getattr__(self, name: str) -> Any:
        """Answer with the real denoiser's schedule, scaling and names."""
        return getattr(self._denoiser, name)

    def training(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Hold the host so that its network runs without data."""
        return self._denoiser.simulating(dtype, self._attention)

    def condition(self, encodings: Sequence[Encoding], noise: Tensor) -> list[tuple[list[int], dict[str, Any]]]:
        """Return the network's arguments by their shapes."""
        groups = self._denoiser.condition(encodings, torch.zeros(noise.shape))
        return [(rows, _moved(arguments, self.device)) for rows, arguments in groups]


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    return value


class SimulatedTransfers:
    """A ``Transfers`` to a device without data. RAM takes no device bytes.

    Args:
        measures: leave on the device what ``to_ram`` is given, and note in ``inputs`` what it would have freed, by
            block. A tensor given by several blocks frees nothing before the last lets it go, so it counts once.
    """

    def __init__(self, counter: LiveBytes, device: torch.device, measures: bool = False) -> None:
        self.device = device
        self.inputs: dict[str, int] = {}
        self._counter = counter
        self._measures = measures
        self._seen: set[int] = set()

    def empty(self, num_bytes: int) -> Tensor:
        """Return ``num_bytes`` of counted device memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def holds(self, tensor: Tensor) -> bool:
        """Return False: what a simulated denoiser stores is in RAM, whatever device stands for the real one."""
        return False

    def copy_in(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Any] = ()) -> None:
        """Copy, which reads nothing where the device has no data."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def wait(self, copy: Any) -> None:
        """Wait for nothing."""

    def released(self, copy: Any) -> None:
        """Return a fence that has passed."""

    def to_ram(self, tensor: Tensor) -> Any:
        """Return the tensor's shape, or the tensor itself where only measuring."""
        if not self._measures:
            return tensor.shape, tensor.stride(), tensor.dtype
        key = tensor.untyped_storage()._cdata
        if key not in self._seen:
            self._seen.add(key)
            weakref.finalize(tensor.untyped_storage(), self._seen.discard, key).atexit = False
            block = self._counter.current_block
            self.inputs[block] = self.inputs.get(block, 0) + tensor.untyped_storage().nbytes()
        return tensor

    def from_ram(self, kept: Any, room: Tensor | None = None) -> Tensor:
        """Return a tensor of the shape that was kept."""
        if self._measures:
            return kept  # type: ignore[no-any-return]
        if room is not None:
            return room
        shape, stride, dtype = kept
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def close(self) -> None:
        """Do nothing."""
