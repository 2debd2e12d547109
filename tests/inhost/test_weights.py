"""The host's weights in two halves: what must be on the device, and what the host makes of it there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch

from lowvram_lora.memory.frozen import BlockMemory, frozen_forward, is_linear, matrices

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.fixture(autouse=True)
def host_mode() -> Iterator[None]:
    """The mode LoRA Train runs its loop in."""
    with torch.inference_mode(), torch.inference_mode(False), torch.no_grad():
        yield


@pytest.fixture
def weights(pack: Any) -> Any:
    return pack.nodes._models.HostWeights()


def lora_for(model: Any, pack: Any) -> dict[str, torch.Tensor]:
    """Return a LoRA of rank 4 and alpha 7 for every matrix of the transformer blocks."""
    denoiser, file = pack.nodes._models.HostDenoiser(model), {}
    for number, (path, layer) in enumerate(matrices(model.model.diffusion_model)):
        if "transformer_blocks" not in path:
            continue
        name, generator = denoiser.file_name(path), torch.Generator().manual_seed(number)
        file[f"{name}.lora_down.weight"] = torch.randn(4, layer.in_features, generator=generator) * 0.1
        file[f"{name}.lora_up.weight"] = torch.randn(layer.out_features, 4, generator=generator) * 0.1
        file[f"{name}.alpha"] = torch.tensor(7.0)
    return file


def patched(pack: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a MODEL with a LoRA on it, by the host's own loader."""
    model = tiny.sd15(dtype)
    with torch.inference_mode():
        return pack.nodes._models.with_lora(model, lora_for(model, pack))


def left_in_ram(model: Any) -> Any:
    """Load as the host does when nothing fits on the device: patches wait beside the weights until they are used."""
    with torch.inference_mode():
        model.patch_model(device_to=tiny.CPU, lowvram_model_memory=1)
    network = model.model.diffusion_model
    assert any(module.weight_function for _, module in matrices(network))
    return network


def as_the_host_casts(module: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    import comfy.ops

    with torch.inference_mode():
        weight, bias = comfy.ops.cast_bias_weight(module, dtype=dtype, device=tiny.CPU, bias_dtype=dtype)
    return weight, bias


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("is_patched", [False, True], ids=["plain", "with a LoRA"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_moved_payload_gives_what_the_host_gives(
    dtype: torch.dtype, stored: torch.dtype, is_patched: bool, weights: Any, pack: Any
) -> None:
    network = left_in_ram(patched(pack, stored)) if is_patched else tiny.sd15(stored).model.diffusion_model
    like = torch.empty(0, dtype=dtype)
    for path, module in matrices(network):
        payload = weights.payload(module)
        assert all(part.data_ptr() in {module.weight.data_ptr(), _pointer(module.bias)} for part in payload), path
        before = module.weight.clone()
        made = weights.finish(module, [part.clone() for part in payload], like)
        expected = as_the_host_casts(module, dtype)
        with weights.fetch(module, like) as fetched:
            assert same(made.weight, expected[0]) and same(made.bias, expected[1]), path
            assert same(fetched.weight, expected[0]) and same(fetched.bias, expected[1]), path
        assert torch.equal(module.weight, before), path


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def test_a_lora_that_waits_in_ram_is_the_lora_that_is_merged(weights: Any, pack: Any) -> None:
    network = left_in_ram(patched(pack))
    merged = patched(pack)
    with torch.inference_mode():
        merged.patch_model(device_to=tiny.CPU)
    expected = dict(matrices(merged.model.diffusion_model))
    base = dict(matrices(tiny.sd15().model.diffusion_model))
    changed = 0
    for path, module in matrices(network):
        x = torch.randn(5, module.in_features, dtype=torch.float64) if is_linear(module) else None
        if x is None:
            continue
        with torch.enable_grad():
            x.requires_grad_()
            frozen_forward(module, BlockMemory(weights))(x).sum().backward()
        want = expected[path].weight.double().sum(dim=0).expand(5, -1)
        torch.testing.assert_close(x.grad, want, rtol=1e-5, atol=1e-6)
        changed += not torch.equal(expected[path].weight, base[path].weight)
    assert changed == len(lora_for(tiny.sd15(), pack)) // 3


def test_a_patch_that_the_host_keeps_for_loading_on_demand_acts(weights: Any) -> None:
    """Hosts that bring weights to the device when a layer asks keep patches under another name."""
    layer = next(module for _, module in matrices(tiny.sd15().model.diffusion_model) if is_linear(module))
    layer._v = (0, 0, 0)
    layer.weight_lowvram_function = lambda weight: weight.add_(1)
    layer.bias_lowvram_function = None
    layer.weight_function = [lambda weight: weight * 2]
    layer.bias_function = []
    stored = layer.weight.clone()
    payload = weights.payload(layer)
    made = weights.finish(layer, payload, torch.empty(0))
    assert torch.equal(made.weight, (stored + 1) * 2)
    assert torch.equal(layer.weight, stored) and torch.equal(payload[0], stored)


def test_a_file_in_another_type_than_the_model_gives_the_models_numbers(weights: Any) -> None:
    """There, weights stay as the file has them, and the type chosen at loading acts at each use."""
    layer = next(module for _, module in matrices(tiny.sd15().model.diffusion_model) if is_linear(module))
    layer.weight._model_dtype = torch.bfloat16
    made = weights.finish(layer, weights.payload(layer), torch.empty(0))
    assert torch.equal(made.weight, layer.weight.to(torch.bfloat16).float())
    assert not torch.equal(made.weight, layer.weight)


def test_patches_whose_tensors_are_elsewhere_follow_the_payload(weights: Any, pack: Any) -> None:
    """The payload is on the device by then, and a LoRA's own tensors stay in RAM."""
    like = torch.empty(0, dtype=torch.bfloat16, device="meta")
    for path, module in matrices(left_in_ram(patched(pack))):
        made = weights.finish(module, [part.to("meta") for part in weights.payload(module)], like)
        assert made.weight.device.type == "meta" and made.weight.dtype == like.dtype, path
        assert made.weight.shape == module.weight.shape, path


def test_weights_in_another_order_of_axes_are_not_copied(weights: Any) -> None:
    convolution = next(module for _, module in matrices(tiny.sd15().model.diffusion_model) if not is_linear(module))
    with torch.inference_mode():
        convolution.to(memory_format=torch.channels_last)
    payload = weights.payload(convolution)
    assert payload[0].is_contiguous() and payload[0].data_ptr() == convolution.weight.data_ptr()
    made = weights.finish(convolution, [part.clone() for part in payload], torch.empty(0))
    assert torch.equal(made.weight, convolution.weight) and made.weight.stride() == convolution.weight.stride()


def test_the_stop_button_acts_while_weights_are_made(weights: Any) -> None:
    import comfy.model_management as management

    layer = next(module for _, module in matrices(tiny.sd15().model.diffusion_model))
    payload = weights.payload(layer)
    management.interrupt_current_processing(True)
    with pytest.raises(management.InterruptProcessingException):
        weights.finish(layer, payload, torch.empty(0))
