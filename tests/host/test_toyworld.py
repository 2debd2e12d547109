"""A short lesson in the toy world through a real ComfyUI's API: every way to the LoRA draws the same pictures.

The base has SD3's layout and keys. ``test_run.py`` takes SD 1.5's through the same code.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness import graph
from tests.harness.host import Event, HostProcess, texts
from tests.toyworld import base, dataset, draw, lesson, scenes, show

FOLDER, NAME = "new shapes", "toy lesson"
STEPS, BATCH, NUM_ASKED = 60, 8, 4
STRENGTHS = {"off": 0.0, "half": 0.5, "full": 1.0}
ASKED = lesson.questions(NUM_ASKED)


@pytest.fixture(scope="module")
def wanted(host: HostProcess) -> graph.GraphOptions:
    """Return the lesson's settings; the host has its base model and its pictures."""
    base.offer_base(host.base)
    dataset.write(host.base / "input" / FOLDER, dataset.lesson_scenes(lesson.CONCEPT))
    return lesson.options(FOLDER, steps=STEPS, batch_size=BATCH, output_name=NAME)


@pytest.fixture(scope="module")
def first_run(host: HostProcess, wanted: graph.GraphOptions) -> Event:
    """Return the run that trains, and draws with the base, the node's MODEL and its LORA_MODEL."""
    prompt = {**graph.training(wanted), "loader": graph.loaded_lora(wanted)}
    for name, model in (("base", wanted.base().model), ("node", [graph.TRAIN, 0]), ("handle", ["loader", 0])):
        prompt |= lesson.sitting(name, model, ASKED, wanted)
    return host.run(prompt)


@pytest.fixture(scope="module")
def from_file(host: HostProcess, wanted: graph.GraphOptions, first_run: Event) -> dict[str, lesson.Drawn]:
    """Return what ComfyUI draws with the LoRA file by its own loader, by the strength's name."""
    base_model = wanted.base()
    prompt: graph.Prompt = dict(base_model.nodes)
    for name, strength in STRENGTHS.items():
        prompt[name] = graph.node(
            "LoraLoaderModelOnly",
            model=base_model.model,
            lora_name=f"{NAME}.safetensors",
            strength_model=strength,
        )
        prompt |= lesson.sitting(name, [name, 0], ASKED, wanted)
    entry = host.run(prompt)
    return {name: lesson.drawn(host, entry, name, ASKED) for name in STRENGTHS}


def same(one: lesson.Drawn, other: lesson.Drawn) -> bool:
    """Whether all pictures are the same bit for bit."""
    return all(np.array_equal(one[part], other[part]) for part in ASKED)


def test_the_pictures_of_a_scene_are_taken_as_they_are(first_run: Event) -> None:
    report = texts(first_run, graph.DATASET)
    assert f"{scenes.SIDE}x{scenes.SIDE}: {dataset.NUM_PICTURES} images" in report
    assert "scaled up" not in report


def test_the_file_and_the_handle_draw_what_the_nodes_model_draws(
    host: HostProcess, first_run: Event, from_file: dict[str, lesson.Drawn]
) -> None:
    node, handle = (lesson.drawn(host, first_run, name, ASKED) for name in ("node", "handle"))
    assert same(node, handle)
    assert same(node, from_file["full"])


def test_strength_0_draws_what_the_base_draws(
    host: HostProcess, first_run: Event, from_file: dict[str, lesson.Drawn]
) -> None:
    plain = lesson.drawn(host, first_run, "base", ASKED)
    assert same(plain, from_file["off"])
    assert not same(plain, from_file["full"])


def test_more_strength_moves_the_pictures_further(from_file: dict[str, lesson.Drawn]) -> None:
    none, half, full = (np.stack(from_file[name]["new"]).astype(np.float32) for name in STRENGTHS)
    assert 0 < np.abs(half - none).mean() < np.abs(full - none).mean()


def test_the_sheet_shows_every_picture_enlarged_under_its_caption() -> None:
    scene = ASKED["new"][0]
    truth = draw.picture(scene)
    page = np.asarray(show.sheet(("base", "truth"), [show.Row(scene.caption(), (None, truth))]))
    enlarged = truth.repeat(show.ENLARGED, 0).repeat(show.ENLARGED, 1)
    # Without the line round it.
    inner = enlarged[1:-1, 1:-1]
    windows = [
        (top, left)
        for top in range(page.shape[0] - inner.shape[0] + 1)
        for left in (show.MARGIN_PX + show.SIDE_PX + show.GAP_PX + 1,)
        if np.array_equal(page[top : top + inner.shape[0], left : left + inner.shape[1]], inner)
    ]
    assert len(windows) == 1
