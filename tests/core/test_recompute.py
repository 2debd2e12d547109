"""Block recompute on blocks that add in place, share inputs, or can't be recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram_lora.errors import UnsupportedModelError
from lowvram_lora.fakes import FakeNetwork, FakeWeights
from lowvram_lora.memory import frozen as frozen_module
from lowvram_lora.memory.frozen import BlockMemory, frozen, frozen_forward, matrices
from lowvram_lora.memory.recompute import find_blocks, recomputed
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
    with ExitStack() as undo:
        undo.enter_context(frozen({m: frozen_forward(m, held) for _, m in matrices(network)}))
        trained = [path for path, _ in matrices(network)]
        undo.enter_context(frozen(dict(recomputed(network, held, CPU, trained, wanted=recompute))))
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
