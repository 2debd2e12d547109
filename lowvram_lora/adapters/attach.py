"""Adapters beside the model: PEFT's layers on a shadow tree with the host's module paths.

The shadow holds stand-ins with a layer's shape and none of its weight. PEFT injects its adapters there, names them
and initialises them; the host's tree never sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..config import LoraConfig
from ..memory.frozen import BlockMemory, is_linear
from .fused import fused_forward

_ADAPTER = "default"
_CONVS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Adapters:
    """The trainable layers of one run, by the path of the layer each adapts."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        self.layers = layers

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters, in a fixed order."""
        return [p for layer in self.layers.values() for p in layer.parameters() if p.requires_grad]

    def state(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return detached ``(down, up)`` of every layer by path, on the device they train on."""
        pairs = ((path, _pair(layer)) for path, layer in self.layers.items())
        return {path: (down.weight.detach(), up.weight.detach()) for path, (down, up) in pairs}


def build(
    layers: dict[str, nn.Module],
    config: LoraConfig,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Adapters:
    """Make a fresh adapter for every layer: down from a Kaiming draw, up zero, so that the output does not change.

    Args:
        layers: host layers by path.
        seed: decides the draw; the global generator is left as it was.
        dtype: of the parameters; the draw is the float32 one, rounded.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    shadow = nn.Module()
    for path, module in layers.items():
        _plant(shadow, path, _stand_in(module))
    peft_config = PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(layers))  # type: ignore[arg-type]
    # The draw is made on the CPU, so that a seed means the same on every device.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(peft_config, shadow, adapter_name=_ADAPTER)
    adapters = Adapters({path: shadow.get_submodule(path) for path in layers})
    for layer in adapters.layers.values():
        # Not the whole layer: moving the stand-in would give its weight the memory it does without.
        for part in _pair(layer):
            part.to(device, dtype)
    assert all(p.dtype == dtype for p in adapters.parameters()), "PEFT took another dtype than the stand-in's"
    return adapters


def adapted_forwards(
    layers: dict[str, nn.Module], adapters: Adapters, source: BlockMemory
) -> Iterable[tuple[nn.Module, Callable[..., Any]]]:
    """Yield every adapted layer with the forward that adds its adapter to the frozen base."""
    for path, module in layers.items():
        layer: Any = adapters.layers[path]
        down, up = _pair(layer)
        yield module, fused_forward(module, source, down.weight, up.weight, float(layer.scaling[_ADAPTER]))


def _pair(layer: Any) -> tuple[Any, Any]:
    return layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]


def _stand_in(module: Any) -> nn.Module:
    """Return a float32 layer of the same shape whose weight takes no memory."""
    if is_linear(module):
        layer: Any = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    else:
        kind = _CONVS[len(module.kernel_size)]
        sizes = (module.in_channels, module.out_channels, module.kernel_size, module.stride, module.padding)
        layer = kind(*sizes, bias=False, device="meta")
    layer.weight = nn.Parameter(torch.zeros(1).expand(layer.weight.shape), requires_grad=False)
    return layer  # type: ignore[no-any-return]


def _plant(root: nn.Module, path: str, leaf: nn.Module) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, leaf)
