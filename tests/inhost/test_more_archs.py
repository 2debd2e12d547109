"""Gradients of the host's families, as training runs them, against plain autograd in float64.

The Flux family adds in place into tensors that autograd has saved. Library checkpoints give wrong gradients there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from typing import Any

import peft
import pytest
import tiny
import torch
from jobs import Device, ring
from torch import nn

from lowvram_lora.adapters.attach import Adapters, adapted_forwards, build
from lowvram_lora.adapters.targets import select
from lowvram_lora.config import LoraConfig, Targets
from lowvram_lora.memory.chunks import chunked_forwards
from lowvram_lora.memory.frozen import BlockMemory, frozen, frozen_forward, matrices, usable_parameters
from lowvram_lora.memory.recompute import Recompute, find_blocks, learned, recomputed
from lowvram_lora.memory.setting import Setting
from lowvram_lora.memory.stream import Streamed

DTYPE = torch.float64
TOLERANCE = 1e-11
RANK, ALPHA = 4, 7.0
WRITING = {"flux", "flux2"}

Gradients = dict[str, torch.Tensor | None]


class Ram:
    """Keeps tensors as ``Transfers`` does, and spoils each once it has been read."""

    def to_ram(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def from_ram(self, kept: torch.Tensor) -> torch.Tensor:
        back = kept.clone()
        kept.fill_(torch.nan)
        return back


def every_other(blocks: Collection[str]) -> list[str]:
    return list(blocks)[::2]


# How blocks are run, given their paths.
WAYS: dict[str, Callable[[Collection[str]], dict[str, Any]]] = {
    "frozen layers alone": lambda blocks: {"kept": blocks},
    "recompute": lambda blocks: {},
    "some blocks recomputed": lambda blocks: {"kept": every_other(blocks)},
    "inputs in RAM": lambda blocks: {"transfers": Ram(), "worth_moving_bytes": 0},
    "no convolution kept": lambda blocks: {"keep_convolutions": False},
    "feed-forward in parts": lambda blocks: {"part_rows": 3},
    "feed-forward in parts of kept blocks": lambda blocks: {"kept": blocks, "part_rows": 3},
    "all together": lambda blocks: {
        "kept": every_other(blocks),
        "transfers": Ram(),
        "worth_moving_bytes": 0,
        "keep_convolutions": False,
        "part_rows": 3,
    },
}
CASES: list[tuple[str, str, Targets]] = [
    *((family, way, "all linear") for family in tiny.FAMILIES for way in WAYS if way != "no convolution kept"),
    # The others have none but before and after their blocks.
    ("sd15", "no convolution kept", "all linear"),
    # Here the first block's inputs need no gradient.
    *((family, "all together", "attention + feed-forward") for family in tiny.FAMILIES),
]


@pytest.fixture(autouse=True)
def in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer hosts have kernels without a gradient, and this flag to do without; training sets it."""
    import comfy.model_management

    if hasattr(comfy.model_management, "in_training"):
        monkeypatch.setattr(comfy.model_management, "in_training", True)


def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=DTYPE)


def conditioning(family: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    given = {"context": drawn(generator, 2, 7, tiny.CONTEXT)}
    if family in ("sd3", "flux"):
        given["y"] = drawn(generator, 2, tiny.VECTOR)
    if family in ("flux", "flux2"):
        given["guidance"] = torch.full((2,), 3.5, dtype=DTYPE)
    return given


def loss(pack: Any, network: Any, family: str) -> torch.Tensor:
    """Return a loss of the network's output, asked the way training asks."""
    generator = torch.Generator().manual_seed(1)
    x = drawn(generator, 2, *tiny.LATENTS[family])
    t = torch.tensor([3.0, 700.0] if family == "sd15" else [0.3, 0.9], dtype=DTYPE)
    options = {"optimized_attention_override": pack.nodes._models._differentiable_attention}
    out: torch.Tensor = network(x, t, **conditioning(family, generator), transformer_options=options)
    return out.square().mean()


def adapters_for(layers: dict[str, nn.Module]) -> Adapters:
    """Adapters in float64 with non-zero up matrices; alpha differs from rank."""
    adapters = build(layers, LoraConfig(rank=RANK, alpha=ALPHA), seed=2, device=tiny.CPU)
    generator = torch.Generator().manual_seed(3)
    for layer in adapters.layers.values():
        layer.to(DTYPE)
        up = layer.lora_B["default"].weight
        up.data = drawn(generator, *up.shape) * 0.1
    return adapters


def gradients(layers: dict[str, Any]) -> Gradients:
    return {
        f"{path}.{half}": getattr(layer, half)["default"].weight.grad
        for path, layer in layers.items()
        for half in ("lora_A", "lora_B")
    }


Settings = Callable[[Collection[str]], dict[str, Any]]


def ours(pack: Any, family: str, targets: Targets, source: Any, settings: Settings) -> tuple[float, Gradients, Any]:
    """Return loss, gradients, and which blocks were found to write in place.

    Args:
        source: where frozen layers get their weights.
        settings: of ``Recompute``, given the blocks' paths; and the tokens of a feed-forward's part.
    """
    network = tiny.FAMILIES[family]().model.diffusion_model
    layers = select(network, targets)
    adapters = adapters_for(layers)
    return passed(pack, family, network, layers, adapters, source, settings)


def passed(
    pack: Any,
    family: str,
    network: nn.Module,
    layers: dict[str, nn.Module],
    adapters: Adapters,
    source: Any,
    settings: Settings,
) -> tuple[float, Gradients, Any]:
    """Go once through ``network`` and back; return what ``ours`` does."""
    memory = BlockMemory(source)
    for parameter in adapters.parameters():
        parameter.grad = None
    with ExitStack() as undo:
        undo.enter_context(usable_parameters(network, DTYPE, tiny.CPU))
        forwards = {module: frozen_forward(module, memory) for _, module in matrices(network)}
        forwards.update(adapted_forwards(layers, adapters, memory))
        undo.enter_context(frozen(forwards))
        how = settings(find_blocks(network))
        rows = how.pop("part_rows", None)
        blocks = dict(recomputed(network, memory, tiny.CPU, layers, Recompute(**how)))
        undo.enter_context(frozen(dict(blocks)))
        if rows:
            chunked = chunked_forwards(network, find_blocks(network), layers, torch.zeros((), requires_grad=True), rows)
            assert chunked
            undo.enter_context(frozen(chunked))
        value = loss(pack, network, family)
        value.backward()  # type: ignore[no-untyped-call]
    return value.item(), gradients(adapters.layers), learned(blocks.values())


@functools.cache
def plain(pack: Any, family: str, targets: Targets) -> tuple[float, Gradients]:
    """PEFT in an ordinary copy of the network, plain autograd with torch's own care for writes in place."""
    network = tiny.FAMILIES[family](inference=False).model.diffusion_model.double().requires_grad_(False)
    if family == "wan":
        # Its code casts the input of this layer to float32.
        network.patch_embedding.float()
    layers = select(network, targets)
    state = adapters_for(layers).state()
    peft.inject_adapter_in_model(peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(layers)), network)
    network.dtype = DTYPE
    injected = {path: network.get_submodule(path) for path in layers}
    for path, (down, up) in state.items():
        injected[path].lora_A["default"].weight.data = down.clone()
        injected[path].lora_B["default"].weight.data = up.clone()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        value = loss(pack, network, family)
        value.backward()  # type: ignore[no-untyped-call]
    return value.item(), gradients(injected)


