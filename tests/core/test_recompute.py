"""Block recompute on blocks that add in place, share inputs, or can't be recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lowvram_lora.errors import UnsupportedModelError
from lowvram_lora.fakes import FakeNetwork, FakeWeights
from lowvram_lora.memory import frozen as frozen_module
from lowvram_lora.memory.frozen import BlockMemory, frozen, frozen_forward, matrices
from lowvram_lora.memory.recompute import Recompute, RecomputedBlock, find_blocks, learned, recomputed
from lowvram_lora.ports import Weights

CPU = torch.device("cpu")


@dataclass
class Modulation:
    """As Flux.2 hands it from block to block: no pytree."""

    shift: Tensor
    scale: Tensor


class TwoStreams(nn.Module):
    """A block of two streams that writes into both in place, with a modulation shared between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, img: Tensor, txt: Tensor, mod: Modulation, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        img += self.a(torch.tanh(img * mod.scale + mod.shift)) * options["gain"]
        txt += self.b(torch.sin(txt)) * mod.scale + img.mean(1, keepdim=True) * txt
        img.mul_(txt.tanh())
        txt[:, :1] *= 0.5
        return img, txt


class OutOfPlace(TwoStreams):
    """The same sums without writing into anything: the reference."""

    def forward(self, img: Tensor, txt: Tensor, mod: Modulation, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        img = img + self.a(torch.tanh(img * mod.scale + mod.shift)) * options["gain"]
        txt = txt + self.b(torch.sin(txt)) * mod.scale + img.mean(1, keepdim=True) * txt
        img = img * txt.tanh()
        return img, torch.cat([txt[:, :1] * 0.5, txt[:, 1:]], dim=1)


class Network(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.modulation = nn.Linear(3, 12)
        self.double_blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor) -> Tensor:
        shift, scale = self.modulation(vec).chunk(2, dim=-1)
        mod, options = Modulation(shift, scale), {"gain": 1.0}
        for block in self.double_blocks:
            img, txt = block(img, txt, mod, options)
            # What the host writes here later must not change a block's recompute.
            options["gain"] += 1.0
        return img.sum() + (txt * txt).sum()


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, 4, n, generator=generator, dtype=torch.float64) for n in (6, 6)]
    return [t.requires_grad_() for t in (*drawn, torch.randn(2, 1, 3, generator=generator, dtype=torch.float64))]


def gradients(network: nn.Module, recompute: bool, held: BlockMemory) -> tuple[Tensor, list[Tensor | None]]:
    inputs = leaves()
    kept = () if recompute else find_blocks(network)
    with ExitStack() as undo:
        undo.enter_context(frozen({m: frozen_forward(m, held) for _, m in matrices(network)}))
        trained = [path for path, _ in matrices(network)]
        undo.enter_context(frozen(dict(recomputed(network, held, CPU, trained, Recompute(kept=kept)))))
        # Not the leaves themselves: autograd lets nothing write into those.
        loss = network(inputs[0] * 1.0, inputs[1] * 1.0, inputs[2])
        loss.backward()
    return loss.detach(), [leaf.grad for leaf in inputs]


@pytest.mark.parametrize("recompute", [False, True])
def test_in_place_blocks_give_the_gradients_of_plain_autograd(recompute: bool) -> None:
    torch.manual_seed(1)
    reference = Network(OutOfPlace).double().requires_grad_(False)
    network = Network(TwoStreams).double().requires_grad_(False)
    network.load_state_dict(reference.state_dict())
    inputs = leaves()
    expected = reference(*inputs)
    expected.backward()
    loss, found = gradients(network, recompute, BlockMemory(FakeWeights()))
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=1e-13)
    for gradient, leaf in zip(found, inputs, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-12)


def test_a_recomputed_block_reads_its_weights_once_for_recompute_and_backward() -> None:
    torch.manual_seed(1)
    network = Network(OutOfPlace).double().requires_grad_(False)
    counts = {}
    for recompute in (False, True):
        source = FakeWeights()
        gradients(network, recompute, BlockMemory(source))
        counts[recompute] = source.fetched[network.double_blocks[1].a]
    assert counts == {False: 2, True: 2}


