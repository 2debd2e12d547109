"""What a user gets wrong, over the API: the node at fault is named, its message says what to do, nothing is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import safetensors.torch
import torch
from PIL import Image

from tests.harness import graph
from tests.harness.host import HostError, HostProcess

BARE = "unet-only.safetensors"
VAE_16 = "taesd-16-channels.safetensors"
WORDS = count()


@pytest.fixture(scope="module")
def options(host: HostProcess, checkpoint: Path) -> graph.GraphOptions:
    """Return a graph that is fine: one small picture, two steps."""
    folder = host.base / "input" / "one picture"
    folder.mkdir()
    Image.new("RGB", (64, 64), (200, 120, 40)).save(folder / "plain.png")
    return graph.GraphOptions(
        checkpoint=checkpoint.name, folder=folder.name, steps=2, resolution=64, rank=4, output_name="bad input"
    )


@pytest.fixture(scope="module")
def bare_checkpoint(host: HostProcess, checkpoint: Path) -> str:
    """Return a checkpoint that holds the network alone, without text encoder and VAE."""
    tensors = safetensors.torch.load_file(checkpoint)
    network = {key: value for key, value in tensors.items() if key.startswith("model.diffusion_model.")}
    safetensors.torch.save_file(network, host.base / "models" / "checkpoints" / BARE)
    return BARE


@pytest.fixture(scope="module")
def vae_of_another_family(host: HostProcess, checkpoint: Path) -> str:
    """Return a VAE with latents of 16 channels, as Flux and SD3 have them: the checkpoint's own, four times over."""
    tensors = safetensors.torch.load_file(checkpoint)
    prefix = "first_stage_model."
    vae = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    last = max(int(key.split(".")[1]) for key in vae if key.startswith("taesd_encoder."))
    for key in (f"taesd_encoder.{last}.weight", f"taesd_encoder.{last}.bias"):
        vae[key] = vae[key].repeat(4, *(1,) * (vae[key].ndim - 1))
    vae["taesd_decoder.1.weight"] = vae["taesd_decoder.1.weight"].repeat(1, 4, 1, 1)
    assert vae["taesd_decoder.1.weight"].shape[1] == 16
    folder = host.base / "models" / "vae"
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(vae, folder / VAE_16)
    return VAE_16


@pytest.fixture(autouse=True)
def nothing_is_written(host: HostProcess, options: graph.GraphOptions) -> Iterator[None]:
    """Check after each test that models/loras is as it was and that the host takes the next prompt."""
    before = written(host)
    yield
    assert written(host) == before
    # With the graph around it, so that the host keeps what it has loaded.
    prompt = graph.training(options)
    for node_id in (graph.TRAIN, graph.MONITOR, graph.LOSS):
        del prompt[node_id]
    prompt["again"] = graph.training(replace(options, trigger_word=f"word {next(WORDS)}"))[graph.DATASET]
    assert host.run(prompt)["outputs"]["again"]["text"]


def written(host: HostProcess) -> set[Path]:
    """Return all that is in models/loras or has got out of it under the names these tests give."""
    models = host.base / "models"
    outside = (folder.glob("x*") for folder in (models, host.base, Path("/tmp")))
    return {*(models / "loras").rglob("*"), *(path for found in outside for path in found)}


def fault(host: HostProcess, prompt: graph.Prompt, node_id: str) -> str:
    """Run a prompt that must fail in ``node_id``; return what the node says."""
    with pytest.raises(HostError) as caught:
        host.run(prompt)
    assert caught.value.node_id == node_id
    assert caught.value.class_type == prompt[node_id]["class_type"]
    return caught.value.message


def folder_fault(host: HostProcess, options: graph.GraphOptions, folder: str) -> str:
    return fault(host, graph.training(replace(options, folder=folder)), graph.DATASET)


def train_fault(host: HostProcess, options: graph.GraphOptions, **changes: object) -> str:
    return fault(host, graph.training(replace(options, **changes)), graph.TRAIN)


def test_a_missing_folder_is_named_with_the_places_to_put_it(host: HostProcess, options: graph.GraphOptions) -> None:
    message = folder_fault(host, options, "no such pictures")
    assert str(host.base / "input" / "no such pictures") in message
    assert "no such folder" in message
    assert f"- {host.base / 'input'}" in message
    assert "extra_model_paths.yaml" in message


def test_an_empty_folder_is_named_with_what_counts_as_an_image(host: HostProcess, options: graph.GraphOptions) -> None:
    folder = host.base / "input" / "empty"
    folder.mkdir(exist_ok=True)
    message = folder_fault(host, options, folder.name)
    assert "No usable image was found" in message
    assert f"{folder} holds no files" in message
    assert "png, jpg" in message


