"""Memory in a real ComfyUI on the CPU: the budget has nothing to limit, and the host's own buttons do no harm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness import graph
from tests.harness.host import Event, HostProcess, texts

STEPS = 4


@pytest.fixture(scope="module")
def options(checkpoint: Path, dataset: str) -> graph.GraphOptions:
    """Return what this file's graphs have in common."""
    return graph.GraphOptions(
        checkpoint=checkpoint.name,
        folder=dataset,
        steps=STEPS,
        resolution=128,
        sampling_steps=2,
        output_name="memory",
        with_loader=False,
    )


def test_training_right_after_a_picture_passes_at_the_first_queue(
    host: HostProcess, options: graph.GraphOptions
) -> None:
    host.run(graph.base_picture(options))
    entry = host.run(graph.training(replace(options, output_name="after a picture", seed=1)))
    assert f"Trained {STEPS} steps" in texts(entry, graph.TRAIN)


def test_a_budget_on_the_cpu_is_ignored_and_the_report_says_so(host: HostProcess, options: graph.GraphOptions) -> None:
    train = {"vram_budget_gb": 4.5, "allow_lossy": True}
    entry = host.run(graph.training(replace(options, output_name="budget", seed=2, train=train)))
    report = texts(entry, graph.TRAIN)
    assert "vram_budget_gb = 4.5 is ignored" in report and "computes in RAM" in report


def test_the_unload_button_during_training_does_no_harm(host: HostProcess, options: graph.GraphOptions) -> None:
    steps, pressed = 6, []

    def press(event: Event) -> None:
        if event["type"] == "progress" and event["data"]["max"] == steps and event["data"]["value"] == 2:
            host.free()
            pressed.append(event)

    wanted = replace(options, output_name="unloaded", seed=3, steps=steps)
    entry = host.run(graph.training(wanted), on_event=press)
    assert pressed
    assert f"Trained {steps} steps" in texts(entry, graph.TRAIN)
    # Afterwards the host loads what it needs again, for a picture with the LoRA.
    prompt = graph.training(wanted)
    prompt |= graph.sampling("lora", [graph.TRAIN, 0], [graph.CHECKPOINT, 1], [graph.CHECKPOINT, 2], wanted)
    assert host.run(prompt)["outputs"][graph.SAVE_LORA_IMAGE]["images"]