class Fickle(TwoStreams):
    """Writes over its input from the second step on: after its first forward and the recompute of that."""

    calls = 0

    def forward(self, img: Tensor, txt: Tensor, mod: Modulation, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls > 2:
            img.add_(self.a(txt))
        return img + self.a(txt), self.b(txt)


def test_a_block_that_starts_to_write_later_is_refused_by_name() -> None:
    network = Network(Fickle).double().requires_grad_(False)
    held = BlockMemory(FakeWeights())
    with frozen(dict(recomputed(network, held, CPU, []))):
        network(*leaves()).backward()
        with pytest.raises(UnsupportedModelError, match=r"double_blocks\.\d"):
            network(*leaves())
    assert all("forward" not in module.__dict__ for module in network.modules())


def test_blocks_are_found_inside_containers_that_hosts_take_apart() -> None:
    network = nn.Module()
    network.input_blocks = nn.ModuleList(
        [nn.Sequential(nn.Conv2d(4, 4, 3)), nn.Sequential(TwoStreams(), FakeNetwork())]
    )
    assert list(find_blocks(network)) == ["input_blocks.1.0", "input_blocks.1.1.blocks.0", "input_blocks.1.1.blocks.1"]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.Conv2d(4, 6, (3, 1), padding=(0, 2), dilation=2, bias=False),
        nn.Conv1d(4, 6, 3, padding=2, dilation=2, bias=False),
        nn.Conv3d(4, 8, 1, groups=2),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
        nn.Linear(5, 7, bias=False),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("size", [7, 20])
def test_a_frozen_layer_is_the_layer(layer: Any, size: int) -> None:
    layer = layer.double().requires_grad_(False)
    shape = (2, 3, 5) if isinstance(layer, nn.Linear) else (2, 4, *[size] * len(layer.kernel_size))
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = x.detach().clone().requires_grad_()
    out, expected = frozen_forward(layer, BlockMemory(FakeWeights()))(x), layer(y)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)
    assert not out._is_view()


class _Convolutions(nn.Module):
    """Two convolutions, the second on what the first gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(torch.sin(x))))


class ScratchWeights(FakeWeights):
    """Lends weights in memory that it writes over when it gets them back, as a cast's scratch memory is."""

    def __init__(self) -> None:
        super().__init__()
        self.lent: list[Tensor] = []

    @contextmanager
    def fetch(self, module: Any, like: Tensor) -> Iterator[Weights]:
        weight = torch.empty_like(module.weight)
        weight.copy_(module.weight)
        self.fetched[module] += 1
        self.lent.append(weight)
        yield Weights(weight, module.bias, True)
        self.lent.pop()
        weight.fill_(torch.nan)


def test_no_convolution_runs_twice_and_lent_weights_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    computed: list[Any] = []
    convolve = frozen_module.convolve
    monkeypatch.setattr(frozen_module, "convolve", lambda *args: computed.append(args[3]) or convolve(*args))
    network = nn.ModuleList([_Convolutions(), _Convolutions()]).double().requires_grad_(False)
    x = torch.randn(1, 4, 6, 6, dtype=torch.float64).requires_grad_()
    y = x.detach().clone().requires_grad_()
    network[1](network[0](y)).square().sum().backward()
    source = ScratchWeights()
    memory = BlockMemory(source)
    with ExitStack() as undo:
        undo.enter_context(frozen({m: frozen_forward(m, memory) for _, m in matrices(network)}))
        undo.enter_context(frozen(dict(recomputed(network, memory, CPU, []))))
        for _ in range(2):
            x.grad = None
            network[1](network[0](x)).square().sum().backward()
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)
    # Four convolutions in each of two steps.
    assert len(computed) == 8
    # A weight is read for the forward and for the input gradient.
    assert set(source.fetched.values()) == {4}
    assert source.lent == []