@pytest.mark.parametrize("folder", ["/etc", "../user", "one picture/../../user"])
def test_a_folder_outside_the_allowed_ones_is_refused_with_the_way_to_allow_it(
    host: HostProcess, options: graph.GraphOptions, folder: str
) -> None:
    message = folder_fault(host, options, folder)
    assert folder in message
    assert "outside the folders" in message or "'..' is not allowed" in message
    assert "extra_model_paths.yaml" in message


def test_a_folder_of_broken_files_is_told_file_by_file(host: HostProcess, options: graph.GraphOptions) -> None:
    folder = host.base / "input" / "broken"
    folder.mkdir(exist_ok=True)
    whole = host.base / "input" / options.folder / "plain.png"
    (folder / "cut off.png").write_bytes(whole.read_bytes()[:60])
    (folder / "page.jpg").write_bytes(b"<!DOCTYPE html><html>404</html>")
    (folder / "nothing.webp").touch()
    (folder / "film.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    (folder / "page.txt").write_text("a caption", encoding="utf-8")
    message = folder_fault(host, options, folder.name)
    assert "No usable image was found" in message
    assert "1 .jpg, 1 .mp4, 1 .png, 1 .txt, 1 .webp" in message
    lines = message.splitlines()
    for name in ("cut off.png", "page.jpg", "nothing.webp"):
        (line,) = [line for line in lines if line.startswith(f"- {name}: ")]
        assert len(line.removeprefix(f"- {name}: ").split()) > 2, line


def loaded(host: HostProcess, folder: Path, **widgets: object) -> str:
    """Run Load Dataset alone; return what it says."""
    options = {"folder": folder.name, "resolution": 64, "trigger_word": "", "caption_extension": "auto", **widgets}
    entry = host.run({"alone": graph.node("LowVRAMLoadDataset", **options)})
    return str(entry["outputs"]["alone"]["text"][0])


def image_node(**inputs: object) -> graph.Prompt:
    """Return a graph that hands an image of ComfyUI's own to Load Dataset."""
    options = {"folder": "", "resolution": 64, "trigger_word": "", "caption_extension": "auto", **inputs}
    return {
        "image": graph.node("EmptyImage", width=64, height=64, batch_size=3, color=255),
        graph.DATASET: graph.node("LowVRAMLoadDataset", images=["image", 0], **options),
    }


def test_a_folder_in_any_state_is_read_and_every_fault_named(host: HostProcess) -> None:
    folder = host.base / "input" / "图片 and more"
    (folder / "masks").mkdir(parents=True)
    Image.new("RGB", (30_000, 200), (9, 9, 9)).save(folder / "long 猫.jpg")
    Image.new("RGB", (64, 64)).save(folder / "named wrong.jpg", "PNG")
    Image.new("CMYK", (64, 64)).save(folder / "print.tif")
    Image.new("L", (64, 64), 0).save(folder / "masks" / "print.png")
    os.mkfifo(folder / "pipe.png")
    (folder / "empty.webp").touch()
    lines = ('{"file_name": "long 猫.jpg", "text": "一只猫"}', "{broken", '{"file_name": "gone.png", "text": "x"}')
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    text = loaded(host, folder, masks="folder")
    assert "2 images" in text
    assert "captions found 1 of 2" in text
    for fault in (
        "pipe.png: not a file",
        "empty.webp: the file is empty",
        "print.tif: its mask masks/print.png: it is black all over",
        "metadata.jsonl line 2: is no JSON",
        "metadata.jsonl line 3 (gone.png): there is no such file",
        "long 猫.jpg (30000x200)",
    ):
        assert fault in text


def test_images_of_other_nodes_are_a_dataset(host: HostProcess) -> None:
    entry = host.run(image_node(trigger_word="sks"))
    text = str(entry["outputs"][graph.DATASET]["text"][0])
    assert "3 images" in text
    assert "'sks' alone" in text


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"folder": "one picture"}, ("folder is 'one picture'", "empty when images are connected")),
        ({"captions": "one\ntwo"}, ("captions is '2 lines'", "each of the 3 images")),
        ({"min_side": 128}, ("min_side", "64 x 64")),
        ({"missing_captions": "skip"}, ("No usable image", "missing_captions is skip")),
    ],
)
def test_settings_of_load_dataset_that_do_not_fit_are_named(
    host: HostProcess, inputs: dict[str, object], words: tuple[str, ...]
) -> None:
    message = fault(host, image_node(**inputs), graph.DATASET)
    for word in words:
        assert word in message


def test_captions_without_images_are_refused(host: HostProcess, options: graph.GraphOptions) -> None:
    message = fault(host, graph.training(replace(options, dataset={"captions": "a cat"})), graph.DATASET)
    assert "a folder has its own captions" in message


