"""The host's VAE as a codec: overflow, too little memory, batches, against the host's own node."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from lowvram_lora.config import DataConfig
from lowvram_lora.data.cache import build
from lowvram_lora.data.draw import Draw
from lowvram_lora.data.pixels import to_pixels
from lowvram_lora.data.scan import scan
from lowvram_lora.data.tiers import TieredCache
from lowvram_lora.errors import UnsupportedModelError
from lowvram_lora.fakes import FakeTextEncoder
from tests.toyworld import base


def host_vae(dtype: torch.dtype = torch.float32, weights: dict[str, Tensor] | None = None) -> Any:
    import comfy.sd

    with torch.inference_mode():
        return comfy.sd.VAE(sd=weights or load_file(base.FOLDER / base.VAE), dtype=dtype)


def overflowing() -> dict[str, Tensor]:
    """The toy world's VAE with a first layer whose output does not fit into float16."""
    weights = load_file(base.FOLDER / base.VAE)
    name = "taesd_encoder.0.weight"
    return {**weights, name: weights[name] * (60000.0 / weights[name].abs().max())}


def pictures(folder: Path, size: tuple[int, int] = (64, 64), num: int = 3) -> Path:
    folder.mkdir(parents=True)
    for number in range(num):
        picture = Image.effect_mandelbrot(size, (-2, -1.5, 1, 1.5), 20 + 30 * number)
        picture.convert("RGB").save(folder / f"图 {number}.png")
        (folder / f"图 {number}.txt").write_text(f"mandelbrot {number}", encoding="utf-8")
    return folder


def test_the_cache_holds_what_the_hosts_own_node_makes(pack: ModuleType, tmp_path: Path) -> None:
    import comfy_extras.nodes_dataset as host_nodes

    vae = host_vae()
    dataset = scan(DataConfig(folder=str(pictures(tmp_path / "set")), resolution=64), [tmp_path])
    pixels = [to_pixels(s.image.read_bytes(), s.image, s.bucket_px, "#ffffff")[None] for s in dataset.samples]

    class NoClip:
        def tokenize(self, text: str) -> str:
            return text

        def encode_from_tokens_scheduled(self, tokens: str) -> str:
            return tokens

    with torch.inference_mode():
        theirs, _ = host_nodes.MakeTrainingDataset.execute(pixels, [vae], [NoClip()]).result
        index, _ = build(dataset, pack.nodes._encoders.HostVae(vae), FakeTextEncoder(), tmp_path / "c", lambda *_: None)
    for number, other in enumerate(theirs):
        assert torch.equal(TieredCache(index).latents(Draw(number)), other["samples"][0])


def test_a_vae_that_overflows_at_half_precision_is_retried_in_float32_and_the_picture_named(
    pack: ModuleType, tmp_path: Path
) -> None:
    vae = host_vae(torch.float16, overflowing())
    dataset = scan(DataConfig(folder=str(pictures(tmp_path / "set")), resolution=64), [tmp_path])
    codec = pack.nodes._encoders.HostVae(vae)
    with torch.inference_mode():
        plain = to_pixels(dataset.samples[0].image.read_bytes(), "", (64, 64), "#ffffff")[None]
        assert not codec.encode(plain).latents.isfinite().all()
        index, report = build(dataset, codec, FakeTextEncoder(), tmp_path / "cache", lambda *_: None)
        expected = host_vae(torch.float32, {key: value.float() for key, value in vae.get_sd().items()}).encode(plain)
    assert "图 0.png" in str(report) and "float32" in str(report)
    latents = TieredCache(index).latents(Draw(0))
    assert latents.isfinite().all()
    torch.testing.assert_close(latents, expected[0])
    assert vae.vae_dtype is torch.float16


def test_what_is_no_number_in_float32_either_is_refused_by_name_and_never_cached(
    pack: ModuleType, tmp_path: Path
) -> None:
    weights = load_file(base.FOLDER / base.VAE)
    weights["taesd_encoder.0.bias"] = weights["taesd_encoder.0.bias"] + float("nan")
    dataset = scan(DataConfig(folder=str(pictures(tmp_path / "set")), resolution=64), [tmp_path])
    for dtype in (torch.float16, torch.float32):
        codec = pack.nodes._encoders.HostVae(host_vae(dtype, weights))
        with torch.inference_mode(), pytest.raises(UnsupportedModelError, match=r"图 0\.png"):
            build(dataset, codec, FakeTextEncoder(), tmp_path / "cache", lambda *_: None)
    assert not list((tmp_path / "cache" / "latents").rglob("*.safetensors"))


def test_a_picture_too_large_for_the_device_goes_through_the_hosts_tiles_and_is_named(
    pack: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.model_management

    vae, areas = host_vae(), []

    def small_device(pixels: Tensor) -> Tensor:
        areas.append(pixels.shape[-1] * pixels.shape[-2])
        if areas[-1] > 512 * 512:
            raise comfy.model_management.OOM_EXCEPTION("played")
        # In place of the network, which takes long for so many tiles.
        return torch.nn.functional.avg_pool2d(pixels, 8).repeat(1, 6, 1, 1)[:, :16]

    monkeypatch.setattr(vae.first_stage_model, "encode", small_device)
    folder = pictures(tmp_path / "set", (640, 640), 1)
    dataset = scan(DataConfig(folder=str(folder), resolution=640), [tmp_path])
    with torch.inference_mode():
        index, report = build(
            dataset, pack.nodes._encoders.HostVae(vae), FakeTextEncoder(), tmp_path / "cache", lambda *_: None
        )
    assert areas[0] == 640 * 640 and max(areas[1:]) <= 512 * 512
    assert TieredCache(index).latents(Draw(0)).shape == (16, 80, 80)
    assert "in tiles: 图 0.png" in str(report)
    assert not [name for name in vae.__dict__ if name.startswith("encode_tiled")]


def test_of_a_batch_that_is_too_much_at_once_each_picture_is_tried_alone(
    pack: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.model_management

    vae = host_vae()
    encode = vae.first_stage_model.encode

    def small_device(pixels: Tensor) -> Tensor:
        if len(pixels) > 1:
            raise comfy.model_management.OOM_EXCEPTION("played")
        return encode(pixels)

    monkeypatch.setattr(vae.first_stage_model, "encode", small_device)
    pixels = torch.rand(3, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        encoded = pack.nodes._encoders.HostVae(vae).encode(pixels)
        expected = torch.cat([vae.encode(pixels[i : i + 1]) for i in range(3)])
    assert not encoded.in_tiles
    assert torch.equal(encoded.latents, expected)


def test_frames_of_a_video_are_no_batch(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    vae = host_vae()
    codec = pack.nodes._encoders.HostVae(vae)
    monkeypatch.setattr(pack.nodes._encoders, "has_own_memory", lambda device: True)
    assert codec.batch_limit > 1
    vae.latent_dim = 3
    assert codec.batch_limit == 1
    vae.not_video = True
    assert codec.batch_limit > 1