class LiveBytes(TorchDispatchMode):
    """Live bytes of the storages made while it is entered, after each operation; the network's own do not count."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.trace: list[int] = []
        self._own = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._own:
                storage = tensor.untyped_storage()
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.trace.append(self.now())
        return out

    def now(self) -> int:
        self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
        return sum(num_bytes for _, num_bytes in self._known.values())


def on(device: str, block: type[nn.Module]) -> Network:
    return Network(block).double().requires_grad_(False).to(device)


@contextmanager
def engaged(network: nn.Module, how: Recompute, memory: BlockMemory | None = None) -> Iterator[list[RecomputedBlock]]:
    """Hold the network with frozen layers and recomputed blocks."""
    memory = memory or BlockMemory(FakeWeights())
    device = next(network.parameters()).device
    with ExitStack() as undo:
        undo.enter_context(frozen({m: frozen_forward(m, memory) for _, m in matrices(network)}))
        blocks = dict(recomputed(network, memory, device, [path for path, _ in matrices(network)], how))
        undo.enter_context(frozen(dict(blocks)))
        yield list(blocks.values())


def step(network: nn.Module, inputs: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
    inputs = inputs or leaves()
    loss = network(inputs[0] * 1.0, inputs[1] * 1.0, inputs[2])
    loss.backward()
    return loss, [leaf.grad for leaf in inputs]


@pytest.mark.parametrize("known", [None, True])
def test_in_place_blocks_take_the_same_memory_without_data(known: bool | None) -> None:
    traces = {}
    for device in ("cpu", "meta"):
        network = on(device, TwoStreams)
        writes = {} if known is None else dict.fromkeys(find_blocks(network), known)
        inputs = [[leaf.detach().to(device).requires_grad_() for leaf in leaves()] for _ in range(2)]
        with engaged(network, Recompute(writes_in_place=writes)), LiveBytes(network) as live:
            for given in inputs:
                step(network, given)
        del inputs, given
        traces[device] = live.trace
        assert live.now() == 0
    assert traces["meta"] == traces["cpu"]
    assert max(traces["cpu"]) > 0


def test_what_blocks_do_is_learned_in_their_first_call_and_can_be_known_before() -> None:
    for block, expected in ((TwoStreams, True), (OutOfPlace, False)):
        network = on("cpu", block)
        with engaged(network, Recompute()) as blocks:
            assert learned(blocks) == {}
            first = step(network)
            found = learned(blocks)
        assert found == dict.fromkeys(find_blocks(network), expected)
        with engaged(network, Recompute(writes_in_place=found)):
            again = step(network)
        torch.testing.assert_close(again, first, rtol=0, atol=0)


class Harmless(OutOfPlace):
    """Writes in place into what nobody has saved."""

    def forward(self, img: Tensor, txt: Tensor, mod: Modulation, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        img, txt = super().forward(img, txt, mod, options)
        img += 1.0
        return img, txt


def test_a_block_whose_writes_do_no_harm_need_not_be_recomputed() -> None:
    network = on("cpu", Harmless)
    expected = step(network)
    ran: list[str] = []

    @contextmanager
    def observe(path: str, phase: str) -> Iterator[None]:
        ran.append(phase)
        yield

    with engaged(network, Recompute(kept=find_blocks(network), observe=observe)) as blocks:
        for phases in (["forward"] * 3 + ["recompute", "backward"] * 3, ["forward"] * 3):
            ran.clear()
            torch.testing.assert_close(step(network), expected, rtol=1e-12, atol=1e-12)
            assert ran == phases
        assert learned(blocks) == dict.fromkeys(find_blocks(network), False)


def test_only_what_is_written_over_is_copied() -> None:
    network = on("cpu", TwoStreams)
    with engaged(network, Recompute()) as blocks:
        step(network)
        assert [block.written for block in blocks] == [{0, 1}] * 3
    network = on("cpu", OutOfPlace)
    with (
        engaged(network, Recompute(writes_in_place=dict.fromkeys(find_blocks(network), False))),
        LiveBytes(network) as clean,
    ):
        step(network)
    with engaged(network, Recompute()), LiveBytes(network) as cautious:
        step(network)
        first = len(cautious.trace)
        step(network)
    # The first call of three blocks makes copies of img, txt, shift and scale; the second none.
    assert first == len(clean.trace) + 3 * 4
    assert len(cautious.trace) - first == len(clean.trace)


def test_a_block_wrongly_known_not_to_write_is_refused_by_autograd() -> None:
    network = on("cpu", TwoStreams)
    with (
        engaged(network, Recompute(writes_in_place=dict.fromkeys(find_blocks(network), False))),
        pytest.raises((RuntimeError, UnsupportedModelError), match=r"in-?place operation|double_blocks\.0"),
    ):
        step(network)


def test_each_block_is_kept_or_recomputed_as_chosen_and_can_be_observed() -> None:
    network = on("cpu", OutOfPlace)
    first, second, third = find_blocks(network)
    seen: list[str] = []

    @contextmanager
    def observe(path: str, phase: str) -> Iterator[None]:
        seen.append(f"{path} {phase}")
        yield
        seen.append("end")

    writes = dict.fromkeys(find_blocks(network), False)
    with engaged(network, Recompute(kept=[second], writes_in_place=writes, observe=observe)):
        found = step(network)
    order = [f"{first} forward", f"{second} forward", f"{third} forward"]
    order += [f"{path} {phase}" for path in (third, first) for phase in ("recompute", "backward")]
    assert seen == [entry for event in order for entry in (event, "end")]
    torch.testing.assert_close(found, step(network), rtol=1e-12, atol=1e-12)


class Ram:
    """Keeps tensors as ``Transfers`` does, and spoils each once it has been read."""

    def __init__(self) -> None:
        self.waiting = 0
        self.num_bytes = 0

    def to_ram(self, tensor: Tensor) -> Tensor:
        assert tensor.ndim == 1
        self.waiting += 1
        self.num_bytes += tensor.nbytes
        return tensor.clone()

    def from_ram(self, kept: Tensor) -> Tensor:
        self.waiting -= 1
        back = kept.clone()
        kept.fill_(torch.nan)
        return back


@pytest.mark.parametrize("block", [OutOfPlace, TwoStreams])
def test_inputs_that_wait_in_ram_change_no_bit(block: type[nn.Module]) -> None:
    network, ram = on("cpu", block), Ram()
    with engaged(network, Recompute()):
        expected = step(network)
    with engaged(network, Recompute(transfers=ram, worth_moving_bytes=2 * 4 * 6 * 8)):  # type: ignore[arg-type]
        found = step(network)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    # img and txt of three blocks; the modulation is smaller.
    assert ram.num_bytes == 6 * 2 * 4 * 6 * 8
    assert ram.waiting == 0


def test_strides_survive_ram() -> None:
    """Another order of the axes may give other last bits, and a view with gaps stays where it is."""

    class Strides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            seen.append((x.stride(), y.stride()))
            return self.a(x.transpose(0, 1)) + self.b(y)

    seen: list[Any] = []
    network = nn.ModuleList([Strides()]).double().requires_grad_(False)
    x = torch.randn(6, 6, dtype=torch.float64).requires_grad_()
    ram = Ram()
    how = Recompute(transfers=ram, worth_moving_bytes=0, writes_in_place={"0": False})  # type: ignore[arg-type]
    with engaged(network, how):
        network[0](x.t(), torch.stack([x, x], dim=1)[:, 1]).sum().backward()
    assert seen == [((1, 6), (12, 1))] * 2
    assert ram.num_bytes == x.nbytes


@pytest.mark.parametrize("uses_ram", [False, True])
def test_no_input_in_ram_is_on_the_device_too(uses_ram: bool) -> None:
    network = on("cpu", OutOfPlace)
    inputs: list[StorageWeakRef] = []

    @contextmanager
    def observe(path: str, phase: str) -> Iterator[None]:
        if phase == "recompute" and path == "double_blocks.2":
            during.extend(ref.expired() for ref in inputs)
        yield

    during: list[bool] = []
    how = Recompute(
        transfers=Ram() if uses_ram else None,  # type: ignore[arg-type]
        worth_moving_bytes=0,
        writes_in_place=dict.fromkeys(find_blocks(network), False),
        observe=observe,
    )
    with engaged(network, how) as blocks:
        for block in blocks:
            own = block.forward

            def forward(img: Tensor, *args: Any, own: Any = own) -> Any:
                inputs.append(StorageWeakRef(img.untyped_storage()))
                return own(img, *args)

            block.forward = forward
        step(network)
    # What went into the second and third block; the first one's is the caller's.
    assert during[1:3] == [uses_ram, uses_ram]


def test_a_blocks_results_and_their_gradients_are_let_go_before_its_backward_ends() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = Probe.apply(x)
            out = self.b(self.a(x))
            results.append(StorageWeakRef(out.untyped_storage()))
            return Twice.apply(out)

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            grads.append(StorageWeakRef(grad.untyped_storage()))
            return grad * 2.0

    class Probe(torch.autograd.Function):
        """Sees what is alive at the end of the block's backward pass."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            alive.extend(not ref.expired() for ref in (results[-1], grads[-1]))
            return grad

    results: list[StorageWeakRef] = []
    grads: list[StorageWeakRef] = []
    alive: list[bool] = []
    network = nn.ModuleList([Block(), Block()]).double().requires_grad_(False)
    x = torch.randn(3, 6, dtype=torch.float64).requires_grad_()
    with engaged(network, Recompute()):
        network[1](network[0](x)).square().sum().backward()
    assert alive == [False] * 4


