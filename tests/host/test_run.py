"""The whole graph in a real ComfyUI: the LoRA reaches sampler and disk, and nothing trains twice."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import safetensors
from PIL import Image

from tests.harness import graph
from tests.harness.host import Event, HostInterruptError, HostProcess, executed_nodes, texts

STEPS = 3


@pytest.fixture(scope="module")
def prompt(checkpoint: Path, dataset: str) -> graph.Prompt:
    """Return the graph of this file's tests."""
    options = graph.GraphOptions(
        checkpoint=checkpoint.name,
        folder=dataset,
        steps=STEPS,
        resolution=128,
        sampling_steps=2,
        output_name="whole graph",
    )
    return graph.whole(options)


@pytest.fixture(scope="module")
def first_run(host: HostProcess, prompt: graph.Prompt) -> Event:
    """Return the history entry of the first run."""
    return host.run(prompt)


def lora_files(host: HostProcess) -> dict[str, int]:
    """Return the LoRA files and when each was written."""
    return {file.name: file.stat().st_mtime_ns for file in (host.base / "models" / "loras").iterdir()}


def picture(host: HostProcess, entry: Event, node_id: str) -> np.ndarray:
    """Return the pixels of the first picture that a node shows."""
    data = host.view(entry["outputs"][node_id]["images"][0])
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=np.int16)


def test_lora_file_is_written_with_metadata(host: HostProcess, first_run: Event) -> None:
    path = host.base / "models" / "loras" / "whole graph.safetensors"
    with safetensors.safe_open(path, framework="np") as file:
        assert any(key.endswith(".alpha") for key in file.keys())  # noqa: SIM118 - not a dict
        assert all(key.startswith("lora_unet_") for key in file.keys())  # noqa: SIM118
        metadata = file.metadata()
    assert any(key.startswith("ss_") for key in metadata)
    assert any(key.startswith("modelspec.") for key in metadata)


def test_picture_with_the_lora_differs(host: HostProcess, first_run: Event) -> None:
    base = picture(host, first_run, graph.SAVE_BASE)
    assert base.std() > 1
    assert np.abs(base - picture(host, first_run, graph.SAVE_LORA_IMAGE)).max() > 0


def test_host_loader_gives_the_same_picture(host: HostProcess, first_run: Event) -> None:
    ours = picture(host, first_run, graph.SAVE_LORA_IMAGE)
    assert np.abs(ours - picture(host, first_run, graph.SAVE_LOADED)).max() <= 1


def test_host_saver_writes_the_lora(host: HostProcess, first_run: Event) -> None:
    assert list((host.base / "output" / "loras").glob("saved_by_host*.safetensors"))


def test_loss_curve_is_drawn_and_reports_are_shown(first_run: Event) -> None:
    assert first_run["outputs"][graph.LOSS]["images"]
    for node_id in (graph.DATASET, graph.CACHE, graph.TRAIN):
        assert texts(first_run, node_id)


def test_unchanged_graph_runs_nothing(host: HostProcess, prompt: graph.Prompt, first_run: Event) -> None:
    before = lora_files(host)
    assert executed_nodes(host.run(prompt), prompt) == set()
    assert lora_files(host) == before


def test_unchanged_graph_trains_nothing_after_a_restart(
    host: HostProcess, prompt: graph.Prompt, first_run: Event
) -> None:
    before = lora_files(host)
    host.restart()
    events: list[Event] = []
    entry = host.run(prompt, on_event=events.append)
    data = [event["data"] for event in events if event["type"] == "progress"]
    assert not [step for step in data if step["node"] == graph.TRAIN and step["max"] == STEPS]
    assert lora_files(host) == before
    ours, again = (picture(host, run, graph.SAVE_LORA_IMAGE) for run in (first_run, entry))
    assert (ours == again).all()


def test_cancelled_run_is_not_taken_for_a_finished_one(host: HostProcess, checkpoint: Path, dataset: str) -> None:
    options = graph.GraphOptions(
        checkpoint=checkpoint.name, folder=dataset, steps=10, resolution=128, rank=4, output_name="cancelled"
    )
    prompt = graph.training(options)

    def cancel_at_second_step(event: Event) -> None:
        step = event["data"] if event["type"] == "progress" else {}
        if step.get("node") == graph.TRAIN and step["value"] == 2:
            host.interrupt()

    with pytest.raises(HostInterruptError) as cancelled:
        host.run(prompt, on_event=cancel_at_second_step)
    assert cancelled.value.node_id == graph.TRAIN
    assert "cancelled.safetensors" not in lora_files(host)

    entry = host.run(prompt)
    assert graph.TRAIN in executed_nodes(entry, prompt)
    assert "cancelled.safetensors" in lora_files(host)
