"""Building the cache against a bare loop over ``vae.encode`` and against the host's Make Training Dataset.

The VAE is the toy world's, so a picture costs as little as it ever will: what the cache adds shows the most. All kinds
take turns, so that a machine whose speed drifts is fair to all; the fastest round of each counts.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ._data_pictures import PictureKind, write_pictures

SHARD = 64
_MS = 1000.0


@dataclass(frozen=True)
class Builds:
    """How much is built.

    Attributes:
        side_px: of the pictures, in pixels.
        rounds: of which the fastest counts.
    """

    pictures: int
    side_px: int
    rounds: int


def builds(pack: Any, wanted: Builds, folder: Path) -> dict[str, float]:
    """Return milliseconds a picture of each way, and the ratios that are claimed. Call it in inference mode.

    ``build`` and ``bare_loop`` leave captions out; ``captioned_build`` and ``host_node`` encode one for each picture
    with the toy world's CLIP. The host's node is given pictures that were read already, or reads them as the build
    does. The build encodes one caption more, the empty one; among few pictures it shows.
    ``cpu`` is what all threads take together: on a busy machine it says more than the clock.
    """
    kinds = _kinds(pack, wanted, folder)
    best: dict[str, float] = {}
    cpu: dict[str, float] = {}
    for _ in range(wanted.rounds):
        for name, run in kinds.items():
            began = time.process_time()
            best[name] = min(best.get(name, float("inf")), seconds(run))
            cpu[name] = min(cpu.get(name, float("inf")), time.process_time() - began)
        shutil.rmtree(folder / "cache")
        shutil.rmtree(folder / "captioned")
    ms = {f"{name}_ms": _MS * value / wanted.pictures for name, value in best.items()}
    ms |= {f"{name}_cpu_ms": _MS * value / wanted.pictures for name, value in cpu.items()}
    return {
        "pictures": wanted.pictures,
        "side_px": wanted.side_px,
        **ms,
        "second_build_s": best["second_build"],
        "build_over_bare_loop": best["build"] / best["bare_loop"],
        "build_over_read_and_loop": best["build"] / best["read_and_loop"],
        "build_cpu_over_bare_loop": cpu["build"] / cpu["bare_loop"],
        "build_cpu_over_read_and_loop": cpu["build"] / cpu["read_and_loop"],
        "captioned_build_over_host_node": best["captioned_build"] / best["host_node"],
        "captioned_build_over_read_and_host_node": best["captioned_build"] / best["read_and_host_node"],
        "added_ms": ms["build_ms"] - ms["bare_loop_ms"],
    }


def _kinds(pack: Any, wanted: Builds, folder: Path) -> dict[str, Callable[[], Any]]:
    from comfy_extras.nodes_dataset import MakeTrainingDataset

    core = pack.lowvram_lora
    vae, clip = _models()
    dataset = _dataset(core, folder, wanted)
    plain = replace(dataset, samples=tuple(replace(sample, captions=("",)) for sample in dataset.samples))
    captions = [sample.caption for sample in dataset.samples]
    pixels = [_read(core, sample) for sample in dataset.samples]
    codec, encoder = pack.nodes._encoders.HostVae(vae), pack.nodes._encoders.HostClip(clip)
    no_encoder = core.fakes.FakeTextEncoder()
    vae.encode(pixels[0])
    clip.encode_from_tokens_scheduled(clip.tokenize(""))

    def build(which: Any, texts: Any, root: str) -> None:
        core.data.cache.build(which, codec, texts, folder / root, lambda *_: None)

    def host_node(images: Sequence[torch.Tensor]) -> None:
        MakeTrainingDataset.execute(list(images), [vae], [clip], captions)

    return {
        "bare_loop": lambda: [vae.encode(each) for each in pixels],
        "read_and_loop": lambda: [vae.encode(_read(core, sample)) for sample in dataset.samples],
        "build": lambda: build(plain, no_encoder, "cache"),
        "host_node": lambda: host_node(pixels),
        "read_and_host_node": lambda: host_node([_read(core, sample) for sample in dataset.samples]),
        "captioned_build": lambda: build(dataset, encoder, "captioned"),
        "second_build": lambda: build(dataset, encoder, "captioned"),
    }


def _models() -> tuple[Any, Any]:
    """Return the toy world's VAE and CLIP, as the host's loaders give them."""
    import comfy.sd

    from tests.toyworld import base

    files = base.files()
    clip = comfy.sd.load_clip([str(files["text_encoders"])], clip_type=comfy.sd.CLIPType.STABLE_DIFFUSION)
    return comfy.sd.VAE(sd=load_file(files["vae"])), clip


def _dataset(core: Any, folder: Path, wanted: Builds) -> Any:
    kind = PictureKind(((wanted.side_px, wanted.side_px),), "JPEG", wanted.pictures)
    write_pictures(folder / "set", kind, wanted.pictures)
    return core.data.scan.scan(core.config.DataConfig(folder="set", resolution=wanted.side_px), [folder])


def _read(core: Any, sample: Any) -> torch.Tensor:
    """Return a picture as the VAE takes it."""
    data = sample.image.read_bytes()
    return core.data.pixels.to_pixels(data, sample.image, sample.bucket_px, "#ffffff").unsqueeze(0)  # type: ignore[no-any-return]


def seconds(run: Callable[[], Any]) -> float:
    """Return how long ``run`` takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def files_and_shards(pack: Any, num: int, root: Path) -> dict[str, float]:
    """Return microseconds an encoding of SD 1.5 at 512 x 512: a file for each, and shards that hold many."""
    store, latents = pack.lowvram_lora.data.store, torch.zeros(4, 64, 64)
    source = random.Random(0)
    keys = [f"{source.getrandbits(256):064x}" for _ in range(num)]
    paths = {key: store.path_of(root, "latents", key) for key in keys}
    shards = {key: root / f"{number // SHARD}.safetensors" for number, key in enumerate(keys)}
    mixed = source.sample(keys, len(keys))

    def write_shards() -> None:
        for first in range(0, num, SHARD):
            some = keys[first : first + SHARD]
            save_file({key: latents.clone() for key in some}, shards[some[0]])

    def read_shard(key: str) -> None:
        with safe_open(shards[key], framework="pt") as file:
            file.get_tensor(key).clone()

    kinds: dict[str, Callable[[], Any]] = {
        "file_write_us": lambda: [store.write(paths[key], {"latents": latents}, {}) for key in keys],
        "file_peek_us": lambda: [store.peek(paths[key]) for key in mixed],
        "file_read_us": lambda: [store.read(paths[key]) for key in mixed],
        "file_touch_us": lambda: [store.touch(paths[key]) for key in mixed],
        "shard_write_us": write_shards,
        "shard_read_us": lambda: [read_shard(key) for key in mixed],
    }
    return {name: seconds(run) / num * 1e6 for name, run in kinds.items()}
