"""Where the host's weights are while training runs on a device with memory of its own.

There is no such device here. The host's own loaders run with torch's ``meta`` device in its place and made-up amounts
of free memory; moving anything there loses its numbers, which shows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

from lowvram_lora.memory.frozen import matrices

META = torch.device("meta")
GIB = 1 << 30


@pytest.fixture
def card(pack: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A card of 8 GiB: the host's settings on NVIDIA, and what it is asked to free."""
    import comfy.model_management as management

    asked: list[float] = []
    real = management.free_memory

    def free_memory(required: float, *args: Any, **kwargs: Any) -> Any:
        asked.append(required)
        return real(required, *args, **kwargs)

    def loaded() -> int:
        return sum(model.model_loaded_memory() for model in management.current_loaded_models)

    def free(device: Any = None, torch_free_too: bool = False) -> Any:
        left = 8 * GIB - loaded()
        return (left, 0) if torch_free_too else left

    for name, value in {
        "current_loaded_models": [],
        "vram_state": management.VRAMState.NORMAL_VRAM,
        "MIN_WEIGHT_MEMORY_RATIO": 0.0,
        "get_free_memory": free,
        "get_total_memory": lambda *_: 8 * GIB,
        "free_memory": free_memory,
    }.items():
        monkeypatch.setattr(management, name, value)
    monkeypatch.setattr(pack.nodes._host, "has_own_memory", lambda device: device == META)
    yield SimpleNamespace(asked=asked, management=management)


def on_card(family: str = "sd15") -> Any:
    """Return a MODEL that computes on the card and waits in RAM."""
    model = tiny.FAMILIES[family]()
    model.load_device = META
    return model


def numbers(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in model.model.named_parameters()}


def test_the_weights_stay_in_ram_and_the_host_knows(card: Any, pack: Any) -> None:
    model = on_card()
    before = numbers(model)
    denoiser = pack.nodes._models.HostDenoiser(model)
    denoiser.load(room=GIB)
    assert all(torch.equal(before[name], now) for name, now in model.model.named_parameters())
    assert [loaded.model for loaded in card.management.current_loaded_models] == [model]
    assert model.loaded_size() == 0
    with denoiser.training(torch.float32):
        assert all(module.weight.device.type == "cpu" for _, module in matrices(denoiser.network))
    with denoiser.training(torch.float32):  # once more in the same run, after a fault say
        assert all(torch.equal(before[name], now) for name, now in model.model.named_parameters())


def test_a_lora_on_the_model_waits_beside_the_weights(card: Any, pack: Any) -> None:
    model = on_card()
    path, layer = next((path, m) for path, m in matrices(model.model.diffusion_model) if "transformer_blocks" in path)
    key = f"diffusion_model.{path}.weight"
    with torch.inference_mode():
        model.add_patches({key: ("diff", (torch.ones_like(layer.weight),))}, 0.5)
    denoiser = pack.nodes._models.HostDenoiser(model)
    denoiser.load(room=GIB)
    stored = layer.weight.clone()
    with denoiser.weights.fetch(layer, torch.empty(0)) as found:
        torch.testing.assert_close(found.weight, stored + 0.5)
    assert torch.equal(layer.weight, stored)


def test_other_models_leave_by_the_hosts_own_means(card: Any, pack: Any) -> None:
    other, model = on_card("sd3"), on_card()
    other.model.diffusion_model.to(META)  # as if a generation had used it
    other.model.model_loaded_weight_memory = 3 * GIB
    asked_to_leave: list[Any] = []
    entry = card.management.LoadedModel(other)
    entry.real_model = lambda: other.model
    entry.model_unload = lambda *_: asked_to_leave.append(other) or True
    card.management.current_loaded_models.append(entry)
    pack.nodes._models.HostDenoiser(model).load(room=GIB)
    assert asked_to_leave == [other]
    assert [loaded.model for loaded in card.management.current_loaded_models] == [model]


