"""Feed-forwards in parts: the same numbers, less at once; and which modules are feed-forwards at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowvram_lora.adapters.attach import Adapters, adapted_forwards, build
from lowvram_lora.config import LoraConfig
from lowvram_lora.fakes import FakeWeights
from lowvram_lora.memory.chunks import chunked_forwards, find_feed_forwards
from lowvram_lora.memory.frozen import BlockMemory, frozen, frozen_forward, matrices
from lowvram_lora.memory.pace import ring_for_parts
from lowvram_lora.memory.recompute import Recompute, find_blocks, recomputed
from lowvram_lora.memory.ring import copies_of_a_pass
from lowvram_lora.memory.simulate import LiveBytes

CPU = torch.device("cpu")
WIDTH, WIDE, TOKENS = 6, 20, 11


class Gated(nn.Module):
    """As SDXL's: half of what the first layer gives opens the gate for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, 2 * WIDE)
        self.net = nn.ModuleList([nn.Dropout(0.0), nn.Linear(WIDE, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return self.net[1](value * F.gelu(gate))


class Block(nn.Module):
    def __init__(self, adds_in_place: bool = False) -> None:
        super().__init__()
        self.to_v = nn.Linear(WIDTH, WIDTH)
        self.ff = Gated()
        self.adds_in_place = adds_in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.to_v(x).mean(1, keepdim=True)
        if not self.adds_in_place:
            return x + self.ff(torch.tanh(x))
        x += self.ff(torch.tanh(x))
        return x


class Network(nn.Module):
    def __init__(self, adds_in_place: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(adds_in_place) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


LAYERS = ("blocks.0.ff.proj", "blocks.0.ff.net.1", "blocks.1.to_v", "blocks.1.ff.proj")


def adapters_for(network: nn.Module, layers: tuple[str, ...]) -> Adapters:
    chosen = {path: network.get_submodule(path) for path in layers}
    adapters = build(chosen, LoraConfig(rank=3, alpha=5.0), seed=1, device=CPU)
    for number, parameter in enumerate(adapters.parameters()):
        generator = torch.Generator().manual_seed(number)
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return adapters


@contextmanager
def engaged(
    network: nn.Module, adapters: Adapters, rows: int | None, how: Recompute | None = None, source: Any = None
) -> Iterator[None]:
    """Run ``network`` as training does; ``rows`` is None for feed-forwards as a whole."""
    memory = BlockMemory(source or FakeWeights())
    layers = {path: network.get_submodule(path) for path in adapters.layers}
    with ExitStack() as undo:
        forwards: dict[nn.Module, Any] = {module: frozen_forward(module, memory) for _, module in matrices(network)}
        forwards.update(adapted_forwards(layers, adapters, memory))
        undo.enter_context(frozen(forwards))
        undo.enter_context(frozen(dict(recomputed(network, memory, CPU, layers, how or Recompute()))))
        if rows:
            undo.enter_context(frozen(chunked_forwards(network, find_blocks(network), layers, anchor(CPU), rows)))
        yield


def anchor(device: torch.device) -> Tensor:
    return torch.zeros((), device=device, requires_grad=True)


def step(
    rows: int | None,
    layers: tuple[str, ...] = LAYERS,
    how: Recompute | None = None,
    batch: int = 2,
    adds_in_place: bool = False,
) -> list[Tensor | None]:
    """Return the output and all gradients; that of the input is the first."""
    network = Network(adds_in_place).double().requires_grad_(False)
    adapters = adapters_for(network, layers)
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(batch, TOKENS, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    with engaged(network, adapters, rows, how):
        out = network(x)
        out.square().sum().backward()
    return [out.detach(), x.grad, *(parameter.grad for parameter in adapters.parameters())]


@given(rows=st.integers(1, 30), batch=st.integers(1, 3), kept=st.sets(st.sampled_from(["blocks.0", "blocks.1"])))
@settings(max_examples=15, deadline=None)
def test_parts_give_the_numbers_of_the_whole(rows: int, batch: int, kept: set[str]) -> None:
    for in_place in (False, True):
        whole = step(None, how=Recompute(kept=kept), batch=batch, adds_in_place=in_place)
        parts = step(rows, how=Recompute(kept=kept), batch=batch, adds_in_place=in_place)
        for one, other in zip(whole, parts, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layers", [("blocks.0.ff.proj",), ("blocks.1.to_v",)])
def test_a_feed_forward_trains_or_hands_a_gradient_on(layers: tuple[str, ...]) -> None:
    for one, other in zip(step(None, layers), step(4, layers), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_adapters_train_where_the_input_needs_no_gradient() -> None:
    network = Network().requires_grad_(False).double()
    found = []
    for rows in (None, 4):
        adapters = adapters_for(network, ("blocks.0.ff.proj",))
        with engaged(network, adapters, rows, Recompute(kept=["blocks.0", "blocks.1"])):
            network(torch.ones(1, TOKENS, WIDTH, dtype=torch.float64)).sum().backward()
        found.append([parameter.grad for parameter in adapters.parameters()])
    for one, other in zip(*found, strict=True):
        assert one.any()
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_a_feed_forward_that_trains_nothing_records_nothing() -> None:
    network = Network().requires_grad_(False).double()
    with engaged(network, adapters_for(network, ("blocks.1.to_v",)), 4):
        assert not network.blocks[0].ff(torch.ones(1, TOKENS, WIDTH, dtype=torch.float64)).requires_grad


def test_parts_do_not_make_a_block_one_that_writes_in_place() -> None:
    network = Network().requires_grad_(False).double()
    adapters = adapters_for(network, LAYERS)
    memory = BlockMemory(FakeWeights())
    layers = {path: network.get_submodule(path) for path in LAYERS}
    blocks = dict(recomputed(network, memory, CPU, layers, Recompute()))
    forwards = {module: frozen_forward(module, memory) for _, module in matrices(network)}
    forwards.update(adapted_forwards(layers, adapters, memory))
    chunked = chunked_forwards(network, find_blocks(network), LAYERS, anchor(CPU), 4)
    with frozen(forwards), frozen(dict(blocks)), frozen(chunked):
        network(torch.ones(2, TOKENS, WIDTH, dtype=torch.float64)).sum().backward()
    assert [block.writes_in_place for block in blocks.values()] == [False, False]


def test_an_output_may_be_written_to() -> None:
    network = Network().requires_grad_(False).double()
    with engaged(network, adapters_for(network, LAYERS), 4, Recompute(kept=["blocks.0", "blocks.1"])):
        out = network.blocks[0].ff(torch.ones(2, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True))
        out += 1
        out.sum().backward()


def test_the_network_is_as_before_afterwards() -> None:
    network = Network()
    with engaged(network, adapters_for(network, LAYERS), 4):
        assert "forward" in network.blocks[0].ff.__dict__
    assert not any("forward" in module.__dict__ for module in network.modules())


# What it is for.


def peak(rows: int | None) -> tuple[int, int]:
    """Return the most live bytes of a feed-forward's forward and backward pass, and its work."""
    with torch.device("meta"):
        network = Network().requires_grad_(False)
    counter = LiveBytes("meta")
    memory = BlockMemory(FakeWeights())
    with frozen({module: frozen_forward(module, memory) for _, module in matrices(network)}), counter:
        x = torch.empty(1, 4096, WIDTH, device="meta", requires_grad=True)
        token = anchor(torch.device("meta"))
        with frozen(chunked_forwards(network, find_blocks(network), (), token, rows) if rows else {}):
            network.blocks[0].ff(x).sum().backward()
    return counter.peak, sum(count.flops for count in counter.counts.values())


def test_only_input_and_output_live_beside_one_part() -> None:
    (whole, whole_flops), (parts, parts_flops) = peak(None), peak(512)
    token = 4 * 4096
    assert whole > token * 5 * WIDE
    # Input, output and the gradients of both; beside them an eighth of what the whole holds.
    assert parts < token * 5 * WIDTH + whole / 8
    # It runs forward once more.
    assert parts_flops == whole_flops * 3 // 2


def test_the_same_bytes_live_with_data_and_without() -> None:
    peaks = []
    for device in (CPU, torch.device("meta")):
        network = Network().requires_grad_(False).to(device)
        memory, counter = BlockMemory(FakeWeights()), LiveBytes(device.type)
        with frozen({module: frozen_forward(module, memory) for _, module in matrices(network)}), counter:
            for parameter in network.parameters():
                counter.ignore(parameter)
            x = torch.empty(3, 100, WIDTH, device=device, requires_grad=True)
            with frozen(chunked_forwards(network, find_blocks(network), (), anchor(device), 64)):
                network(x).sum().backward()
        peaks.append((counter.peak, counter.live))
    assert peaks[0] == peaks[1]


# Which modules it takes.


class Mixing(Gated):
    """Its response norm looks at all tokens, and has numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1, 1, WIDE))


def small_block(name: str, module: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"to_q": nn.Linear(2, 2), "to_k": nn.Linear(2, 2), name: module})


def sequential(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 8), *between, nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("name", "make", "is_taken"),
    [
        ("ff", Gated, True),
        ("img_mlp", lambda: sequential(nn.GELU()), True),
        ("mlpX", lambda: sequential(nn.SiLU()), True),
        ("ffn", lambda: sequential(nn.GELU()), True),
        ("feed_forward", lambda: sequential(nn.Dropout(0.0)), True),
        ("experts", lambda: nn.ModuleDict({"mlp": sequential(nn.GELU())}), True),
        ("attn", lambda: sequential(nn.GELU()), False),
        ("ff", lambda: sequential(nn.Dropout(0.1)), False),
        ("ff", lambda: sequential(nn.ReLU(inplace=True)), False),
        ("ff", lambda: sequential(nn.Conv1d(8, 8, 1)), False),
        ("ff", lambda: sequential(nn.LayerNorm(8)), False),
        ("ff", Mixing, False),
        ("mlp", lambda: nn.Linear(2, 2), False),
    ],
)
def test_feed_forwards_are_known_by_name_and_by_what_they_hold(
    name: str, make: Callable[[], nn.Module], is_taken: bool
) -> None:
    network = nn.ModuleDict({"blocks": nn.ModuleList([small_block(name, make())])})
    found = find_feed_forwards(network, find_blocks(network))
    assert len(found) == is_taken
    assert all(path.startswith(f"blocks.0.{name}") for path in found)


# What it costs in copies.


@given(
    others=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    wide=st.lists(st.integers(1, 40), min_size=2, max_size=3),
    num_parts=st.integers(2, 5),
)
@settings(max_examples=60, deadline=None)
def test_a_ring_for_parts_copies_no_more_than_for_the_whole(others: list[int], wide: list[int], num_parts: int) -> None:
    sizes = {f"other {i}": 256 * size for i, size in enumerate(others)}
    part = {f"wide {i}": 256 * size for i, size in enumerate(wide)}
    ring_bytes = max(2 * max({**sizes, **part}.values()), ring_for_parts([*part.values()]))
    orders = [[*sizes, *(list(part) * times)] * 2 for times in (1, num_parts)]
    whole, in_parts = (copies_of_a_pass(order, {**sizes, **part}, ring_bytes) for order in orders)
    assert len(in_parts) <= len(whole)
