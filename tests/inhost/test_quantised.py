"""Quantised bases train through the same frozen layers: the weight is fetched, dequantised, used, dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import pytest
import quantised
import tiny
import torch
from torch import nn

from lowvram_lora.memory.frozen import BlockMemory, frozen_forward
from lowvram_lora.training.run import run

KINDS = list(quantised.kinds())
EXACT = ["fp8 e4m3", "fp8 e5m2", "gguf"]
# One of each way a weight is kept: a type, blocks, a scale beside it, a tensor class with one scale and with two.
WHOLE_RUNS = ["fp8 e4m3", "gguf", "scaled fp8", "TensorCoreFP8Layout", "TensorCoreNVFP4Layout"]


@pytest.fixture
def weights(pack: Any) -> Any:
    return pack.nodes._models.HostWeights()


def linear(bias: bool = True) -> nn.Linear:
    layer = nn.Linear(quantised.IN, quantised.OUT, bias=bias)
    layer.weight.data = quantised.drawn(quantised.OUT, quantised.IN)
    if bias:
        layer.bias.data = quantised.drawn(1, quantised.OUT, seed=1)[0]
    return layer.requires_grad_(False)


def make(kind: str, plain: nn.Module) -> tuple[Any, torch.Tensor]:
    with torch.inference_mode():  # as loaders build them
        return quantised.kinds()[kind](plain)


def outcome(forward: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the gradient of the input."""
    x = x.clone().requires_grad_()
    out = forward(x)
    out.backward(torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape))
    assert x.grad is not None
    return out.detach(), x.grad


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_a_plain_layer_with_the_dequantised_weight(
    kind: str, bias: bool, weights: Any
) -> None:
    layer, dequantised = make(kind, linear(bias))
    plain = linear(bias).double()
    plain.weight.data = dequantised.clone()
    x = quantised.drawn(6, quantised.IN, seed=2).double().view(2, 3, quantised.IN)
    found = outcome(frozen_forward(layer, BlockMemory(weights)), x)
    expected = outcome(plain, x)
    assert error(found[0], expected[0]) < 1e-7 and error(found[1], expected[1]) < 1e-7


@pytest.mark.parametrize("kind", EXACT)
def test_gradients_are_exact_where_the_weight_is_exact_in_float32(kind: str, weights: Any) -> None:
    layer, dequantised = make(kind, linear())
    plain = linear().double()
    plain.weight.data = dequantised.clone()
    x = quantised.drawn(6, quantised.IN, seed=2).double()
    found = outcome(frozen_forward(layer, BlockMemory(weights)), x)
    expected = outcome(plain, x)
    assert error(found[0], expected[0]) < 1e-9 and error(found[1], expected[1]) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_convolutions_of_float8_train_too(dtype: torch.dtype, weights: Any) -> None:
    import comfy.ops

    layer = comfy.ops.manual_cast.Conv2d(8, 12, 3, stride=2, padding=1)
    layer.weight.data = quantised.drawn(12, 72).view(12, 8, 3, 3)
    layer.bias.data = quantised.drawn(1, 12, seed=1)[0]
    eighth, dequantised = quantised.fp8(layer, dtype)
    plain = nn.Conv2d(8, 12, 3, stride=2, padding=1).double().requires_grad_(False)
    plain.weight.data, plain.bias.data = dequantised, layer.bias.data.double()
    x = quantised.drawn(2, 8 * 49, seed=2).double().view(2, 8, 7, 7)
    found = outcome(frozen_forward(eighth, BlockMemory(weights)), x)
    expected = outcome(plain, x)
    assert error(found[0], expected[0]) < 1e-9 and error(found[1], expected[1]) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_payload_gives_what_a_fetch_gives(kind: str, dtype: torch.dtype, weights: Any) -> None:
    layer, _ = make(kind, linear())
    like = torch.empty(0, dtype=dtype)
    payload = weights.payload(layer)
    assert all(type(part) is torch.Tensor and part.is_contiguous() for part in payload)
    before = [part.clone() for part in payload]
    moved = weights.finish(layer, [part.clone() for part in payload], like)
    with weights.fetch(layer, like) as fetched:
        for one, other in zip(moved[:2], fetched[:2], strict=True):
            assert type(one) is torch.Tensor and one.dtype == dtype
            assert torch.equal(one, other)
    after = weights.payload(layer)
    assert all(torch.equal(_bytes(one), _bytes(other)) for one, other in zip(before, after, strict=True))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_payload_is_as_small_as_what_is_stored(kind: str, weights: Any) -> None:
    layer, _ = make(kind, linear(bias=False))
    num_bytes = sum(part.numel() * part.element_size() for part in weights.payload(layer))
    assert num_bytes <= 1.13 * quantised.IN * quantised.OUT


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_layer_is_made_without_data_too(kind: str, weights: Any) -> None:
    layer, dequantised = make(kind, linear())
    like = torch.empty(0, dtype=torch.bfloat16, device="meta")
    found = weights.finish(layer, [part.to("meta") for part in weights.payload(layer)], like)
    assert found.weight.shape == dequantised.shape and found.weight.dtype == like.dtype
    assert found.weight.device.type == found.bias.device.type == "meta"