def test_without_a_room_the_host_decides(pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_management as management

    calls: list[Any] = []
    monkeypatch.setattr(management, "load_models_gpu", lambda *args, **kwargs: calls.append((args, kwargs)))
    model = tiny.sd15()
    denoiser = pack.nodes._models.HostDenoiser(model)
    denoiser.load()
    denoiser.load(room=GIB)  # on the CPU it means nothing
    assert calls == [(([model],), {})] * 2


def test_training_loads_only_what_is_not_loaded_yet(pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_management as management

    calls: list[Any] = []
    real = management.load_models_gpu
    monkeypatch.setattr(management, "load_models_gpu", lambda models, **kwargs: calls.append(models) or real(models))
    denoiser = pack.nodes._models.HostDenoiser(tiny.sd15())
    denoiser.load()
    with denoiser.training(torch.float32):
        assert len(calls) == 1
    with denoiser.training(torch.float32):
        assert len(calls) == 2


@pytest.fixture
def hardware(card: Any, pack: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hardware over the card, with an allocator that only remembers."""
    limits: list[float] = []
    backend = SimpleNamespace(
        limits=limits,
        peak=5,
        reserved=0,
        memory_reserved=lambda device: backend.reserved,
        memory_stats=lambda device: {
            "allocated_bytes.all.peak": backend.peak,
            "reserved_bytes.all.peak": backend.peak + 1,
        },
        reset_peak_memory_stats=lambda device: setattr(backend, "peak", 2),
        set_per_process_memory_fraction=lambda fraction, device: limits.append(fraction),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    return SimpleNamespace(now=pack.nodes._host.ProcessHardware(META), backend=backend)


def test_what_may_be_taken_is_what_is_free_and_what_models_give_up(hardware: Any, card: Any) -> None:
    model = on_card()
    model.model.model_loaded_weight_memory = 3 * GIB
    reserve = card.management.extra_reserved_memory()
    assert hardware.now.available() == 8 * GIB - reserve
    card.management.current_loaded_models.append(card.management.LoadedModel(model))
    assert card.management.get_free_memory() == 5 * GIB
    assert hardware.now.available() == 8 * GIB - reserve
    assert hardware.now.total() == 8 * GIB
    assert 0 < hardware.now.ram_available() < 1 << 50


def test_the_cap_is_lifted_on_every_way_out(hardware: Any) -> None:
    with hardware.now.capped(2 * GIB):
        assert hardware.backend.limits == [0.25]
    assert hardware.backend.limits == [0.25, 1.0]
    with pytest.raises(ValueError), hardware.now.capped(100 * GIB):
        raise ValueError
    assert hardware.backend.limits == [0.25, 1.0, 1.0, 1.0]


def test_what_is_on_the_device_before_comes_on_top_of_the_cap(hardware: Any, card: Any) -> None:
    hardware.backend.reserved = 3 * GIB
    emptied: list[Any] = []
    # What nobody uses is given back before it is looked at.
    hardware.now.release_cached = lambda: emptied.append(setattr(hardware.backend, "reserved", GIB))
    with hardware.now.capped(2 * GIB):
        assert hardware.backend.limits == [3 / 8] and len(emptied) == 1


def test_an_allocator_that_knows_no_cap_runs_without(hardware: Any, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("does not yet support setMemoryFraction")

    hardware.backend.set_per_process_memory_fraction = refuse
    with hardware.now.capped(GIB):
        pass
    assert "setMemoryFraction" in caplog.text


def test_a_sample_sees_peaks_since_the_last(hardware: Any) -> None:
    first, second = hardware.now.sample(), hardware.now.sample()
    assert (first["device_allocated"], first["device_reserved"], first["device_total"]) == (5, 6, 8 * GIB)
    assert second["device_allocated"] == 2
    hardware.backend.peak = 9
    hardware.now.reset_peaks()
    assert hardware.now.sample()["device_allocated"] == 2


def test_samples_after_the_first_ask_for_nothing_that_stays_the_same(
    hardware: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.model_management as management
    import psutil

    first = hardware.now.sample()
    for module, name in ((psutil, "virtual_memory"), (psutil, "Process"), (management, "get_total_memory")):
        monkeypatch.delattr(module, name)
    second = hardware.now.sample()
    assert {name: second[name] for name in ("ram_total", "device_total")} == {
        name: first[name] for name in ("ram_total", "device_total")
    }
    assert hardware.now.total() == first["device_total"]


def test_a_card_is_looked_up_once_and_may_be_lost(pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class LostError(Exception):
        pass

    def memory(handle: str) -> Any:
        calls.append(handle)
        if len(calls) > 4:
            raise LostError
        return SimpleNamespace(used=len(calls), total=9)

    nvml = SimpleNamespace(
        NVMLError=LostError,
        nvmlInit=lambda: calls.append("init"),
        nvmlDeviceGetHandleByUUID=lambda uuid: calls.append(uuid) or "handle",
        nvmlDeviceGetMemoryInfo=memory,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.version, "cuda", "13")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="7"))
    monkeypatch.setattr(pack.nodes._host, "has_own_memory", lambda device: False)
    hardware = pack.nodes._host.ProcessHardware(torch.device("cuda", 0))
    samples = [hardware.sample() for _ in range(4)]
    assert calls == ["init", "GPU-7", *["handle"] * 4]
    assert [sample.get("card_used") for sample in samples] == [3, 4, None, None]
    assert samples[0]["card_total"] == 9


def test_a_host_that_computes_in_ram_has_no_device_numbers(pack: Any) -> None:
    hardware = pack.nodes._host.ProcessHardware(tiny.CPU)
    assert hardware.available() is None and hardware.total() is None
    assert pack.nodes._host.transfers(tiny.CPU) is None
    assert not [name for name in hardware.sample() if name.startswith("device")]
    hardware.release_cached()
    hardware.reset_peaks()
    with hardware.capped(1):
        torch.empty(1000)


class Pages:
    """Stands in for the driver's part of hosts that bring weights to the device when a layer asks."""

    def __init__(self, *_: Any) -> None:
        self.size = 0
        self.held = 2 * GIB

    def alloc(self, num_bytes: int) -> tuple[int, int, int]:
        return 0, 0, num_bytes

    def loaded_size(self) -> int:
        return self.held

    def prioritize(self) -> None:
        pass

    def free_memory(self, num_bytes: float) -> int:
        freed = int(min(self.held, num_bytes))
        self.held -= freed
        return freed


def test_weights_that_come_on_demand_stay_in_their_file(card: Any, pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_patcher as model_patcher

    if not hasattr(model_patcher, "ModelPatcherDynamic"):
        pytest.skip("hosts before 0.12 have no models that load on demand; newer ones run this test")
    monkeypatch.setattr(model_patcher.comfy_aimdo.model_vbar, "ModelVBAR", Pages)
    monkeypatch.setattr(model_patcher.comfy_aimdo.host_buffer, "HostBuffer", Pages)
    # Unlike a card, where small weights go by right, ``meta`` would lose their numbers.
    monkeypatch.setattr(model_patcher.ModelPatcherDynamic, "unpin_all_weights", lambda self: None)
    plain, used = tiny.sd15(), tiny.sd15()
    model, other = (model_patcher.ModelPatcherDynamic(each.model, META, tiny.CPU) for each in (plain, used))
    blocks = ((path, m) for path, m in matrices(model.model.diffusion_model) if "transformer_blocks" in path)
    path, layer = max(blocks, key=lambda block: block[1].weight.numel())
    key = f"diffusion_model.{path}.weight"
    with torch.inference_mode():
        model.add_patches({key: ("diff", (torch.ones_like(layer.weight),))}, 0.5)
        card.management.load_models_gpu([other])
        card.management.load_models_gpu([model])
    assert model.is_dynamic() and model.loaded_size() > 2 * GIB and other.loaded_size() > 2 * GIB
    denoiser = pack.nodes._models.HostDenoiser(model)
    denoiser.load(room=7 * GIB)
    assert model.loaded_size() < GIB, "pages of an earlier use"
    assert other.loaded_size() < GIB, "pages of another model"
    assert card.management.current_loaded_models[0].model is model
    large = [m for _, m in matrices(denoiser.network) if m.weight.numel() * m.weight.element_size() > 16 * 1024]
    assert large and all(module.weight.device.type == "cpu" for module in large)
    stored = layer.weight.clone()
    with denoiser.weights.fetch(layer, torch.empty(0)) as found:
        torch.testing.assert_close(found.weight, stored + 0.5)
    assert torch.equal(layer.weight, stored)
