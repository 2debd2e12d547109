"""A layer and its LoRA in one function: PEFT's numbers, and no memory beside what they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowvram_lora.adapters.attach import Adapters, adapted_forwards, build
from lowvram_lora.config import LoraConfig
from lowvram_lora.fakes import FakeWeights
from lowvram_lora.memory.frozen import BlockMemory, frozen, matrices
from lowvram_lora.memory.recompute import recomputed
from lowvram_lora.ports import Weights

CPU = torch.device("cpu")
RANK, ALPHA = 2, 7.0

LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "rows": (nn.Linear(6, 5), (4, 6)),
    "tokens": (nn.Linear(6, 5), (2, 4, 6)),
    "no bias": (nn.Linear(6, 5, bias=False), (2, 4, 6)),
    "windows": (nn.Linear(6, 5), (2, 3, 4, 6)),
    "conv": (nn.Conv2d(3, 5, 3, padding=1), (2, 3, 8, 8)),
    "large picture": (nn.Conv2d(3, 5, 3, padding=1), (2, 3, 20, 20)),
    "stride": (nn.Conv2d(3, 5, 3, stride=2, padding=1), (2, 3, 9, 8)),
    "one": (nn.Conv2d(3, 5, 1, bias=False), (2, 3, 20, 20)),
    "signal": (nn.Conv1d(3, 5, 3, stride=2, padding=2), (2, 3, 9)),
    "video": (nn.Conv3d(3, 5, (1, 3, 3), padding=(0, 1, 1)), (2, 3, 2, 6, 6)),
}


def adapted(layer: Any, source: Any = None, dtype: torch.dtype = torch.float64) -> tuple[Any, Adapters, Any]:
    """Return the forward, the adapters with an up matrix that is not zero, and PEFT's own layer over ``layer``."""
    layer.to(dtype).requires_grad_(False)
    adapters = build({"x": layer}, LoraConfig(rank=RANK, alpha=ALPHA), seed=0, device=CPU)
    peft_layer: Any = adapters.layers["x"].to(dtype)
    up = peft_layer.lora_B["default"].weight
    up.data = torch.randn(up.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    peft_layer.base_layer.forward = layer.forward
    ((_, forward),) = adapted_forwards({"x": layer}, adapters, source or BlockMemory(FakeWeights()))
    return forward, adapters, peft_layer


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(2))


