"""Building the cache against a bare loop over ``vae.encode``, a second build, and one file for each encoding or many.

The VAE is the toy world's, so a picture costs as little as it ever will: what the cache adds shows the most. All kinds
take turns, so that a machine whose speed drifts is fair to all; the fastest round of each counts.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

SHARD = 64


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="dev.py bench cache", description=__doc__)
    parser.add_argument("--pictures", type=int, default=12)
    parser.add_argument("--side", type=int, default=512, help="of the pictures, in pixels")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--samples", type=int, default=10_000, help="of the comparison of files with shards; 0 for none"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the benchmark and print its numbers."""
    from tests.bench import _full_size

    options = parse(arguments)
    pack = _full_size.enter_host()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        result = builds(pack, options, Path(folder))
        if options.samples:
            result.update(files_and_shards(pack, options.samples, Path(folder) / "files"))
    print(json.dumps(result) if options.json else "\n".join(f"{name:32} {value:g}" for name, value in result.items()))
    return 0


def builds(pack: Any, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return seconds of a bare loop, of a build, of a second one, and what the host's node takes with reading."""
    import comfy.sd

    from tests.toyworld import base

    core = pack.lowvram_lora
    vae = comfy.sd.VAE(sd=load_file(base.FOLDER / base.VAE))
    dataset = pictures(core, folder, options)
    pixels = [read_pixels(core, sample) for sample in dataset.samples]
    codec, encoder = pack.nodes._encoders.HostVae(vae), core.fakes.FakeTextEncoder()

    def build(root: str) -> None:
        core.data.cache.build(dataset, codec, encoder, folder / root, lambda *_: None)

    kinds: dict[str, Callable[[], Any]] = {
        "bare_loop_s": lambda: [vae.encode(each) for each in pixels],
        "read_and_loop_s": lambda: [vae.encode(read_pixels(core, sample)) for sample in dataset.samples],
        "build_s": lambda: build("cache"),
        "second_build_s": lambda: build("cache"),
    }
    vae.encode(pixels[0])
    best: dict[str, float] = {}
    for _ in range(options.rounds):
        for name, run in kinds.items():
            began = time.perf_counter()
            run()
            best[name] = min(best.get(name, float("inf")), time.perf_counter() - began)
        shutil.rmtree(folder / "cache")
    over = best["build_s"] / best["bare_loop_s"]
    return {**best, "build_over_bare_loop": over, "build_over_read_and_loop": best["build_s"] / best["read_and_loop_s"]}


def pictures(core: Any, folder: Path, options: argparse.Namespace) -> Any:
    """Write noise as pictures; return them as a dataset."""
    source = np.random.default_rng(0)
    (folder / "set").mkdir()
    for number in range(options.pictures):
        values = source.integers(0, 256, (options.side // 8, options.side // 8, 3), dtype=np.uint8)
        picture = Image.fromarray(values).resize((options.side, options.side), Image.Resampling.BICUBIC)
        picture.save(folder / "set" / f"{number}.jpg", quality=95)
    return core.data.scan.scan(core.config.DataConfig(folder="set", resolution=options.side), [folder])


def read_pixels(core: Any, sample: Any) -> torch.Tensor:
    """Return a picture as the VAE takes it."""
    data = sample.image.read_bytes()
    return core.data.pixels.to_pixels(data, sample.image, sample.bucket_px, "#ffffff").unsqueeze(0)  # type: ignore[no-any-return]


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
    found = {}
    for name, run in kinds.items():
        began = time.perf_counter()
        run()
        found[name] = (time.perf_counter() - began) / num * 1e6
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
