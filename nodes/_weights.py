"""What a layer keeps in memory, and the weight that is made of it: plain, quantised or patched.

Knows the host's layers by what they carry, and calls the host only through what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..lowvram_lora.memory.frozen import is_matrix
from ..lowvram_lora.memory.scratch import Buffer, ScratchPool
from ..lowvram_lora.ports import Weights

_PLAIN = (Tensor, nn.Parameter)
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
        parts = stored(_find(module, "weight")) + stored(_find(module, "bias"))
        for scale in _scales(module):
            parts += stored(scale)
        return parts

    def finish(self, module: Any, payload: Sequence[Tensor], like: Tensor) -> Weights:
        """Return the weights made of ``payload``, in ``like.dtype``. Raises the host's interrupt on Cancel."""
        self._check()
        weight, bias, dtype = _find(module, "weight"), _find(module, "bias"), like.dtype
        if _is_simple(module, weight, bias) and len(payload) == (1 if bias is None else 2):
            # Nearly every layer of nearly every model. Of more than one part a scale is the last.
            made = _rebuilt(weight, iter(payload))
            made = made if made.dtype == dtype else made.to(dtype)
            bias = None if bias is None else _rebuilt(bias, iter(payload[1:]))
            return Weights(made, bias if bias is None or bias.dtype == dtype else bias.to(dtype), True)
        # The host casts in inference mode always; its patches write into tensors that were made there.
        with torch.inference_mode():
            return self._finished(module, payload, like)

    def _finished(self, module: Any, payload: Sequence[Tensor], like: Tensor) -> Weights:
        """Return the weights of a layer that is quantised, patched or scaled."""
        kept, kept_bias = _find(module, "weight"), _find(module, "bias")
        moved = iter(payload)
        weight = _rebuilt(kept, moved)
        bias = None if kept_bias is None else _rebuilt(kept_bias, moved)
        if like.device.type == "meta" and not _is_plain(kept):
            # Kernels that dequantise need data. Their result is what lives while the layer computes.
            weight = torch.empty(tuple(kept.shape), dtype=like.dtype, device=like.device)
            return Weights(weight, None if bias is None else _dense(bias, like.dtype), True)
        if not _is_simple(module, kept, kept_bias):
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

    def fetch(self, module: Any, like: Tensor) -> AbstractContextManager[Weights]:
        """Return the context of one use of the weights of ``module``, where and as ``like`` is.

        Entered, it raises the host's interrupt on Cancel.
        """
        weight, bias = _find(module, "weight"), _find(module, "bias")
        if weight.device == like.device and _is_simple(module, weight, bias) and not _scales(module):
            if weight.dtype == like.dtype and (bias is None or bias.dtype == like.dtype):
                return _Kept(self._check, weight, bias)
            if like.device.type == "cpu":
                # All there is to do is a cast, where new memory is slow to come by.
                return _Lent(self._check, self._scratch, weight, bias, like.dtype)
        return _Made(self, module, like)


class _Kept:
    """One use of a layer's weights as they are."""

    __slots__ = ("_bias", "_check", "_weight")

    def __init__(self, check: Callable[[], None], weight: Tensor, bias: Tensor | None) -> None:
        self._check, self._weight, self._bias = check, weight, bias

    def __enter__(self) -> Weights:
        self._check()
        return Weights(self._weight.data, None if self._bias is None else self._bias.data, True)

    def __exit__(self, *error: Any) -> None:
        pass


class _Made:
    """One use of a layer's weights that are moved and made for it."""

    __slots__ = ("_like", "_module", "_weights")

    def __init__(self, weights: LayerWeights, module: Any, like: Tensor) -> None:
        self._weights, self._module, self._like = weights, module, like

    def __enter__(self) -> Weights:
        device = self._like.device
        payload = [
            part if part.device == device else part.to(device, non_blocking=True)
            for part in self._weights.payload(self._module)
        ]
        return self._weights.finish(self._module, payload, self._like)

    def __exit__(self, *error: Any) -> None:
        pass


class _Lent:
    """One use of a layer's weight that is cast into memory which is used again."""

    __slots__ = ("_bias", "_buffer", "_check", "_dtype", "_scratch", "_weight")

    def __init__(
        self,
        check: Callable[[], None],
        scratch: ScratchPool,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self._check, self._scratch, self._weight, self._bias, self._dtype = check, scratch, weight, bias, dtype
        self._buffer: Buffer | None = None

    def __enter__(self) -> Weights:
        self._check()
        lent, self._buffer = self._scratch.lend(self._weight, self._dtype)
        return Weights(lent, None if self._bias is None else self._bias.to(self._dtype), True)

    def __exit__(self, *error: Any) -> None:
        if self._buffer is not None:
            self._scratch.take_back(self._buffer)


class _Moved:
    """A layer that casts its own weights, as it would be with its tensors somewhere else."""

    def __init__(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
        self._module = module
        self.weight, self.bias = weight, bias

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _find(module: Any, name: str) -> Any:
    """Return an attribute of a layer, or None.

    A layer is looked at several times each time it is used, and ``nn.Module`` takes a microsecond to find a parameter
    and two to say that there is none.
    """
    own: dict[str, Any] = module.__dict__
    found = own["_parameters"].get(name)
    if found is None:
        found = own.get(name)
    if found is None:
        found = own["_buffers"].get(name)
    if found is None and hasattr(type(module), name):
        found = getattr(module, name)
    return found


def _scales(module: Any) -> list[Tensor]:
    own = module.__dict__
    places = own["_parameters"], own, own["_buffers"]
    found = []
    for name in _SCALES:
        for place in places:
            if place.get(name) is not None:
                found.append(place[name])
                break
    return found


def _functions(module: Any, name: str) -> list[Callable[[Tensor], Tensor]]:
    """Return what the host does to a weight or bias after it was cast, in its order."""
    # Where the host loads layers on demand, it keeps a LoRA's patch apart from the other functions.
    patch = module.__dict__.get(f"{name}_lowvram_function")
    return [*([] if patch is None else [patch]), *getattr(module, f"{name}_function", ())]


def _is_patched(module: Any) -> bool:
    """Return whether there are such functions."""
    own, kind = module.__dict__, type(module)
    return bool(
        own.get("weight_function")
        or own.get("bias_function")
        or own.get("weight_lowvram_function") is not None
        or own.get("bias_lowvram_function") is not None
        or getattr(kind, "weight_function", None)
        or getattr(kind, "bias_function", None)
    )


def _is_simple(module: Any, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a weight only has to change its dtype."""
    if type(weight) not in _PLAIN or not (bias is None or type(bias) in _PLAIN):
        return False
    # A plain tensor's own attributes; asking for one that is missing takes a microsecond.
    return "_model_dtype" not in weight.__dict__ and not _is_patched(module)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN


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
    bare = tensor.data if _is_plain(tensor) else _bare(tensor)
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
    if hasattr(module, "num_experts") and hasattr(module, "in_features"):
        return "it is a bank of experts"
    is_leaf = next(module.children(), None) is None
    if not is_matrix(module):
        looks_linear = is_leaf and hasattr(module, "in_features") and hasattr(module, "out_features")
        return "it keeps its weight in a way of its own" if looks_linear else None
    weight = module.weight
    if weight is None:
        return "the model's file has no weight for it"
    if _is_plain(weight) or callable(getattr(type(module), "cast_bias_weight", None)):
        return None
    inner = stored(weight) if _is_wrapper(weight) else ()
    if inner and all(map(_is_plain, inner)):
        return None
    return f"its weight is a {type(weight).__name__}"