def test_convolutions_run_twice_where_their_outputs_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Any] = []
    convolve = frozen_module.convolve
    monkeypatch.setattr(frozen_module, "convolve", lambda *args: computed.append(args[3]) or convolve(*args))
    network = nn.ModuleList([_Convolutions(), _Convolutions()]).double().requires_grad_(False)
    x = torch.randn(1, 4, 6, 6, dtype=torch.float64).requires_grad_()
    for keeps, expected in ((True, 4), (False, 8)):
        computed.clear()
        with engaged(network, Recompute(keep_convolutions=keeps)):
            network[1](network[0](x)).square().sum().backward()
        assert len(computed) == expected


class Written(_Convolutions):
    """Writes over what its first convolution gave."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(torch.sin(x))
        return self.second(torch.tanh(first.mul_(torch.cos(x))))


def test_a_convolution_that_was_written_over_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Any] = []
    convolve = frozen_module.convolve
    network = nn.ModuleList([Written()]).double().requires_grad_(False)
    x, y = (torch.linspace(0, 1, 144, dtype=torch.float64).view(1, 4, 6, 6).requires_grad_() for _ in range(2))
    network[0](y).square().sum().backward()
    monkeypatch.setattr(frozen_module, "convolve", lambda *args: computed.append(args[3]) or convolve(*args))
    with engaged(network, Recompute()):
        network[0](x).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)
    assert computed == [network[0].first, network[0].second, network[0].first]


class Outer(nn.Module):
    """A block that calls blocks of its own, which are not in its module tree."""

    def __init__(self, inner: nn.ModuleList) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Conv1d(4, 4, 1)
        self.inner = [inner]

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.tanh(self.a(x)))
        for block in self.inner[0]:
            x = x + block(x) * torch.rand(1, dtype=x.dtype)
        x *= self.b(torch.sin(x))
        return x


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.b(torch.tanh(self.a(x)))
        out *= torch.cos(x)
        return self.b(torch.sin(out)) + torch.rand(1, dtype=x.dtype)


def test_a_recomputed_block_may_hold_recomputed_blocks() -> None:
    inner = nn.ModuleList([Inner(), Inner()]).double().requires_grad_(False)
    outer = nn.ModuleList([Outer(inner), Outer(inner)]).double().requires_grad_(False)
    x = torch.linspace(0, 1, 48, dtype=torch.float64).view(2, 4, 6)

    def gradient() -> Tensor:
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        outer[1](outer[0](leaf)).square().sum().backward()
        return leaf.grad

    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        expected = gradient()
    memory = BlockMemory(ScratchWeights())
    with engaged(inner, Recompute(), memory), engaged(outer, Recompute(), memory):
        for _ in range(2):
            torch.testing.assert_close(gradient(), expected, rtol=1e-12, atol=1e-12)
    assert memory.source.lent == []  # type: ignore[attr-defined]


def test_an_input_that_is_handed_through_stays_as_it_was() -> None:
    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, y, self.b(self.a(x))

    network = nn.ModuleList([Through()]).double().requires_grad_(False)
    x, y = (torch.randn(3, 6, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    with engaged(network, Recompute()):
        first, second, third = network[0](x, y)
        assert x.is_leaf
        assert y.is_leaf
        assert not y.requires_grad
        assert torch.equal(second.detach(), y)
        (first * third).sum().backward()
    own = x.grad
    x.grad = None
    _, _, third = network[0](x, y)
    (x * third).sum().backward()
    torch.testing.assert_close(own, x.grad, rtol=1e-12, atol=1e-12)
