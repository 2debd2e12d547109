"""Weight streaming on a backend that shows a missing wait or a kept reference as NaN or as an error."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowvram_lora.fakes import FakeNetwork, FakeWeights, LateTransfers
from lowvram_lora.memory import ring
from lowvram_lora.memory.facts import ALIGNMENT, aligned
from lowvram_lora.memory.frozen import BlockMemory, frozen, frozen_forward, matrices
from lowvram_lora.memory.recompute import recomputed
from lowvram_lora.memory.ring import copies_of_a_pass
from lowvram_lora.memory.setting import Setting
from lowvram_lora.memory.stream import Streamed
from lowvram_lora.memory.transfers import DeviceTransfers
from lowvram_lora.ports import Transfers, Weights

CPU, META = torch.device("cpu"), torch.device("meta")


class Block(nn.Module):
    """Three layers of one size; one works in place."""

    def __init__(self, width: int = 16, bias: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width, bias=bias) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(torch.sin(x))
        y += self.b(x)
        return x + self.c(torch.tanh(y))


class Net(nn.Module):
    """Blocks of equal layers, with one layer before and one after them if asked."""

    def __init__(self, num_blocks: int = 4, ends: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(16, 16, bias=False) if ends else nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.last = nn.Linear(16, 16, bias=False) if ends else nn.Identity()
        self.skipped: set[int] = set()
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x)
        return self.last(x)


class Convolutions(nn.Module):
    """Blocks with convolutions, whose first outputs are kept, and biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 4, 1)) for _ in range(3)
        )
        self.blocks.insert(1, nn.ModuleList([Block(4, bias=True)]))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block[0](x.transpose(1, 3)).transpose(1, 3) if isinstance(block, nn.ModuleList) else block(x)
        return x


UNIT = 16 * 16 * 4


def size_of(module: nn.Module) -> int:
    return sum(aligned(p.nbytes) for p in module.parameters(recurse=False))


def largest(network: nn.Module) -> int:
    return max(size_of(module) for _, module in matrices(network))


@contextmanager
def trained_on(network: nn.Module, source: Any, recompute: bool = True) -> Iterator[None]:
    memory = BlockMemory(source)
    with ExitStack() as undo:
        undo.enter_context(frozen({m: frozen_forward(m, memory) for _, m in matrices(network)}))
        if recompute:
            trained = [path for path, _ in matrices(network)]
            undo.enter_context(frozen(dict(recomputed(network, memory, CPU, trained))))
        yield


@contextmanager
def streaming(
    network: nn.Module, setting: Setting, transfers: Any = None, weights: Any = None, recompute: bool = True
) -> Iterator[Streamed]:
    with ExitStack() as undo:
        source = undo.enter_context(Streamed(weights or FakeWeights(), transfers or LateTransfers(), network, setting))
        undo.enter_context(trained_on(network, source, recompute))
        yield source


def one_pass(network: nn.Module, number: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the output and the input's gradient of pass ``number``."""
    shape = (2, 4, 5, 5) if isinstance(network, Convolutions) else (2, 5, 16)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype).requires_grad_()
    out = network(x * 1.0)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad]


def without_streaming(network: nn.Module, passes: int = 3, recompute: bool = True) -> list[list[Tensor]]:
    with trained_on(network, FakeWeights(), recompute):
        return [one_pass(network, number) for number in range(passes)]


def with_streaming(
    network: nn.Module, setting: Setting, transfers: Any = None, recompute: bool = True, passes: int = 3
) -> list[list[Tensor]]:
    transfers = transfers or LateTransfers()
    found = []
    with streaming(network, setting, transfers, recompute=recompute) as source:
        for number in range(passes):
            source.begin()
            found.append(one_pass(network, number))
        spare = source.counts.num_bytes + source.resident_bytes - transfers.num_bytes
        # Each resident tensor begins at a multiple of 256 bytes.
        assert 0 <= spare < 256 * 2 * max(len(setting.resident), 1)
        assert source.counts.ring_bytes <= setting.ring_bytes
    return found


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    assert len(found) == len(expected)
    for ones, others in zip(found, expected, strict=True):
        for one, other in zip(ones, others, strict=True):
            assert torch.equal(one, other)


def passes_in_order(*names: Any) -> list[Any]:
    """Return the order in which a pass of blocks ``names`` (each a list of layers) uses layers, all recomputed."""
    forward = [layer for block in names for layer in block]
    backward = [layer for block in reversed(names) for layer in [*block, *reversed(block)]]
    return forward + backward


