"""The host's weights in two halves: what must be on the device, and what the host makes of it there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch

from lowvram_lora.memory.frozen import BlockMemory, frozen_forward, is_linear, matrices, usable_parameters

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


def norms(network: torch.nn.Module) -> dict[str, Any]:
    found = {path: module for path, module in network.named_modules() if isinstance(module, torch.nn.LayerNorm)}
    return {path: module for path, module in found.items() if "transformer_blocks" in path}


def with_patched_norms(on_demand: bool) -> tuple[Any, dict[str, Any]]:
    """Return a network whose norms are patched at each use, and the norms of the same model with patches merged."""
    models = []
    for _ in range(2):
        model = tiny.sd15()
        paths, patches = norms(model.model.diffusion_model), {}
        for number, path in enumerate(paths):
            for name in ("weight", "bias"):
                generator = torch.Generator().manual_seed(number)
                diff = torch.randn(getattr(paths[path], name).shape, generator=generator)
                patches[f"diffusion_model.{path}.{name}"] = ("diff", (diff,))
        with torch.inference_mode():
            assert len(model.add_patches(patches, 0.5)) == len(patches) > 0
            models.append(model)
    waiting, merged = models
    with torch.inference_mode():
        waiting.patch_model(device_to=tiny.CPU, lowvram_model_memory=1)
        merged.patch_model(device_to=tiny.CPU)
    network = waiting.model.diffusion_model
    for norm in norms(network).values():
        assert norm.weight_function and norm.bias_function
        if on_demand:
            for name in ("weight", "bias"):
                (patch,) = getattr(norm, f"{name}_function")
                setattr(norm, f"{name}_function", [])
                setattr(norm, f"{name}_lowvram_function", patch)
    return network, norms(merged.model.diffusion_model)


@pytest.mark.parametrize("on_demand", [False, True], ids=["at each use", "on demand"])
def test_a_norm_that_the_host_patches_at_each_use_is_patched_in_training(on_demand: bool, weights: Any) -> None:
    network, merged = with_patched_norms(on_demand)
    before = {path: (dict(norm._parameters), dict(norm.__dict__)) for path, norm in norms(network).items()}
    with usable_parameters(network, torch.float32, tiny.CPU, weights):
        for path, norm in norms(network).items():
            x = torch.randn(2, 3, *norm.normalized_shape, requires_grad=True)
            with torch.enable_grad():
                out = norm(x)
                out.square().sum().backward()
            with torch.inference_mode():
                expected = merged[path](x.detach())
            assert torch.equal(out.detach(), expected), path
            assert x.grad is not None and not norm.weight.is_inference()
    for path, norm in norms(network).items():
        parameters, attributes = before[path]
        assert all(norm._parameters[name] is parameter for name, parameter in parameters.items())
        assert all(norm.__dict__[name] is value for name, value in attributes.items())


class Tagged(torch.Tensor):
    """A class that only adds attributes, as a GGUF file's tensors in plain types have, and refuses to be copied."""

    def detach(self) -> Any:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError


def test_parameters_of_a_class_of_their_own_are_stood_in_for_by_plain_ones(weights: Any) -> None:
    model = tiny.sd15()
    network = model.model.diffusion_model
    norm = next(iter(norms(network).values()))
    wanted = norm.weight.clone()
    with torch.inference_mode():
        norm.weight = torch.nn.Parameter(norm.weight.detach().as_subclass(Tagged), requires_grad=False)
        network.free = torch.nn.Parameter(torch.arange(3.0).as_subclass(Tagged), requires_grad=False)
    for source in (None, weights):
        with usable_parameters(network, torch.float32, tiny.CPU, source):
            assert type(norm.weight) is type(network.free) is torch.nn.Parameter
            assert torch.equal(norm.weight, wanted) and torch.equal(network.free, torch.arange(3.0))
            assert not norm.weight.is_inference()
        assert type(norm.weight) is Tagged


def test_a_bank_of_experts_is_no_matrix_and_is_refused_by_name(pack: Any) -> None:
    class Bank(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts, self.in_features, self.out_features = 2, 8, 8
            self.weight = torch.nn.Parameter(torch.zeros(2, 8, 8))

    model = tiny.sd15()
    model.model.diffusion_model.middle_block[1].experts = Bank()
    assert all("experts" not in path for path, _ in matrices(model.model.diffusion_model))
    (problem,) = pack.nodes._models.HostDenoiser(model).problems([(4, 8, 8)])
    assert "middle_block.1.experts" in problem and "bank of experts" in problem