def outcome(function: Any, x: Tensor, adapters: Adapters) -> list[Tensor]:
    """Return output and gradients; the output's gradient is a view with strides of its own."""
    for parameter in adapters.parameters():
        parameter.grad = None
    leaf = x.detach().requires_grad_()
    out = function(leaf)
    out.transpose(-1, -2).square().transpose(0, 1).sin().sum().backward()
    return [out.detach(), leaf.grad, *[p.grad for p in adapters.parameters()]]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """To a relative 1e-12 of each tensor's norm."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and (a - b).norm() <= 1e-12 * b.norm()


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@pytest.mark.parametrize("name", LAYERS)
def test_output_and_gradients_are_pefts(name: str, contiguous: bool) -> None:
    layer, shape = LAYERS[name]
    forward, adapters, peft_layer = adapted(layer)
    x = drawn(shape) if contiguous else drawn(shape[::-1]).permute(*reversed(range(len(shape))))
    assert x.is_contiguous() == contiguous
    assert_same(outcome(forward, x, adapters), outcome(peft_layer, x, adapters))
    with torch.no_grad():
        assert_same([forward(x)], [peft_layer(x)])


def test_a_picture_that_holds_its_channels_last_gives_pefts_numbers() -> None:
    forward, adapters, peft_layer = adapted(LAYERS["large picture"][0])
    x = drawn((2, 3, 20, 20)).to(memory_format=torch.channels_last)
    assert_same(outcome(forward, x, adapters), outcome(peft_layer, x, adapters))


@pytest.mark.parametrize("name", ["tokens", "conv"])
def test_gradients_have_the_parameters_type(name: str) -> None:
    layer, shape = LAYERS[name]
    for dtype in (torch.float32, torch.bfloat16):
        forward, adapters, _ = adapted(layer, dtype=dtype)
        forward(drawn(shape, torch.bfloat16)).sum().backward()
        assert [p.grad.dtype for p in adapters.parameters()] == [dtype, dtype]


@pytest.mark.parametrize("name", LAYERS)
def test_the_output_may_be_written_over(name: str) -> None:
    layer, shape = LAYERS[name]
    forward, adapters, peft_layer = adapted(layer)
    x = drawn(shape)

    def written_over(function: Any) -> Any:
        def forward(leaf: Tensor) -> Tensor:
            out = function(leaf)
            assert not out._is_view()
            out += 1.0
            return out

        return forward

    results = [outcome(written_over(function), x, adapters) for function in (forward, peft_layer)]
    assert_same(*results)


@pytest.mark.parametrize("name", ["tokens", "conv"])
def test_an_input_without_gradient_costs_no_weight_in_the_backward_pass(name: str) -> None:
    layer, shape = LAYERS[name]
    source = FakeWeights()
    forward, adapters, peft_layer = adapted(layer, BlockMemory(source))
    forward(drawn(shape)).square().sum().backward()
    found = [p.grad.clone() for p in adapters.parameters()]
    assert source.fetched[layer] == 1
    for parameter in adapters.parameters():
        parameter.grad = None
    peft_layer(drawn(shape)).square().sum().backward()
    assert_same(found, [p.grad for p in adapters.parameters()])


@pytest.mark.parametrize("name", LAYERS)
def test_shapes_and_types_are_the_same_without_data(name: str) -> None:
    layer, shape = LAYERS[name]

    class OnMeta(FakeWeights):
        @contextmanager
        def fetch(self, module: Any, like: Tensor) -> Iterator[Weights]:
            bias = None if module.bias is None else torch.empty_like(module.bias, device="meta", dtype=like.dtype)
            yield Weights(torch.empty_like(module.weight, device="meta", dtype=like.dtype), bias, True)

    adapters = build({"x": layer}, LoraConfig(rank=RANK, alpha=ALPHA), seed=0, device=torch.device("meta"))
    ((_, forward),) = adapted_forwards({"x": layer}, adapters, BlockMemory(OnMeta()))
    x = torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out = forward(x)
    assert out.shape == layer(drawn(shape).to(layer.weight.dtype)).shape
    out.sum().backward()
    assert x.grad.shape == x.shape and x.grad.dtype == torch.bfloat16
    assert all(p.grad.shape == p.shape and p.grad.dtype == torch.float32 for p in adapters.parameters())


class Allocations(TorchDispatchMode):
    """Counts the elements of every new storage."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []
        self._seen: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {tensor.untyped_storage().data_ptr() for tensor in (*self._seen, *args) if isinstance(tensor, Tensor)}
        known |= {value.untyped_storage().data_ptr() for value in (kwargs or {}).values() if isinstance(value, Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.elements.append(result.untyped_storage().nbytes() // result.element_size())
            self._seen.append(result)
        return result


def test_a_linear_layer_makes_one_output_and_one_input_gradient_and_else_only_small_tensors() -> None:
    rows, width, wide = 100, 60, 90
    layer = nn.Linear(width, wide)
    forward, _, _ = adapted(layer, dtype=torch.float32)
    x = drawn((rows, width), torch.float32).requires_grad_()
    with Allocations() as seen:
        out = forward(x)
    assert sorted(seen.elements)[-2:] == [rows * RANK, rows * wide]
    with Allocations() as seen:
        torch.autograd.grad(out, [x], torch.ones_like(out))
    large = [n for n in seen.elements if n > rows * RANK]
    # The first is the gradient made here.
    assert large == [rows * wide, rows * width]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.conv(torch.sin(x))))


class InPlaceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x)
        hidden += 1.0
        hidden.mul_(self.linear(hidden).sigmoid())
        return hidden


class OutOfPlaceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x) + 1.0
        return hidden * self.linear(hidden).sigmoid()


class Network(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def through_blocks(kind: type[Block], recompute: bool) -> list[Tensor]:
    """Return output and gradients of the second call: the first finds out how a block is to be run."""
    torch.manual_seed(0)
    network = Network(kind).double().requires_grad_(False)
    layers = dict(matrices(network))
    adapters = build(layers, LoraConfig(rank=RANK, alpha=ALPHA), seed=0, device=CPU)
    for layer in adapters.layers.values():
        layer.double()
        layer.lora_B["default"].weight.data.normal_()
    memory = BlockMemory(FakeWeights())
    with ExitStack() as undo:
        undo.enter_context(frozen(dict(adapted_forwards(layers, adapters, memory))))
        if recompute:
            undo.enter_context(frozen(dict(recomputed(network, memory, CPU, layers))))
        outcome(network, drawn((2, 3, 20, 20)), adapters)
        return outcome(network, drawn((2, 3, 20, 20)), adapters)


@pytest.mark.parametrize(
    ("plain", "kind"), [(Block, Block), (OutOfPlaceBlock, InPlaceBlock)], ids=["plain", "writes in place"]
)
def test_a_recomputed_block_gives_the_gradients_of_one_that_is_not(plain: type[Block], kind: type[Block]) -> None:
    assert_same(through_blocks(kind, recompute=True), through_blocks(plain, recompute=False))