@pytest.mark.parametrize("network", [Net, Convolutions], ids=["linear", "convolutions"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 2.5, 4, 7, 100])
def test_streaming_changes_no_number(network: Callable[[], nn.Module], recompute: bool, layers: float) -> None:
    model = network()
    ring_bytes = int(layers * largest(model))
    found = with_streaming(model, Setting(ring_bytes=ring_bytes), recompute=recompute)
    assert_same(found, without_streaming(model, recompute=recompute))


@pytest.mark.parametrize("resident", ["none", "some", "all"])
def test_what_is_resident_changes_no_number_and_is_copied_once(resident: str) -> None:
    model = Net()
    chosen = {"none": set(), "some": {"first", "blocks.1.a", "blocks.3.c"}, "all": {p for p, _ in matrices(model)}}
    setting = Setting(resident=frozenset(chosen[resident]), ring_bytes=2 * UNIT * (resident != "all"))
    transfers = LateTransfers()
    with streaming(model, setting, transfers) as source:
        assert transfers.num_copies == len(chosen[resident])
        assert source.resident_bytes == len(chosen[resident]) * UNIT
        found = []
        for number in range(3):
            source.begin()
            found.append(one_pass(model, number))
        assert transfers.num_copies == len(chosen[resident]) + source.counts.copies
        assert source.resident_bytes == len(chosen[resident]) * UNIT
    assert (source.counts.copies == 0) == (resident == "all")
    assert_same(found, without_streaming(model))


def count_of_a_pass(model: nn.Module, source: Streamed, number: int) -> tuple[int, int]:
    before = source.counts.copies, source.counts.num_bytes
    source.begin()
    one_pass(model, number)
    return source.counts.copies - before[0], source.counts.num_bytes - before[1]


@pytest.mark.parametrize("units", [4, 5, 6])
def test_a_block_that_fits_is_copied_once_for_recompute_and_backward(units: int) -> None:
    model = Net(num_blocks=6)
    with streaming(model, Setting(ring_bytes=units * UNIT)) as source:
        counts = [count_of_a_pass(model, source, number) for number in range(4)]
    # Forward 6 x 3 + 2, backward as many: once for recompute and gradient. Of these the ring still holds the last block
    # and the layer after it where the pass turns, and as much as it can where the next pass begins.
    whole = 2 * (6 * 3 + 2)
    saved = 4 + units
    assert [copies for copies, _ in counts[1:]] == [whole - saved] * 3
    assert [num_bytes for _, num_bytes in counts[1:]] == [(whole - saved) * UNIT] * 3
    # Also in the first pass, when nothing is known of what comes.
    assert counts[0][0] <= whole


def order_of(model: Net) -> list[str]:
    blocks = [[f"blocks.{number}.{layer}" for layer in "abc"] for number in range(len(model.blocks))]
    inner = passes_in_order(*blocks)
    turn = 3 * len(blocks)
    return ["first", *inner[:turn], "last", "last", *inner[turn:], "first"]


def sizes_of(model: nn.Module) -> dict[str, int]:
    return {path: size_of(module) for path, module in matrices(model)}


@pytest.mark.parametrize("ring_bytes", [n * UNIT for n in (1, 2, 3, 4, 7, 9, 20, 30)])
def test_the_copies_of_a_pass_are_foreseen(ring_bytes: int) -> None:
    model = Net()
    expected = copies_of_a_pass(order_of(model), sizes_of(model), ring_bytes)
    with streaming(model, Setting(ring_bytes=ring_bytes)) as source:
        counts = [count_of_a_pass(model, source, number) for number in range(5)]
    assert counts[-1] == (len(expected), len(expected) * UNIT)


def test_from_the_second_pass_on_copies_start_before_they_are_asked_for() -> None:
    model = Net()
    order = order_of(model)
    late = []
    with Streamed(FakeWeights(), LateTransfers(), model, Setting(ring_bytes=2 * UNIT)) as source:
        # One pass is broken off, and is not taken for what comes.
        for number, paths in enumerate([order, order, order[:9], order]):
            source.begin()
            for path in paths:
                before = source.counts.copies
                with source.fetch(model.get_submodule(path), torch.empty(0)):
                    if source.counts.copies > before:
                        late.append((number, path))
    assert {number for number, _ in late} == {0}