def test_an_input_scale_of_each_feature_is_part_of_the_weight(weights: Any) -> None:
    """Newer hosts smooth the input of some quantised layers; the frozen layer does not see that forward."""
    layer, dequantised = make("gguf", linear())
    layer.pre_quant_scale = torch.linspace(0.5, 2.0, quantised.IN)
    x = quantised.drawn(6, quantised.IN, seed=2)
    with weights.fetch(layer, x) as found:
        torch.testing.assert_close(x @ found.weight.t(), (x * layer.pre_quant_scale) @ dequantised.float().t())


@pytest.mark.parametrize("kind", [kind for kind in WHOLE_RUNS if kind in KINDS])
def test_a_quantised_model_trains_as_one_with_the_dequantised_weights(kind: str, pack: Any, tmp_path: Path) -> None:
    losses = {}
    for name in ("quantised", "plain"):
        model = tiny.sd15()
        with torch.inference_mode():
            for parent, attribute, plain in list(quantised.in_blocks(model.model.diffusion_model)):
                layer, dequantised = make(kind, plain)
                if name == "quantised":
                    setattr(parent, attribute, layer)
                else:
                    plain.weight.copy_(dequantised)
        with torch.inference_mode(False), torch.no_grad():
            job = jobs.job(tmp_path / name, pack.nodes._models.HostDenoiser(model), targets="all linear")
            *_, last = run(job)
        losses[name] = last.record.losses
    assert losses["quantised"] == pytest.approx(losses["plain"], rel=1e-5)
    assert len(set(losses["plain"])) == 3


def test_a_quantised_base_has_a_fingerprint_of_its_data(pack: Any) -> None:
    def digest(kind: str, seed: int) -> str:
        model = tiny.sd15(seed=seed)
        for parent, attribute, plain in list(quantised.in_blocks(model.model.diffusion_model)):
            setattr(parent, attribute, make(kind, plain)[0])
        return str(pack.nodes._models.HostDenoiser(model).fingerprint)

    assert digest("gguf", 0) == digest("gguf", 0) != digest("gguf", 1)
    assert digest("TensorCoreFP8Layout", 0) == digest("TensorCoreFP8Layout", 0) != digest("fp8 e4m3", 0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_patch_of_float8_is_part_of_the_fingerprint(dtype: torch.dtype, pack: Any) -> None:
    def digest(*values: float) -> str:
        model = tiny.sd15()
        (name, parameter), *_ = model.model.diffusion_model.named_parameters()
        patch = torch.zeros(parameter.shape)
        patch.view(-1)[: len(values)] = torch.tensor(values)
        model.add_patches({f"diffusion_model.{name}": ("diff", (patch.to(dtype),))})
        return str(pack.nodes._models.HostDenoiser(model).fingerprint)

    assert digest(1.0) == digest(1.0) != digest(0.5)


class Opaque(nn.Parameter):
    """A weight of a library that nothing here knows how to read."""


@pytest.mark.parametrize("what", ["weight", "no weight", "layer"])
def test_a_layer_that_cannot_be_read_is_refused_by_name(what: str, pack: Any) -> None:
    model = tiny.sd15()
    block = model.model.diffusion_model.middle_block[1].transformer_blocks[0]
    if what == "weight":
        block.attn1.to_q.weight = Opaque(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    elif what == "no weight":
        block.attn1.to_q.weight = None
    else:
        block.attn1.to_q = nn.Identity()
        block.attn1.to_q.in_features = block.attn1.to_q.out_features = 128
    (problem,) = pack.nodes._models.HostDenoiser(model).problems([(4, 8, 8)])
    assert "1 layers" in problem and "middle_block.1.transformer_blocks.0.attn1.to_q" in problem
    assert "Load this model from another file" in problem