@pytest.mark.parametrize("name", ["../../x", "C:\\x", "/tmp/x", "..\\x", ""])
def test_an_output_name_that_leaves_the_lora_folder_is_refused_with_a_good_one(
    host: HostProcess, options: graph.GraphOptions, name: str
) -> None:
    message = train_fault(host, options, output_name=name)
    assert message.startswith("Training did not start")
    assert f"- {name}: output_name " in message
    assert "such as my_lora" in message


def test_a_lora_folder_that_can_not_be_written_is_named(host: HostProcess, options: graph.GraphOptions) -> None:
    blocked = host.base / "models" / "loras" / "blocked"
    blocked.write_bytes(b"a file where the subfolder would go")
    try:
        message = train_fault(host, options, output_name="blocked/x")
    finally:
        blocked.unlink()
    assert message.startswith("Training did not start")
    assert f"{blocked}: can't be written to" in message
    assert "another" in message


@pytest.mark.parametrize(("part", "output", "name"), [("clip", 1, "CLIP"), ("vae", 2, "VAE")])
def test_a_checkpoint_without_a_part_is_refused_with_the_loader_to_use(
    host: HostProcess, options: graph.GraphOptions, bare_checkpoint: str, part: str, output: int, name: str
) -> None:
    prompt = graph.training(options)
    prompt["bare"] = graph.node("CheckpointLoaderSimple", ckpt_name=bare_checkpoint)
    prompt[graph.CACHE]["inputs"][part] = ["bare", output]
    message = fault(host, prompt, graph.CACHE)
    assert f"This checkpoint has no {name}." in message
    assert f"Load {name}" in message


def test_a_vae_of_another_family_is_refused_with_both_channel_counts(
    host: HostProcess, options: graph.GraphOptions, vae_of_another_family: str
) -> None:
    prompt = graph.training(options)
    prompt["other"] = graph.node("VAELoader", vae_name=vae_of_another_family)
    prompt[graph.CACHE]["inputs"]["vae"] = ["other", 0]
    message = fault(host, prompt, graph.TRAIN)
    assert "The VAE makes latents of 16 channels" in message
    assert "this MODEL works on 4" in message
    assert "Connect the VAE of the model's own family to Build Tiered Cache" in message


def test_a_rank_above_the_layers_is_refused_with_the_largest_that_fits(
    host: HostProcess, options: graph.GraphOptions
) -> None:
    message = train_fault(host, options, rank=4096, train={"alpha": 16.0, "targets": "attention"})
    assert message.startswith("Training did not start")
    assert "rank 4096" in message
    assert "Lower rank to 320" in message


def test_steps_0_is_refused_before_anything_runs(host: HostProcess, options: graph.GraphOptions) -> None:
    message = train_fault(host, options, steps=0)
    assert "steps" in message
    assert "min of 1" in message


def test_all_problems_are_told_at_once(host: HostProcess, options: graph.GraphOptions) -> None:
    message = train_fault(host, options, output_name="../../x", rank=1000)
    problems = [line for line in message.splitlines() if line.startswith("- ")]
    assert len(problems) == 2
    assert "output_name" in problems[0]
    assert "rank 1000" in problems[1]


def test_a_loss_that_runs_away_stops_the_run_with_the_reason(host: HostProcess, options: graph.GraphOptions) -> None:
    loras = host.base / "models" / "loras"
    before = set(loras.iterdir())
    prompt = graph.training(replace(options, steps=50, learning_rate=1e6, output_name="runs away"))
    message = fault(host, prompt, graph.TRAIN)
    left = set(loras.iterdir()) - before
    try:
        stopped_at = int(message.partition("Training stopped at step ")[2].partition(":")[0])
        assert stopped_at <= 5
        assert "the loss is" in message
        assert "Lower learning_rate" in message
        assert all("_partial_" in path.name for path in left)
        for path in left:
            assert all(tensor.isfinite().all() for tensor in safetensors.torch.load_file(path).values())
    finally:
        for path in left:
            path.unlink()


def test_the_host_trains_after_all_of_this(host: HostProcess, options: graph.GraphOptions) -> None:
    """In a subfolder, which is taken away again: what is left in models/loras is what was there."""
    entry = host.run(graph.training(replace(options, output_name="after/fine")))
    folder = host.base / "models" / "loras" / "after"
    tensors = safetensors.torch.load_file(folder / "fine.safetensors")
    shutil.rmtree(folder)
    assert entry["outputs"][graph.TRAIN]["text"]
    assert any(torch.count_nonzero(value) for key, value in tensors.items() if key.endswith(".lora_up.weight"))