def test_a_layer_that_nobody_foresaw_and_no_ring_holds_is_fetched_the_hosts_way() -> None:
    model = Net()
    with Streamed(FakeWeights(), LateTransfers(), model, Setting(ring_bytes=768)) as source:
        source.begin()
        with source.fetch(model.first, torch.empty(0)) as weights:
            assert torch.equal(weights.weight, model.first.weight)
        assert source.counts.copies == 0


class Buffers(LateTransfers):
    """Remembers which memory it gave out."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[weakref.ref[torch.UntypedStorage]] = []
        self.sizes: list[int] = []
        self.offsets: set[int] = set()

    def empty(self, num_bytes: int) -> Tensor:
        made = super().empty(num_bytes)
        self.given.append(weakref.ref(made.untyped_storage()))
        self.sizes.append(num_bytes)
        return made

    def copy_in(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Any] = ()) -> Any:
        self.offsets |= {t.storage_offset() * t.element_size() for t in targets}
        return super().copy_in(targets, sources, after)


def test_device_memory_is_the_ring_and_what_is_resident_and_nothing_is_left() -> None:
    model, transfers = Convolutions(), Buffers()
    setting = Setting(resident=frozenset({"blocks.0.2"}), ring_bytes=2 * largest(model))
    with_streaming(model, setting, transfers)
    # Resident weights share one piece of memory, each at an address of its own alignment.
    assert sorted(transfers.sizes) == sorted([setting.ring_bytes, aligned(6 * 4 * 4) + aligned(4 * 4)])
    assert all(offset % ALIGNMENT == 0 for offset in transfers.offsets)
    assert [ref() for ref in transfers.given] == [None] * 2


class Stop(BaseException):
    """As the host's interrupt."""


@pytest.mark.parametrize("at", range(1, 40, 3))
def test_an_interrupt_anywhere_leaves_nothing_and_the_next_pass_is_right(at: int) -> None:
    class Interrupted(FakeWeights):
        uses = 0

        def finish(self, module: Any, payload: Sequence[Tensor], like: Tensor) -> Weights:
            self.uses += 1
            if self.uses == at:
                raise Stop
            return super().finish(module, payload, like)

    model, transfers, weights = Net(num_blocks=3), Buffers(), Interrupted()
    with streaming(model, Setting(ring_bytes=4 * UNIT), transfers, weights) as source:
        source.begin()
        with pytest.raises(Stop):
            for _ in range(2):
                one_pass(model)
                source.begin()
        weights.uses = 1000
        found = []
        for number in range(3):
            source.begin()
            found.append(one_pass(model, number))
    assert_same(found, without_streaming(model))
    assert [ref() for ref in transfers.given] == [None]


@pytest.mark.parametrize("where", ["copy_in", "wait"])
@pytest.mark.parametrize("at", range(0, 24, 2))
def test_a_copy_that_fails_is_made_again(at: int, where: str) -> None:
    class Failing(LateTransfers):
        left = at + 1

        def count(self, name: str) -> None:
            self.left -= name == where
            if self.left == 0:
                self.left = -1
                raise MemoryError

        def copy_in(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Any] = ()) -> Any:
            self.count("copy_in")
            return super().copy_in(targets, sources, after)

        def wait(self, copy: Any) -> None:
            self.count("wait")
            super().wait(copy)

    model = Net(num_blocks=2)
    with streaming(model, Setting(ring_bytes=3 * UNIT), Failing()) as source:
        with pytest.raises(MemoryError):
            for _ in range(2):
                source.begin()
                one_pass(model)
        found = []
        for number in range(2):
            source.begin()
            found.append(one_pass(model, number))
    assert_same(found, without_streaming(model, passes=2))


@pytest.mark.parametrize("units", [2, 4, 9])
def test_a_pass_that_does_something_else_is_right_and_learned(units: int) -> None:
    model = Net()
    skips = [set(), {1}, {1}, set(), {0, 3}, set(), set()]

    def all_passes() -> Iterator[list[Tensor]]:
        for number, skipped in enumerate(skips):
            model.skipped = skipped
            yield one_pass(model, number)

    with trained_on(model, FakeWeights()):
        expected = list(all_passes())
    with streaming(model, Setting(ring_bytes=units * UNIT)) as source:
        source.begin()
        found, copies = [], []
        for result in all_passes():
            found.append(result)
            copies.append(source.counts.copies)
            source.begin()
    assert_same(found, expected)
    assert copies[-1] - copies[-2] == len(copies_of_a_pass(order_of(model), sizes_of(model), units * UNIT))