def compare(found: tuple[float, Gradients], expected: tuple[float, Gradients]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE)
    assert found[1].keys() == expected[1].keys()
    errors = {}
    for path, grad in expected[1].items():
        own = found[1][path]
        if grad is None or own is None:
            # What reaches no output has no gradient, or one of zeros.
            assert (grad is None or not grad.any()) and (own is None or not own.any()), path
        else:
            errors[path] = float((own - grad).norm() / grad.norm().clamp(min=1e-30))
    worst = max(errors, key=lambda path: errors[path])
    assert errors[worst] < TOLERANCE, f"{worst}: {errors[worst]:.2e}"


@pytest.mark.parametrize(("family", "way", "targets"), CASES)
def test_gradients_equal_plain_autograd(pack: Any, family: str, way: str, targets: Targets) -> None:
    value, found, writes = ours(pack, family, targets, pack.nodes._models.HostWeights(), WAYS[way])
    compare((value, found), plain(pack, family, targets))
    assert (True in writes.values()) == (family in WRITING)


def half(paths: Iterable[str]) -> frozenset[str]:
    return frozenset(list(paths)[::2])


# Layers that stay on the device, given all; the ring in largest layers; how blocks are run.
STREAMED: dict[str, tuple[Callable[[list[str]], frozenset[str]], float, str]] = {
    "smallest ring": (lambda layers: frozenset(), 2, "recompute"),
    "whole blocks in the ring, inputs in RAM": (lambda layers: frozenset(), 16, "inputs in RAM"),
    "some resident, all together": (half, 2, "all together"),
}


@pytest.mark.parametrize("way", STREAMED)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_gradients_through_a_ring_equal_plain_autograd(pack: Any, family: str, way: str) -> None:
    """Of three passes the second and third run ahead in an order that is known; every released weight is NaN."""
    resident, num, blocks = STREAMED[way]
    network, weights, device = tiny.FAMILIES[family]().model.diffusion_model, pack.nodes._models.HostWeights(), Device()
    setting = Setting(
        resident=resident([path for path, _ in matrices(network)]), ring_bytes=ring(network, weights, num)
    )
    layers = select(network, "all linear")
    adapters, settings = adapters_for(layers), WAYS[blocks]([*find_blocks(network)])
    if "transfers" in settings:
        settings["transfers"] = device
    expected = plain(pack, family, "all linear")
    with Streamed(weights, device, network, setting) as source:
        for _ in range(3):
            source.begin()
            compare(passed(pack, family, network, layers, adapters, source, lambda _: settings)[:2], expected)
        assert source.counts.copies > 0
        assert (device.num_to_ram > 0) == ("transfers" in settings)
    assert device.alive == []


@pytest.mark.parametrize("family", sorted(WRITING))
def test_what_was_learned_of_the_blocks_may_be_known_before(pack: Any, family: str) -> None:
    source = pack.nodes._models.HostWeights()
    *_, writes = ours(pack, family, "all linear", source, lambda blocks: {})
    value, found, again = ours(pack, family, "all linear", source, lambda blocks: {"writes_in_place": writes})
    compare((value, found), plain(pack, family, "all linear"))
    assert again == writes


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_all_adapters_that_reach_the_output_are_trained(pack: Any, family: str) -> None:
    _, found = plain(pack, family, "all linear")
    untrained = {path.rsplit(".", 1)[0] for path, grad in found.items() if grad is None or not grad.any()}
    # Of the last Qwen-Image block only the picture's stream goes on.
    last_text = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    assert untrained == {f"transformer_blocks.1.{layer}" for layer in last_text if family == "qwen"}
