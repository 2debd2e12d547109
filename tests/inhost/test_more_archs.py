"""Gradients of other families: the host's SD3 and Flux.1, as training runs them, against plain autograd in float64.

Flux adds in place into tensors that autograd has saved. Library checkpoints give wrong gradients there.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import peft
import pytest
import tiny
import torch
from torch import nn

from lowvram_lora.adapters.attach import Adapters, adapted_forwards, build
from lowvram_lora.adapters.targets import select
from lowvram_lora.config import LoraConfig, Targets
from lowvram_lora.memory.frozen import BlockMemory, frozen, frozen_forward, matrices, usable_parameters
from lowvram_lora.memory.recompute import recomputed

DTYPE = torch.float64
FAMILIES = ("sd3", "flux")
TARGETS: list[Targets] = ["attention + feed-forward", "all linear"]
TOLERANCE = 1e-12
RANK, ALPHA = 4, 7.0


@pytest.fixture(autouse=True)
def in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer hosts have kernels without a gradient, and this flag to do without; training sets it."""
    import comfy.model_management

    if hasattr(comfy.model_management, "in_training"):
        monkeypatch.setattr(comfy.model_management, "in_training", True)


def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=DTYPE)


def loss(pack: Any, network: Any, family: str) -> torch.Tensor:
    """Return a loss of the network's output, asked the way training asks."""
    generator = torch.Generator().manual_seed(1)
    x, context, y = (
        drawn(generator, 2, 16, 8, 8),
        drawn(generator, 2, 7, tiny.CONTEXT),
        drawn(generator, 2, tiny.VECTOR),
    )
    more = {"guidance": torch.full((2,), 3.5, dtype=DTYPE)} if family == "flux" else {}
    options = {"optimized_attention_override": pack.nodes._models._differentiable_attention}
    t = torch.tensor([0.3, 0.9], dtype=DTYPE)
    out: torch.Tensor = network(x, t, context=context, y=y, transformer_options=options, **more)
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


def gradients(layers: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    return {
        f"{path}.{half}": getattr(layer, half)["default"].weight.grad
        for path, layer in layers.items()
        for half in ("lora_A", "lora_B")
    }


def ours(pack: Any, family: str, targets: Targets, wanted: bool) -> tuple[float, dict[str, torch.Tensor | None]]:
    network = tiny.FAMILIES[family]().model.diffusion_model
    layers = select(network, targets)
    adapters, memory = adapters_for(layers), BlockMemory(pack.nodes._models.HostWeights())
    with ExitStack() as undo:
        undo.enter_context(usable_parameters(network, DTYPE, tiny.CPU))
        forwards = {module: frozen_forward(module, memory) for _, module in matrices(network)}
        forwards.update(adapted_forwards(layers, adapters, memory))
        undo.enter_context(frozen(forwards))
        undo.enter_context(frozen(dict(recomputed(network, memory, tiny.CPU, layers, wanted=wanted))))
        value = loss(pack, network, family)
        value.backward()  # type: ignore[no-untyped-call]
    return value.item(), gradients(adapters.layers)


def plain(pack: Any, family: str, targets: Targets) -> tuple[float, dict[str, torch.Tensor | None]]:
    """PEFT in an ordinary copy of the network, plain autograd with torch's own care for writes in place."""
    network = tiny.FAMILIES[family](inference=False).model.diffusion_model.double().requires_grad_(False)
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


@pytest.mark.parametrize("wanted", [True, False], ids=["recompute", "no recompute"])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_plain_autograd(pack: Any, family: str, targets: Targets, wanted: bool) -> None:
    value, found = ours(pack, family, targets, wanted)
    expected_value, expected = plain(pack, family, targets)
    assert value == pytest.approx(expected_value, rel=TOLERANCE)
    assert found.keys() == expected.keys()
    missing = {path for path in expected if (found[path] is None) != (expected[path] is None)}
    assert not missing
    errors = {
        path: float((found[path] - grad).norm() / grad.norm().clamp(min=1e-30))
        for path, grad in expected.items()
        if grad is not None
    }
    worst = max(errors, key=lambda path: errors[path])
    assert errors[worst] < TOLERANCE, f"{worst}: {errors[worst]:.2e}"
    trained = [path for path, grad in expected.items() if grad is not None and grad.norm() > 0]
    assert len(trained) == len(expected)
