"""What trains again and what does not: pictures, captions, the cache, CLIP's layer, patches on MODEL; and memory."""

from __future__ import annotations

import io
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors
from PIL import Image

from tests.harness import graph
from tests.harness.host import Event, HostProcess, executed_nodes, texts

STEPS = 2
REUSED = "it was taken from disk"
# How much more a run may leave in the process than an equal one before it; a copy of the network would be over 10 %.
MARGIN = 0.05


@pytest.fixture(scope="module")
def pictures(host: HostProcess) -> Path:
    """Return a folder of two pictures with captions."""
    return folder_of(host, "changing", {"red": (200, 30, 30), "green": (30, 200, 30)})


@pytest.fixture(scope="module")
def options(checkpoint: Path, pictures: Path) -> graph.GraphOptions:
    return graph.GraphOptions(
        checkpoint=checkpoint.name,
        folder=pictures.name,
        steps=STEPS,
        resolution=64,
        sampling_steps=2,
        rank=4,
        learning_rate=1e-2,
        output_name="changing",
    )


@pytest.fixture(scope="module")
def first_run(host: HostProcess, options: graph.GraphOptions) -> Event:
    """Return the history entry of the run that the others are compared with."""
    entry = host.run(graph.training(options))
    assert trained(entry)
    return entry


def folder_of(host: HostProcess, name: str, colours: dict[str, tuple[int, int, int]]) -> Path:
    """Write plain pictures of 64 x 64 with their colours' names as captions."""
    folder = host.base / "input" / name
    folder.mkdir()
    for word, colour in colours.items():
        Image.new("RGB", (64, 64), colour).save(folder / f"{word}.png")
        (folder / f"{word}.txt").write_text(f"a {word} square", encoding="utf-8")
    return folder


def encoded(entry: Event) -> tuple[str, str]:
    """Return the lines of Build Tiered Cache's report that count latents and captions."""
    latents, captions, *_ = texts(entry, graph.CACHE).splitlines()
    return latents, captions


def pixels(host: HostProcess, entry: Event, node_id: str) -> np.ndarray[Any, Any]:
    data = host.view(entry["outputs"][node_id]["images"][0])
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def losses(entry: Event) -> str:
    """Return the line of LoRA Train's report that holds the first and the last loss."""
    (line,) = [line for line in texts(entry, graph.TRAIN).splitlines() if line.startswith("Loss:")]
    return line


def trained(entry: Event) -> bool:
    return REUSED not in texts(entry, graph.TRAIN)


def metadata(host: HostProcess, name: str) -> dict[str, str]:
    with safetensors.safe_open(host.base / "models" / "loras" / f"{name}.safetensors", framework="np") as file:
        return dict(file.metadata())


def with_patch(options: graph.GraphOptions, class_type: str, **widgets: Any) -> graph.Prompt:
    """Return the graph with a node that patches MODEL between the checkpoint and LoRA Train."""
    prompt = graph.training(options)
    prompt["patch"] = graph.node(class_type, model=[graph.CHECKPOINT, 0], **widgets)
    prompt[graph.TRAIN]["inputs"]["model"] = ["patch", 0]
    return prompt


def private_bytes(host: HostProcess) -> int:
    """Return the bytes of ComfyUI's process that no file is behind, once they have come to rest."""
    process, last = psutil.Process(host.pid), 0
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        memory = process.memory_info()
        now = int(memory.rss - getattr(memory, "shared", 0))
        if abs(now - last) < 1 << 20:
            break
        last = now
        time.sleep(0.5)
    return last


def test_another_caption_trains_again_and_the_old_one_is_found(
    host: HostProcess, options: graph.GraphOptions, pictures: Path, first_run: Event
) -> None:
    caption = pictures / "red.txt"
    caption.write_text("a crimson square", encoding="utf-8")
    changed = host.run(graph.training(options))
    caption.write_text("a red square", encoding="utf-8")
    back = host.run(graph.training(options))
    assert trained(changed)
    assert encoded(changed) == (
        "Latents: 0 encoded, 2 already on disk (kept as half)",
        "Captions: 1 encoded, 2 already on disk",
    )
    assert not trained(back)
    assert losses(back) == losses(first_run) != losses(changed)


def test_another_picture_in_place_trains_again_and_only_it_is_encoded(
    host: HostProcess, options: graph.GraphOptions, pictures: Path, first_run: Event
) -> None:
    picture = pictures / "green.png"
    before = picture.read_bytes()
    Image.new("RGB", (64, 64), (30, 30, 200)).save(picture)
    changed = host.run(graph.training(options))
    picture.write_bytes(before)
    back = host.run(graph.training(options))
    assert trained(changed)
    assert encoded(changed) == (
        "Latents: 1 encoded, 1 already on disk (kept as half)",
        "Captions: 0 encoded, 3 already on disk",
    )
    assert not trained(back)
    assert losses(back) == losses(first_run) != losses(changed)


