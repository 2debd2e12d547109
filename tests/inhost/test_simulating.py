"""The host's networks run forward and backward on tensors without data, and nothing of them is touched."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from lowvram_lora.memory.frozen import BlockMemory, frozen, frozen_forward, matrices, usable_parameters
from lowvram_lora.memory.recompute import Recompute, find_blocks, recomputed

META = torch.device("meta")
DTYPE = torch.bfloat16
CHANNELS = {"sd15": 4, "sd3": 16, "flux": 16}


class Attention(torch.autograd.Function):
    """Stands in for a fused kernel: shapes only."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors)


def conditioning(family: str, batch: int = 2) -> dict[str, Tensor]:
    with torch.device(META):
        found = {"c_crossattn": torch.empty(batch, 7, tiny.CONTEXT)}
        if family != "sd15":
            found["y"] = torch.empty(batch, tiny.VECTOR)
        if family == "flux":
            found["guidance"] = torch.empty(batch)
        return found


def predicted(denoiser: Any, family: str) -> tuple[Tensor, Tensor]:
    """Return an input that needs a gradient, and the prediction from it."""
    x = torch.empty(2, CHANNELS[family], 8, 8, device=META, requires_grad=True)
    return x, denoiser.predict_x0(x, torch.empty(2, device=META), conditioning(family))


def state(model: Any) -> list[Any]:
    base = model.model
    tensors = [(name, id(t), t._version if not t.is_inference() else 0) for name, t in base.named_parameters()]
    tensors += [(name, id(t), t.device) for name, t in base.named_buffers()]
    modules = [(path, sorted(module.__dict__)) for path, module in base.named_modules()]
    return [tensors, modules, base.manual_cast_dtype, base.current_patcher, base.device]


@pytest.mark.parametrize("wanted", [True, False], ids=["recompute", "no recompute"])
@pytest.mark.parametrize("family", list(CHANNELS))
def test_a_network_runs_forward_and_backward_without_data(family: str, wanted: bool, pack: Any) -> None:
    model = tiny.FAMILIES[family]()
    denoiser = pack.nodes._models.HostDenoiser(model)
    before, seen = state(model), []

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        seen.append((tuple(q.shape), tuple(k.shape), q.dtype))
        return Attention.apply(q, k, v)  # type: ignore[no-any-return]

    network, memory = denoiser.network, BlockMemory(denoiser.weights)
    with ExitStack() as undo:
        undo.enter_context(denoiser.simulating(DTYPE, attention))
        undo.enter_context(usable_parameters(network, DTYPE, META))
        undo.enter_context(frozen({module: frozen_forward(module, memory) for _, module in matrices(network)}))
        kept = () if wanted else tuple(find_blocks(network))
        undo.enter_context(
            frozen(dict(recomputed(network, memory, META, list(dict(matrices(network))), Recompute(kept=kept))))
        )
        x, out = predicted(denoiser, family)
        out.sum().backward()  # type: ignore[no-untyped-call]
    assert out.shape == x.shape and out.dtype == torch.float32 and out.device.type == "meta"
    assert x.grad is not None and x.grad.shape == x.shape
    assert seen and all(q[0] == 2 and q[1] == k[1] and q[3] == k[3] and dtype == DTYPE for q, k, dtype in seen)
    assert state(model) == before


@pytest.mark.parametrize("skip_output", [False, True])
@pytest.mark.parametrize("skip_input", [False, True])
def test_the_attention_it_is_given_computes_what_the_hosts_does(skip_input: bool, skip_output: bool, pack: Any) -> None:
    import comfy.ldm.modules.attention as attention

    shaped = pack.nodes._attention.in_hosts_shape
    ours = shaped(lambda q, k, v, mask: torch.nn.functional.scaled_dot_product_attention(q, k, v, mask))
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)] if skip_input else [(2, 5, 24), (2, 7, 24), (2, 7, 24)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    options = {"skip_reshape": skip_input, "skip_output_reshape": skip_output}
    expected = attention.attention_pytorch(q, k, v, 3, **options)
    torch.testing.assert_close(ours(None, q, k, v, 3, attn_precision=None, transformer_options={}, **options), expected)


def test_an_error_while_simulating_leaves_the_host_as_it_was(pack: Any) -> None:
    import comfy.model_management as management

    model = tiny.sd15()
    denoiser = pack.nodes._models.HostDenoiser(model)
    before, flag = state(model), getattr(management, "in_training", None)
    with pytest.raises(RuntimeError, match="out"), denoiser.simulating(DTYPE, lambda *_: torch.empty(0)):
        assert model.model.manual_cast_dtype == DTYPE
        raise RuntimeError("out")
    assert state(model) == before and getattr(management, "in_training", None) == flag
    sigma = model.model.model_sampling.sigmas[[3]]
    assert model.model.model_sampling.timestep(sigma) == 3


class Ungated(nn.Module):
    """As the attention of Cosmos-Predict2 is written in hosts that train it with a kernel without a gradient."""

    def forward(self, q: Any, k: Any) -> Any:
        import comfy.quant_ops as quant_ops

        def rotated(q: Any, k: Any) -> Any:
            return quant_ops.ck.rms_rope_split_half(q, k)

        return rotated(q, k)


class Gated(nn.Module):
    """As other networks are written in those hosts."""

    def forward(self, q: Any, k: Any) -> Any:
        import comfy.model_management as management
        import comfy.quant_ops as quant_ops

        return (q, k) if management.in_training else quant_ops.ck.rms_rope_split_half(q, k)


@pytest.mark.parametrize("kind, num_problems", [(Ungated, 1), (Gated, 0)])
def test_a_network_with_a_kernel_without_a_gradient_is_refused(kind: Any, num_problems: int, pack: Any) -> None:
    model = tiny.sd15()
    model.model.diffusion_model.middle_block.add_module("extra", kind())
    problems = pack.nodes._models.HostDenoiser(model).problems([(4, 8, 8)])
    assert len(problems) == num_problems
    assert all("rms_rope_split_half" in problem and "no gradient" in problem for problem in problems)


def test_cosmos_predict2_is_refused_exactly_where_its_kernel_has_no_gradient(pack: Any) -> None:
    import comfy.ldm.cosmos.predict2 as predict2
    import comfy.ops

    with torch.device(META):
        layer = predict2.Attention(32, n_heads=2, head_dim=16, operations=comfy.ops.disable_weight_init)
    problems = pack.nodes._models.kernel_problems(layer)
    assert len(problems) == int(hasattr(comfy.ops, "CastBiasWeightContext"))
    assert all("comfy.ldm.cosmos.predict2" in problem for problem in problems)
