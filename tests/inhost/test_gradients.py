"""Frozen layers, recompute and our adapter arithmetic against plain autograd with PEFT in the network itself."""

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
TARGETS: list[Targets] = ["attention", "attention + feed-forward", "all linear", "all linear + conv"]


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, 8, 8, generator=generator, dtype=DTYPE)
    context = torch.randn(2, 7, tiny.CONTEXT, generator=generator, dtype=DTYPE)
    return x, torch.tensor([3.0, 700.0], dtype=DTYPE), context


def adapters_for(layers: dict[str, nn.Module], targets: Targets) -> Adapters:
    """Adapters in float64 with non-zero up matrices; alpha differs from rank."""
    adapters = build(layers, LoraConfig(rank=4, alpha=7.0, targets=targets), seed=2, device=tiny.CPU)
    generator = torch.Generator().manual_seed(3)
    for layer in adapters.layers.values():
        layer.to(DTYPE)
        up = layer.lora_B["default"].weight
        up.data = torch.randn(up.shape, generator=generator, dtype=DTYPE) * 0.1
    return adapters


def ours(targets: Targets, recompute: bool, source: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    network = tiny.sd15().model.diffusion_model
    layers = select(network, targets)
    adapters = adapters_for(layers, targets)
    held = BlockMemory(source)
    with ExitStack() as undo:
        undo.enter_context(usable_parameters(network, DTYPE, tiny.CPU))
        forwards = {module: frozen_forward(module, held) for _, module in matrices(network)}
        forwards.update(adapted_forwards(layers, adapters, held))
        undo.enter_context(frozen(forwards))
        if recompute:
            undo.enter_context(frozen(dict(recomputed(network, held, tiny.CPU, layers))))
        x, t, context = inputs()
        out = network(x, t, context=context, transformer_options={})
        out.square().mean().backward()
    return out.detach(), {
        f"{path}.{half}": getattr(layer, half)["default"].weight.grad
        for path, layer in adapters.layers.items()
        for half in ("lora_A", "lora_B")
    }


def plain(targets: Targets) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PEFT injected into an ordinary copy of the network, ordinary autograd."""
    network = tiny.sd15(inference=False).model.diffusion_model.double().requires_grad_(False)
    layers = select(network, targets)
    state = adapters_for(layers, targets).state()
    config = peft.LoraConfig(r=4, lora_alpha=7.0, target_modules=list(layers))
    peft.inject_adapter_in_model(config, network)
    network.dtype = DTYPE
    for path, (down, up) in state.items():
        layer = network.get_submodule(path)
        layer.lora_A["default"].weight.data = down.clone()
        layer.lora_B["default"].weight.data = up.clone()
    x, t, context = inputs()
    out = network(x, t, context=context, transformer_options={})
    out.square().mean().backward()
    return out.detach(), {
        f"{path}.{half}": getattr(network.get_submodule(path), half)["default"].weight.grad
        for path in layers
        for half in ("lora_A", "lora_B")
    }


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


@pytest.fixture(scope="module")
def source(pack: Any) -> Any:
    return pack.nodes._models.HostWeights()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("targets", TARGETS)
def test_gradients_equal_plain_autograd(targets: Targets, recompute: bool, source: Any) -> None:
    out, gradients = ours(targets, recompute, source)
    expected_out, expected = plain(targets)
    assert relative_error(out, expected_out) < 1e-12
    assert gradients.keys() == expected.keys()
    errors = {path: relative_error(gradients[path], expected[path]) for path in expected}
    assert max(errors.values()) < 1e-9, max(errors, key=lambda path: errors[path])
    assert all(gradient.norm() > 0 for gradient in gradients.values())
