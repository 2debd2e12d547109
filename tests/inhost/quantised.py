"""Layers that hold quantised weights, each with the plain weight it stands for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

# Powers of two that the layouts' groups and rotations divide.
IN, OUT = 256, 128
# Offline calibration makes these; nothing here can.
CALIBRATED = ("TensorCoreAWQW4A16Layout", "TensorCoreSVDQuantW4A4Layout")


def layouts() -> list[str]:
    """Return the names of the layouts this host's quantised tensors know."""
    import comfy.quant_ops

    known = getattr(comfy.quant_ops, "LAYOUTS", None)
    if known is None:
        from comfy_kitchen.tensor import base

        known = base.LAYOUTS
    return [name for name in known if name not in CALIBRATED]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return numbers of a weight's usual size."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[1] ** 0.5


def _in_place_of(layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return layer


def _shape_of(plain: nn.Module) -> dict[str, Any]:
    return {"in_features": plain.in_features, "out_features": plain.out_features, "bias": plain.bias is not None}


def fp8(plain: nn.Module, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Any, torch.Tensor]:
    """A layer of the host's whose weight was rounded to float8; also a convolution."""
    import comfy.ops

    layer = copy.deepcopy(plain) if hasattr(plain, "kernel_size") else comfy.ops.manual_cast.Linear(**_shape_of(plain))
    weight = plain.weight.detach().to(dtype)
    return _in_place_of(layer, weight, plain.bias), weight.double()


def scaled_fp8(plain: nn.Module) -> tuple[Any, torch.Tensor]:
    """A layer of older hosts with a scale beside its float8 weight."""
    import comfy.ops

    make = comfy.ops.scaled_fp8_ops(override_dtype=torch.float8_e4m3fn).Linear
    layer = make(**_shape_of(plain))
    scale = plain.weight.detach().abs().max().float() / 448
    weight = (plain.weight.detach().float() / scale).to(torch.float8_e4m3fn)
    layer.scale_weight = nn.Parameter(scale, requires_grad=False)
    return _in_place_of(layer, weight, plain.bias), weight.double() * scale.double()


def wrapped(plain: nn.Module, layout: str) -> tuple[Any, torch.Tensor]:
    """A layer of the host's mixed precision around a tensor in ``layout``."""
    import comfy.ops
    import comfy.quant_ops

    layer = comfy.ops.mixed_precision_ops({}, torch.float32).Linear(**_shape_of(plain))
    weight = comfy.ops.QuantizedTensor.from_float(plain.weight.detach().float(), layout)
    algorithms = comfy.quant_ops.QUANT_ALGOS.items()
    layer.layout_type = layout
    layer.quant_format = next((name for name, how in algorithms if how["comfy_tensor_layout"] == layout), layout)
    return _in_place_of(layer, weight, plain.bias), weight.dequantize().double()


class BlockTensor(torch.Tensor):
    """Data with attributes, as the GGUF extension's tensors are: raw bytes that claim another shape."""

    tensor_type: str
    tensor_shape: torch.Size

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = super().to(*args, **kwargs)
        moved.__dict__.update(self.__dict__)
        return moved

    def detach(self) -> Any:
        return self

    @property
    def shape(self) -> torch.Size:
        return self.tensor_shape


def block_tensor(weight: torch.Tensor) -> BlockTensor:
    """Return ``weight`` in blocks of 32: an fp16 scale, then 32 signed bytes."""
    rows = weight.reshape(-1, 32).float()
    scale = (rows.abs().amax(dim=1, keepdim=True) / 127).half()
    levels = (rows / scale.float()).round().clamp(-127, 127).to(torch.int8)
    raw = torch.cat([scale.view(torch.uint8), levels.view(torch.uint8)], dim=1).reshape(weight.shape[0], -1)
    blocks = raw.as_subclass(BlockTensor)
    blocks.tensor_type, blocks.tensor_shape = "Q8_0", weight.shape
    return blocks


def _unblocked(raw: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    rows = raw.reshape(-1, 34)
    scale = rows[:, :2].contiguous().view(torch.float16).to(dtype)
    return (scale * rows[:, 2:].contiguous().view(torch.int8)).reshape(shape)


def block_layer() -> type:
    """Return a Linear that dequantises on the fly and says so, by the protocol of the GGUF extension."""
    import comfy.ops

    class BlockLinear(comfy.ops.manual_cast.Linear):
        def is_ggml_quantized(self) -> bool:
            return getattr(self.weight, "tensor_type", None) is not None

        def get_weight(self, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
            kind = getattr(tensor, "tensor_type", None)
            return tensor.to(dtype) if kind is None else _unblocked(tensor.data.view(torch.uint8), tensor.shape, dtype)

        def cast_bias_weight(
            self, input: Any = None, dtype: Any = None, device: Any = None, bias_dtype: Any = None
        ) -> Any:
            bias = None if self.bias is None else self.get_weight(self.bias.to(device), dtype).to(bias_dtype)
            return self.get_weight(self.weight.to(device), dtype).as_subclass(torch.Tensor), bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight, bias = self.cast_bias_weight(dtype=x.dtype, device=x.device, bias_dtype=x.dtype)
            return torch.nn.functional.linear(x, weight, bias)

    return BlockLinear


def gguf(plain: nn.Module) -> tuple[Any, torch.Tensor]:
    """A layer that dequantises blocks on the fly."""
    layer = block_layer()(**_shape_of(plain))
    blocks = block_tensor(plain.weight.detach())
    dequantised = layer.get_weight(blocks, torch.float32).as_subclass(torch.Tensor)
    return _in_place_of(layer, blocks, plain.bias), dequantised.double()


def kinds() -> dict[str, Callable[[nn.Module], tuple[Any, torch.Tensor]]]:
    """Return each kind of quantised layer that this host can hold, by name."""
    import comfy.ops

    found: dict[str, Any] = {"fp8 e4m3": fp8, "fp8 e5m2": lambda plain: fp8(plain, torch.float8_e5m2), "gguf": gguf}
    if hasattr(comfy.ops, "scaled_fp8_ops"):
        found["scaled fp8"] = scaled_fp8
    for layout in layouts():
        found[layout] = lambda plain, layout=layout: wrapped(plain, layout)
    return found


def in_blocks(network: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield parent, attribute and layer of the transformer blocks' linear layers."""
    for path, module in network.named_modules():
        if "transformer_blocks" in path and hasattr(module, "in_features"):
            parent, _, name = path.rpartition(".")
            yield network.get_submodule(parent), name, module