def test_what_is_on_the_device_already_is_used_there_and_not_copied() -> None:
    model, transfers = Net(), LateTransfers()
    transfers.on_device = {m.weight.data_ptr() for p, m in matrices(model) if p.startswith("blocks.2") or p == "first"}
    used: dict[int, int] = {}

    class Watched(FakeWeights):
        def finish(self, module: Any, payload: Sequence[Tensor], like: Tensor) -> Weights:
            used[module.weight.data_ptr()] = payload[0].data_ptr()
            return super().finish(module, payload, like)

    setting = Setting(ring_bytes=4 * UNIT, resident=frozenset({"first"}))
    with streaming(model, setting, transfers, Watched()) as source:
        assert source.resident_bytes == 0
        found = []
        for number in range(3):
            source.begin()
            found.append(one_pass(model, number))
            # The host may move them at any time.
            assert {at for at, there in used.items() if at == there} >= transfers.on_device
        transfers.on_device.clear()
        source.begin()
        found.append(one_pass(model, 3))
    assert_same(found, without_streaming(model, passes=4))


class Int8Weights(FakeWeights):
    """Keeps each weight as whole numbers with a scale for each row."""

    def payload(self, module: Any) -> tuple[Tensor, ...]:
        return module.numbers, module.scale

    def finish(self, module: Any, payload: Sequence[Tensor], like: Tensor) -> Weights:
        numbers, scale = payload
        return Weights(numbers.to(like.dtype) * scale.to(like.dtype), None, True)


@pytest.mark.parametrize("resident", [frozenset(), frozenset({"blocks.0.a", "blocks.3.b"})])
def test_a_quantised_base_goes_through_the_ring_as_it_is_stored(resident: frozenset[str]) -> None:
    model = Net(ends=False)
    for _, module in matrices(model):
        module.scale = module.weight.abs().amax(1, keepdim=True) / 127
        module.numbers = (module.weight / module.scale).round().to(torch.int8)
        module.weight.copy_(module.numbers.float() * module.scale)
    unit = 256 + aligned(64)
    setting = Setting(ring_bytes=4 * unit, resident=resident)
    with streaming(model, setting, weights=Int8Weights()) as source:
        found, counts = [], []
        for number in range(3):
            source.begin()
            found.append(one_pass(model, number))
            counts.append(source.counts.copies)
        assert source.resident_bytes == len(resident) * unit
    assert_same(found, without_streaming(model))
    # A block is copied once for recompute and backward, though what is made of it is thrown away after each use.
    assert counts[2] - counts[1] <= 2 * (4 * 3 - len(resident))


def test_resident_weights_that_are_smaller_in_the_dtype_in_use_stay_in_that() -> None:
    model = Net(ends=False)
    everything = frozenset(path for path, _ in matrices(model))
    with streaming(model, Setting(resident=everything)) as source:
        found = [one_pass(model, number, torch.bfloat16) for number in range(2)]
        assert source.resident_bytes == len(everything) * UNIT
        with source.fetch(model.blocks[0].a, torch.empty(0, dtype=torch.bfloat16)) as (weight, _, stable):
            assert stable and weight.dtype == torch.bfloat16
        # Another dtype than before is made from what is in RAM.
        with source.fetch(model.blocks[0].a, torch.empty(0)) as (weight, _, stable):
            assert torch.equal(weight, model.blocks[0].a.weight) and not stable
    with trained_on(model, FakeWeights()):
        assert_same(found, [one_pass(model, number, torch.bfloat16) for number in range(2)])


def test_a_weight_of_the_ring_may_not_be_kept() -> None:
    model = Net()
    with Streamed(FakeWeights(), LateTransfers(), model, Setting(ring_bytes=9 * UNIT)) as source:
        with source.fetch(model.first, torch.empty(0)) as (weight, _, stable):
            assert not stable
            assert torch.equal(weight, model.first.weight)
        assert weight.isnan().all()