def test_a_second_folder_uses_only_its_own_pictures(
    host: HostProcess, options: graph.GraphOptions, first_run: Event
) -> None:
    """i01"""
    other = folder_of(host, "other", {"yellow": (220, 220, 40)})
    entry = host.run(graph.training(replace(options, folder=other.name, output_name="other")))
    report = texts(entry, graph.DATASET)
    assert report.startswith("1 image") and str(other) in report
    assert encoded(entry)[0] == "Latents: 1 encoded, 0 already on disk (kept as half)"
    assert trained(entry)
    assert metadata(host, "other")["ss_num_train_images"] == "1"
    assert metadata(host, options.output_name)["ss_num_train_images"] == "2"
    back = host.run(graph.training(options))
    assert not trained(back)
    assert losses(back) == losses(first_run) != losses(entry)


def test_a_deleted_cache_is_built_again_and_nothing_trained(
    host: HostProcess, options: graph.GraphOptions, first_run: Event
) -> None:
    prompt = graph.training(options)
    host.run(prompt)
    assert executed_nodes(host.run(prompt), prompt) == set()
    shutil.rmtree(host.base / "user" / "lowvram_lora" / "cache")
    entry = host.run(prompt)
    assert graph.CACHE in executed_nodes(entry, prompt)
    assert graph.DATASET not in executed_nodes(entry, prompt)
    assert encoded(entry) == (
        "Latents: 2 encoded, 0 already on disk (kept as half)",
        "Captions: 3 encoded, 0 already on disk",
    )
    assert not trained(entry)
    assert losses(entry) == losses(first_run)
    assert executed_nodes(host.run(prompt), prompt) == set()


def test_another_layer_of_clip_trains_again(host: HostProcess, options: graph.GraphOptions, first_run: Event) -> None:
    prompt = graph.training(options)
    prompt["layer"] = graph.node("CLIPSetLastLayer", clip=[graph.CHECKPOINT, 1], stop_at_clip_layer=-2)
    prompt[graph.CACHE]["inputs"]["clip"] = ["layer", 0]
    entry = host.run(prompt)
    assert encoded(entry) == (
        "Latents: 0 encoded, 2 already on disk (kept as half)",
        "Captions: 3 encoded, 0 already on disk",
    )
    assert trained(entry)
    assert losses(entry) != losses(first_run)


def test_a_lora_on_the_model_trains_again_on_top_of_it(
    host: HostProcess, options: graph.GraphOptions, first_run: Event
) -> None:
    lora = f"{options.output_name}.safetensors"
    stacked = replace(options, output_name="stacked")
    prompt = with_patch(stacked, "LoraLoaderModelOnly", lora_name=lora, strength_model=1.0)
    entry = host.run(prompt)
    assert trained(entry)
    assert losses(entry) != losses(first_run)
    host.free()
    again = host.run(prompt)
    assert {"patch", graph.CHECKPOINT, graph.TRAIN} <= executed_nodes(again, prompt)
    assert not trained(again)
    prompt["patch"]["inputs"]["strength_model"] = 0.5
    assert trained(host.run(prompt))


def test_a_model_sampling_node_is_trained_with(
    host: HostProcess, options: graph.GraphOptions, first_run: Event
) -> None:
    velocity = replace(options, output_name="velocity")
    prompt = with_patch(velocity, "ModelSamplingDiscrete", sampling="v_prediction", zsnr=False)
    entry = host.run(prompt)
    assert trained(entry)
    assert losses(entry) != losses(first_run)
    assert metadata(host, "velocity")["modelspec.prediction_type"] == "v"
    assert metadata(host, options.output_name)["modelspec.prediction_type"] == "epsilon"


def test_the_base_draws_the_same_picture_before_and_after_training(
    host: HostProcess, options: graph.GraphOptions, first_run: Event
) -> None:
    draw = graph.base_picture(options)
    before = host.run(draw)
    assert trained(host.run(graph.training(replace(options, seed=77, output_name="between"))))
    after = host.run(draw)
    # Drawn anew, by the same MODEL object.
    assert "sample_base" in executed_nodes(after, draw)
    assert graph.CHECKPOINT not in executed_nodes(after, draw)
    first, second = (pixels(host, entry, graph.SAVE_BASE) for entry in (before, after))
    assert first.std() > 1
    assert np.array_equal(first, second)


def test_a_run_leaves_no_more_memory_behind_than_the_one_before(
    host: HostProcess, options: graph.GraphOptions, first_run: Event
) -> None:
    left = []
    for seed in (101, 102, 103):
        assert trained(host.run(graph.training(replace(options, seed=seed, rank=32, output_name="memory"))))
        host.free()
        left.append(private_bytes(host))
    # Of the first two: ComfyUI itself, sampling without the pack, keeps more after its second unloading.
    assert left[2] <= max(left[:2]) * (1 + MARGIN), left
