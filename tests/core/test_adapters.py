"""Names, files and the adapters themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowvram_lora.adapters import file
from lowvram_lora.adapters.attach import adapted_forwards, build
from lowvram_lora.adapters.names import free_path, output_path, partial_path
from lowvram_lora.adapters.targets import rank_limit, select
from lowvram_lora.config import LoraConfig
from lowvram_lora.errors import NothingToTrainError, PathError
from lowvram_lora.fakes import FakeNetwork, FakeWeights
from lowvram_lora.memory.frozen import BlockMemory

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../../x",
        "/tmp/x",
        "C:\\x",
        "C:x",
        "..",
        "a/./b",
        "con",
        "NUL.safetensors",
        "x.",
        "a//b",
        "",
        "  ",
        "x|y",
        "NUL .x",
        "COM¹",
        "turned \u202e around",
        "half \ud800",
        "x" * 200,
        "/".join("abcdefghi"),
    ],
)
def test_names_that_lead_outside_or_that_windows_cannot_hold_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PathError, match="output_name"):
        output_path(tmp_path, name)


@pytest.mark.parametrize("name", ["my lora", "stil/größe v1.5", "低显存", "a\\b", "x.safetensors"])
def test_plain_names_stay_inside(name: str, tmp_path: Path) -> None:
    path = output_path(tmp_path, name)
    assert path.suffix == ".safetensors" and path.is_relative_to(tmp_path)
    assert not path.stem.endswith(".safetensors")
    assert list(tmp_path.iterdir()) == []


@given(st.text(max_size=30))
def test_no_name_leaves_the_folder(name: str) -> None:
    root = Path("loras").resolve()
    try:
        path = output_path(root, name)
    except PathError:
        return
    assert path.resolve().is_relative_to(root)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "loras", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    os.symlink(outside, root / "link", target_is_directory=True)
    with pytest.raises(PathError, match="outside"):
        output_path(root, "link/x")


def test_free_and_partial_names(tmp_path: Path) -> None:
    path = tmp_path / "v1.5.safetensors"
    assert free_path(path) == path
    path.touch()
    assert free_path(path).name == "v1.5_2.safetensors"
    assert partial_path(path, 3).name == "v1.5_partial_step00003.safetensors"


def test_a_file_comes_back_whole(tmp_path: Path) -> None:
    state = {"a.b": (torch.randn(4, 8), torch.randn(8, 4))}
    tensors = file.state_dict(state, alpha=7.0, file_name=lambda path: f"lora_unet_{path.replace('.', '_')}")
    assert set(tensors) == {f"lora_unet_a_b.{part}" for part in ("lora_down.weight", "lora_up.weight", "alpha")}
    path = tmp_path / "new folder" / "x.safetensors"
    file.write(path, tensors, {"ss_steps": "3", file.FINGERPRINT_KEY: "abc"})
    found, metadata = file.read(path)
    assert metadata["ss_steps"] == "3" and file.fingerprint_of(path) == "abc"
    assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())
    assert found["lora_unet_a_b.alpha"].item() == 7.0
    assert [p.name for p in path.parent.iterdir()] == ["x.safetensors"]
    (path.parent / "ordinary").touch()
    assert path.stat().st_mode == (path.parent / "ordinary").stat().st_mode


def test_what_is_no_whole_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    file.write(path, {"a": torch.ones(100)}, {})
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(PathError, match=r"x\.safetensors"):
        file.read(path)
    assert file.fingerprint_of(tmp_path / "none") is None


def test_a_folder_that_cannot_be_written_is_known_beforehand(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(PathError, match="can't be written"):
        file.require_writable(blocked / "x.safetensors")
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(PathError, match="is a folder"):
        file.require_writable(tmp_path / "x.safetensors")


def test_presets_choose_by_place() -> None:
    network = FakeNetwork()
    attention = {"blocks.0.attn.to_v", "blocks.1.attn.to_v"}
    mlp = {f"blocks.{i}.mlp.{j}" for i in (0, 1) for j in (0, 2)}
    assert set(select(network, "attention")) == attention
    assert set(select(network, "attention + feed-forward")) == attention | mlp
    assert set(select(network, "all linear")) == attention | mlp | {"proj_in", "proj_out"}


def test_a_preset_that_matches_nothing_says_so() -> None:
    with pytest.raises(NothingToTrainError, match="all linear"):
        select(nn.Sequential(nn.Linear(2, 2)), "attention")


def test_embedders_are_no_feed_forward() -> None:
    network = nn.ModuleDict({"t_embedder": nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(2, 2))})})
    network["blocks"] = nn.ModuleList([nn.ModuleDict({"attn": nn.ModuleDict({"qkv": nn.Linear(2, 6)})})])
    assert list(select(network, "attention + feed-forward")) == ["blocks.0.attn.qkv"]


def test_rank_limits() -> None:
    assert rank_limit(nn.Linear(8, 3)) == 3
    assert rank_limit(nn.Conv2d(2, 30, 3)) == 18


def test_the_seed_decides_the_draw_and_the_global_generator_is_left_alone() -> None:
    layers = select(FakeNetwork(), "all linear")
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first = build(layers, LoraConfig(rank=2, alpha=3.0), seed=4, device=CPU)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.randn(3)
    second = build(layers, LoraConfig(rank=2, alpha=3.0), seed=4, device=CPU)
    third = build(layers, LoraConfig(rank=2, alpha=3.0), seed=5, device=CPU)
    downs = [[down for down, _ in adapters.state().values()] for adapters in (first, second, third)]
    assert all(torch.equal(a, b) for a, b in zip(downs[0], downs[1], strict=True))
    assert not torch.equal(downs[0][0], downs[2][0])
    assert all(not up.any() for _, up in first.state().values())
    assert all(p.dtype == torch.float32 for p in first.parameters())


@pytest.mark.parametrize("layer", [nn.Linear(6, 5), nn.Conv2d(3, 5, 3, stride=2, padding=1)], ids=["linear", "conv"])
def test_our_arithmetic_is_pefts(layer: Any) -> None:
    """PEFT's own forward on its own layer, over the same frozen base, is the reference; alpha differs from rank."""
    layer = layer.double().requires_grad_(False)
    adapters = build({"x": layer}, LoraConfig(rank=2, alpha=7.0), seed=0, device=CPU)
    peft_layer: Any = adapters.layers["x"].double()
    up = peft_layer.lora_B["default"].weight
    up.data = torch.randn(up.shape, dtype=torch.float64)
    peft_layer.base_layer.forward = layer.forward
    ((_, forward),) = adapted_forwards({"x": layer}, adapters, BlockMemory(FakeWeights()))
    shape = (2, 4, 6) if isinstance(layer, nn.Linear) else (2, 3, 8, 8)
    x = torch.randn(shape, dtype=torch.float64)
    results = []
    for function in (forward, peft_layer):
        peft_layer.zero_grad()
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        out.square().sum().backward()
        results.append([out.detach(), leaf.grad, *[p.grad.clone() for p in adapters.parameters()]])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_adapters_in_another_type_start_from_the_same_draw() -> None:
    layers = select(FakeNetwork(), "all linear")
    exact, rounded = (
        build(layers, LoraConfig(rank=2, alpha=3.0), seed=4, device=CPU, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert all(p.dtype == torch.bfloat16 for p in rounded.parameters())
    for a, b in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)


def test_the_layers_that_stand_in_for_the_base_take_no_memory_on_any_device() -> None:
    layers = select(FakeNetwork(), "all linear")
    adapters = build(layers, LoraConfig(rank=2, alpha=3.0), 4, torch.device("meta"), torch.bfloat16)
    assert all(p.is_meta for p in adapters.parameters())
    for layer in adapters.layers.values():
        weight: Any = layer.base_layer.weight
        assert weight.untyped_storage().nbytes() == 4