def test_a_step_without_data_makes_the_same_copies() -> None:
    counts = []
    for transfers in (LateTransfers(), DeviceTransfers(META)):
        model = FakeNetwork()
        setting = Setting(ring_bytes=3 * largest(model), resident=frozenset({"blocks.0.mlp.0"}))
        with Streamed(FakeWeights(), transfers, model, setting) as source:
            order = passes_in_order(*[[m for p, m in matrices(model) if p.startswith(f"blocks.{n}")] for n in (0, 1)])
            for _ in range(3):
                source.begin()
                for module in order:
                    with source.fetch(module, torch.empty(0, device=transfers.device)) as (weight, bias, _):
                        assert weight.device == bias.device == transfers.device
                        assert weight.shape == module.weight.shape
            counts.append((source.counts, source.resident_bytes))
    assert counts[0] == counts[1]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[nn.Linear], int, list[list[int]]]:
    """Return layers, a ring that holds the largest, and the order of some passes, most of them alike."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8))
    layers = [nn.Linear(m, n, bias=draw(st.booleans())).requires_grad_(False) for m, n in sizes]
    least = max(map(size_of, layers))
    ring_bytes = draw(st.integers(least, 2 * sum(map(size_of, layers)) + 1000))
    numbers = st.integers(0, len(layers) - 1)
    orders = draw(st.lists(st.lists(numbers, max_size=20), min_size=1, max_size=3))
    return layers, ring_bytes, [order for order in orders for _ in range(draw(st.integers(1, 3)))]


@given(jobs(), st.data())
@settings(max_examples=150, deadline=None)
def test_any_order_in_any_ring_gives_the_weights(job: Any, data: st.DataObject) -> None:
    layers, ring_bytes, passes = job
    like = torch.empty(0)
    transfers = Buffers()
    with Streamed(FakeWeights(), transfers, nn.ModuleList(layers), Setting(ring_bytes=ring_bytes)) as source:
        for order in passes:
            source.begin()
            open_ones = ExitStack()
            with open_ones:
                for number in order:
                    # Now and then a layer is used within the use of others.
                    inside = data.draw(st.sampled_from([False, False, False, True]))
                    with ExitStack() as this:
                        weight, bias, stable = (open_ones if inside else this).enter_context(
                            source.fetch(layers[number], like)
                        )
                        assert torch.equal(weight, layers[number].weight)
                        assert bias is None or torch.equal(bias, layers[number].bias)
                        assert not stable
                        del weight, bias
            assert source.counts.ring_bytes <= ring_bytes
    assert transfers.sizes == [ring_bytes]
    assert transfers.given[0]() is None


@given(jobs())
@settings(max_examples=150, deadline=None)
def test_a_search_that_was_in_vain_is_not_made_again_and_no_place_differs(job: Any) -> None:
    layers, ring_bytes, passes = job

    def places(always_search: bool) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []

        def load(segment: ring.Segment) -> bool:
            found.append((segment.key, segment.start, segment.end))  # type: ignore[arg-type]
            return True

        with pytest.MonkeyPatch.context() as patch:
            if always_search:
                place = ring._Places.place
                patch.setattr(ring._Places, "place", lambda self, *a, **k: (self.change_all(), place(self, *a, **k))[1])
            conveyor = ring.Conveyor(ring_bytes, lambda number: size_of(layers[number]), load)
            for order in passes:
                conveyor.begin()
                for number in order:
                    segment = conveyor.take(number)
                    assert segment is not None
                    conveyor.give_back(segment, None)
                    conveyor.load_ahead()
        return found

    assert places(False) == places(True)


@given(jobs())
@settings(max_examples=100, deadline=None)
def test_one_use_at_a_time_never_needs_the_hosts_way(job: Any) -> None:
    layers, ring_bytes, passes = job
    weights = FakeWeights()
    with Streamed(weights, LateTransfers(), nn.ModuleList(layers), Setting(ring_bytes=ring_bytes)) as source:
        for order in passes:
            source.begin()
            for number in order:
                with source.fetch(layers[number], torch.empty(0)) as (weight, _, _):
                    assert torch.equal(weight, layers[number].weight)
    assert not weights.fetched


@pytest.mark.parametrize("make", [LateTransfers, lambda: DeviceTransfers(CPU)], ids=["late", "in order"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("to_room", [False, True])
def test_what_goes_to_ram_comes_back(make: Callable[[], Transfers], dtype: torch.dtype, to_room: bool) -> None:
    transfers = make()
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = tensor.clone()
    kept = transfers.to_ram(tensor)
    tensor.zero_()
    room = torch.empty_like(tensor) if to_room else None
    back = transfers.from_ram(kept, room)
    assert torch.equal(back, expected)
    assert room is None or back.data_ptr() == room.data_ptr()
    assert back.dtype == dtype and back.data_ptr() != tensor.data_ptr()
    transfers.close()


def test_without_data_ram_remembers_the_shape() -> None:
    transfers = DeviceTransfers(META)
    back = transfers.from_ram(transfers.to_ram(torch.empty(3, 5, dtype=torch.bfloat16, device=META)))
    assert (back.shape, back.dtype, back.device) == ((3, 5), torch.bfloat16, META)
