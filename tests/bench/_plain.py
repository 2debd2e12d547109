"""One step of a plain LoRA script, with diffusers' own networks and PEFT's own layers, without a device.

What diffusers' train_text_to_image_lora_sdxl.py does to its UNet, and its scripts for SD3 and Flux to their
transformers: all weights on the device in bfloat16, float32 adapters, autocast to bfloat16, torch's AdamW, gradient
checkpointing if asked for. Live bytes are counted by the ledger that counts ours (``memory/simulate.py``), with the
same stand-in for a fused attention kernel. Not counted, on either side: VAE and text encoders, which the SDXL script
keeps on the device beside its UNet.

Without a card there is no ``torch.autocast`` for one. ``PlayedAutocast`` stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

META = torch.device("meta")
TO_ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
"""The layers that the scripts adapt."""
TO_BOTH_STREAMS = (*TO_ATTENTION, "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")


@dataclass(frozen=True)
class Plain:
    """A network of diffusers at full size.

    Attributes:
        network: its class in diffusers.
        config: its sizes.
        adapted: names of the layers that get an adapter.
        inputs: batch size, side of the latents and rows of the captions to the network's keyword arguments.
    """

    network: str
    config: dict[str, Any]
    adapted: tuple[str, ...]
    inputs: Callable[[int, int, int], dict[str, Any]]


def _empty(*shape: int) -> Tensor:
    # The scripts cast what they feed to the network to its type.
    return torch.empty(shape, dtype=torch.bfloat16, device=META)


def _sdxl(batch: int, side: int, rows: int) -> dict[str, Any]:
    return {
        "sample": _empty(batch, 4, side, side),
        "timestep": torch.empty(batch, dtype=torch.long, device=META),
        "encoder_hidden_states": _empty(batch, rows, 2048),
        "added_cond_kwargs": {"text_embeds": _empty(batch, 1280), "time_ids": _empty(batch, 6)},
    }


def _sd3(batch: int, side: int, rows: int) -> dict[str, Any]:
    return {
        "hidden_states": _empty(batch, 16, side, side),
        "timestep": torch.empty(batch, dtype=torch.float32, device=META),
        "encoder_hidden_states": _empty(batch, rows, 4096),
        "pooled_projections": _empty(batch, 2048),
    }


def _flux(batch: int, side: int, rows: int) -> dict[str, Any]:
    tokens = (side // 2) ** 2
    return {
        "hidden_states": _empty(batch, tokens, 64),
        "timestep": torch.empty(batch, dtype=torch.float32, device=META),
        "guidance": torch.empty(batch, dtype=torch.float32, device=META),
        "encoder_hidden_states": _empty(batch, rows, 4096),
        "pooled_projections": _empty(batch, 768),
        "txt_ids": _empty(rows, 3),
        "img_ids": _empty(tokens, 3),
    }


PLAIN = {
    "sdxl": Plain(
        "UNet2DConditionModel",
        {
            "sample_size": 128,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "block_out_channels": (320, 640, 1280),
            "layers_per_block": 2,
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        TO_ATTENTION,
        _sdxl,
    ),
    "sd3": Plain(
        "SD3Transformer2DModel",
        {
            "sample_size": 128,
            "num_layers": 24,
            "attention_head_dim": 64,
            "num_attention_heads": 24,
            "joint_attention_dim": 4096,
            "caption_projection_dim": 1536,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 192,
        },
        TO_BOTH_STREAMS,
        _sd3,
    ),
    "flux": Plain("FluxTransformer2DModel", {"guidance_embeds": True}, TO_ATTENTION, _flux),
}


class PlayedAutocast(TorchFunctionMode):
    """What ``torch.autocast("cuda", torch.bfloat16)`` does, of the operations that these networks use.

    Torch's own lists are in its documentation, "CUDA Ops that can autocast to ...". A trained parameter is cast once
    in a forward pass and its cast is kept as long; a checkpoint's second run casts it for itself.

    Args:
        attend: stands for attention over ``[B, heads, N, head_dim]``.
    """

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._attend = attend
        self._casts: dict[int, Tensor] | None = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` with its tensors in the type that autocast gives it."""
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            q, k, v = (self._low(named[name]) for name in ("query", "key", "value"))
            return self._attend(q, k, v)
        name = getattr(func, "__name__", "")
        if name in _LOWER:
            args, kwargs = _mapped(args, self._low), _mapped(kwargs, self._low)
        elif name in _FLOAT32:
            args, kwargs = _mapped(args, _high), _mapped(kwargs, _high)
        return func(*args, **kwargs)

    def end_forward(self) -> None:
        """Let the casts of trained parameters go, as the end of autocast does."""
        self._casts = None

    def _low(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype is torch.bfloat16:
            return tensor
        is_trained = tensor.is_leaf and tensor.requires_grad
        if not is_trained or self._casts is None:
            return tensor.to(torch.bfloat16)
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = tensor.to(torch.bfloat16)
        return self._casts[id(tensor)]


_LOWER = {"linear", "conv2d", "matmul", "__matmul__", "bmm", "baddbmm", "mm", "addmm"}
_FLOAT32 = {
    *("layer_norm", "group_norm", "softmax", "exp", "log", "rsqrt", "reciprocal", "pow", "__pow__", "cumsum"),
    *("sum", "prod", "norm", "mse_loss", "rms_norm", "interpolate"),
}


def _high(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _mapped(value: Any, cast: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, dict):
        return {key: _mapped(item, cast) for key, item in value.items()}
    return type(value)(_mapped(item, cast) for item in value) if isinstance(value, list | tuple) else value


def network(plain: Plain, rank: int) -> Any:
    """Return diffusers' network on ``meta`` with adapters in it, as the scripts have it before their first step."""
    import diffusers
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    with META:
        made = getattr(diffusers, plain.network)(**plain.config)
    made.requires_grad_(False)
    made.to(torch.bfloat16)
    made.add_adapter(
        LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=list(plain.adapted))
    )
    cast_training_params(made, dtype=torch.float32)
    return made.train()


def counted(core: Any, made: Any, inputs: dict[str, Any], checkpointing: bool) -> Any:
    """Return the ledger of two steps of ``made`` on ``inputs``; the optimizer's state is there from the second on.

    Args:
        core: the pack's core, which has the ledger.
    """
    simulate = core.memory.simulate
    with simulate.LiveBytes("meta") as counter:
        attend = simulate.fused_attention(counter)
        made.disable_gradient_checkpointing()
        if checkpointing:
            made.enable_gradient_checkpointing(partial(_checkpoint, attend))
        for tensor in (*made.parameters(), *made.buffers(), *_tensors(inputs)):
            counter.add(tensor)
        trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=1e-2)
        for _ in range(2):
            _step(counter, made, inputs, attend)
            counter.phase("optimizer")
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return counter


def _checkpoint(attend: Any, run: Any, *args: Any) -> Any:
    """Diffusers' own checkpoint, whose second run is under autocast as well."""

    def contexts() -> tuple[Any, Any]:
        return nullcontext(), PlayedAutocast(attend)

    return checkpoint(run, *args, use_reentrant=False, context_fn=contexts)


def _step(counter: Any, made: nn.Module, inputs: dict[str, Any], attend: Any) -> None:
    counter.phase("forward")
    with torch.enable_grad(), PlayedAutocast(attend) as autocast:
        (predicted,) = made(**inputs, return_dict=False)
        # Accelerate gives what comes out of autocast back in float32.
        predicted = predicted.float()
        autocast.end_forward()
        loss = functional.mse_loss(predicted, torch.empty_like(predicted))
        del predicted
        counter.phase("backward")
        del autocast
        loss.backward()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
