"""What a layer keeps in memory, and the weight that is made of it: plain, quantised or patched.

Knows the host's layers by what they carry, and calls the host only through what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..lowvram_lora.memory.frozen import is_matrix
from ..lowvram_lora.memory.scratch import ScratchPool
from ..lowvram_lora.ports import Weights

# Factors of a weight that are kept beside it: the scale of an fp8 layer, and one for each input feature.
_SCALES = ("scale_weight", "pre_quant_scale")
# What quantised weights can be dequantised to.
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class LayerWeights:
    """The core's ``StoredWeights`` over a host's layers.

    Args:
        cast: the host's ``cast_bias_weight(layer, dtype=, device=, bias_dtype=)``, which dequantises and patches.
        check: raises the host's interrupt on Cancel.
    """

    def __init__(self, cast: Callable[..., tuple[Tensor, Tensor | None]], check: Callable[[], None]) -> None:
        self._cast = cast
        self._check = check
        self._scratch = ScratchPool()

    def payload(self, module: Any) -> tuple[Tensor, ...]:
        """Return the plain tensors that ``module`` is kept as, where they are; views, not to be written to."""
        kept = (module.weight, getattr(module, "bias", None), *_scales(module))
        return tuple(part for tensor in kept for part in stored(tensor))

    def finish(self, module: Any, payload: Sequence[Tensor], like: Tensor) -> Weights:
        """Return the weights made of ``payload``, in ``like.dtype``. Raises the host's interrupt on Cancel."""
        self._check()
        moved = iter(payload)
        weight = _rebuilt(module.weight, moved)
        bias = getattr(module, "bias", None)
        bias = None if bias is None else _rebuilt(bias, moved)
        # The host casts in inference mode always; its patches write into tensors that were made there.
        with torch.inference_mode():
            if like.device.type == "meta" and not _is_plain(module.weight):
                # Kernels that dequantise need data. Their result is what lives while the layer computes.
                weight = torch.empty(tuple(module.weight.shape), dtype=like.dtype, device=like.device)
                return Weights(weight, None if bias is None else _dense(bias, like.dtype), True)
            if not _is_simple(module):
                weight, bias = self._made(module, weight, bias, like)
            weight = _dense(weight, like.dtype)
            for scale in moved:
                # A quantised weight was cast into memory of its own; anything else may be the payload itself.
                is_own = weight.dtype != payload[0].dtype
                scale = scale.to(weight.dtype)
                weight = weight.mul_(scale) if is_own else weight * scale
            return Weights(weight, None if bias is None else _dense(bias, like.dtype), True)

    def _made(self, module: Any, weight: Tensor, bias: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias as the host or the layer itself makes them: dequantised and patched."""
        is_float = like.dtype in _FLOATS or _is_plain(weight)
        wanted = {"dtype": like.dtype if is_float else torch.float32, "device": like.device, "bias_dtype": like.dtype}
        if _casts_itself(module):
            return type(module).cast_bias_weight(_Moved(module, weight, bias), **wanted)  # type: ignore[no-any-return]
        layer = SimpleNamespace(
            weight=_in_model_dtype(module.weight, weight),
            bias=None if bias is None else _in_model_dtype(module.bias, bias),
            weight_function=_functions(module, "weight"),
            bias_function=_functions(module, "bias"),
        )
        return self._cast(layer, **wanted)

    @contextmanager
    def fetch(self, module: Any, like: Tensor) -> Iterator[Weights]:
        """Yield the weights of ``module`` where and as ``like`` is. Raises the host's interrupt on Cancel."""
        weight = module.weight
        is_cast = _is_simple(module) and not _scales(module) and weight.dtype != like.dtype
        if is_cast and like.device.type == weight.device.type == "cpu":
            self._check()
            # All there is to do is a cast, where new memory is slow to come by.
            lent, buffer = self._scratch.lend(weight, like.dtype)
            bias = getattr(module, "bias", None)
            try:
                yield Weights(lent, None if bias is None else bias.to(like.dtype), True)
            finally:
                self._scratch.take_back(buffer)
            return
        payload = [part.to(like.device, non_blocking=True) for part in self.payload(module)]
        yield self.finish(module, payload, like)


class _Moved:
    """A layer that casts its own weights, as it would be with its tensors somewhere else."""

    def __init__(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
        self._module = module
        self.weight, self.bias = weight, bias

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _scales(module: Any) -> list[Tensor]:
    found = (getattr(module, name, None) for name in _SCALES)
    return [scale for scale in found if scale is not None]


def _functions(module: Any, name: str) -> list[Callable[[Tensor], Tensor]]:
    """Return what the host does to a weight or bias after it was cast, in its order."""
    # Where the host loads layers on demand, it keeps a LoRA's patch apart from the other functions.
    patch = getattr(module, f"{name}_lowvram_function", None)
    return [*([] if patch is None else [patch]), *getattr(module, f"{name}_function", ())]


def _is_simple(module: Any) -> bool:
    """Return whether a weight only has to change its dtype."""
    bias = getattr(module, "bias", None)
    is_plain = _is_plain(module.weight) and (bias is None or _is_plain(bias))
    is_patched = _functions(module, "weight") or _functions(module, "bias")
    return is_plain and not is_patched and not hasattr(module.weight, "_model_dtype")


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def _casts_itself(module: Any) -> bool:
    """Return whether a layer dequantises by itself, as the GGUF extension's do when their weight is quantised."""
    if not callable(getattr(type(module), "cast_bias_weight", None)):
        return False
    is_quantised = getattr(module, "is_ggml_quantized", None)
    return is_quantised is None or bool(is_quantised())


def _in_model_dtype(stored: Tensor, moved: Tensor) -> Tensor:
    """Return ``moved`` in the dtype the model has in the host, where its file has another."""
    return moved.to(getattr(stored, "_model_dtype", moved.dtype)) if _is_plain(moved) else moved


def _dense(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a plain tensor in ``dtype``."""
    if _is_wrapper(tensor):
        tensor = tensor.to(dtype if dtype in _FLOATS else torch.float32).dequantize()
    return (tensor if type(tensor) is Tensor else _bare(tensor)).to(dtype)


def _is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor holds its data in other tensors, by torch's protocol for such classes."""
    return hasattr(tensor, "__tensor_flatten__")


def _bare(tensor: Tensor) -> Tensor:
    """Return the data of a tensor whose class only adds attributes. Such classes override ``detach`` and ``shape``."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def stored(tensor: Tensor | None) -> tuple[Tensor, ...]:
    """Return the plain contiguous tensors that hold ``tensor``: it, or its data and scales."""
    if tensor is None:
        return ()
    if _is_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return tuple(part for name in names for part in stored(getattr(tensor, name)))
    bare = tensor.detach() if _is_plain(tensor) else _bare(tensor)
    if bare.is_contiguous():
        return (bare,)
    # A layout such as channels last is contiguous in another order of axes; only gaps need a copy.
    return (bare.permute(_order(bare)).contiguous(),)


def _order(tensor: Tensor) -> list[int]:
    return sorted(range(tensor.ndim), key=lambda axis: (-tensor.stride(axis), axis))


def _rebuilt(tensor: Tensor, moved: Iterator[Tensor]) -> Tensor:
    """Return what ``tensor`` is, made of the next parts of ``moved``."""
    if _is_wrapper(tensor):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: _rebuilt(getattr(tensor, name), moved) for name in names}
        outer: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
        return outer
    part = next(moved)
    bare = tensor if _is_plain(tensor) else _bare(tensor)
    if not bare.is_contiguous():
        order = _order(bare)
        part = part.permute([order.index(axis) for axis in range(len(order))])
    if _is_plain(tensor):
        return part
    with torch._C.DisableTorchFunctionSubclass():
        classed = part.as_subclass(type(tensor))
    classed.__dict__.update(tensor.__dict__)
    return classed


def unreadable(network: nn.Module) -> dict[str, str]:
    """Return why a layer's weight can't be had, by the layer's path; without dequantising anything."""
    reasons = ((path, _why_unreadable(module)) for path, module in network.named_modules())
    return {path: reason for path, reason in reasons if reason is not None}


def _why_unreadable(module: Any) -> str | None:
    is_leaf = next(module.children(), None) is None
    if not is_matrix(module):
        looks_linear = is_leaf and hasattr(module, "in_features") and hasattr(module, "out_features")
        return "it keeps its weight in a way of its own" if looks_linear else None
    weight = module.weight
    if weight is None:
        return "the model's file has no weight for it"
    if hasattr(module, "num_experts"):
        return "it is a bank of experts"
    if _is_plain(weight) or callable(getattr(type(module), "cast_bias_weight", None)):
        return None
    inner = stored(weight) if _is_wrapper(weight) else ()
    if inner and all(map(_is_plain, inner)):
        return None
    return f"its weight is a {type(weight).__name__}"
