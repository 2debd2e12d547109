"""The toy world's base model in the real host: what it is, and what its own KSampler draws with it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.toyworld import base, draw, exam, scenes, score, studio

ABOUT = json.loads((base.FOLDER / "about.json").read_text(encoding="utf-8"))
CAPTIONS = ["a red striped circle above a small blue square on white", "a large star in the middle on sand", ""]


@pytest.fixture(scope="module")
def opened() -> studio.Studio:
    return studio.open_studio()


@pytest.fixture(scope="module")
def marks(opened: studio.Studio) -> dict[str, score.Score]:
    """The first half of the exam that ``python -m tests.toyworld.make`` ends with, drawn anew."""
    return {name: exam.marked(opened, asked[: len(asked) // 2]) for name, asked in exam.papers().items()}


@pytest.mark.parametrize("name", [base.MODEL, base.VAE])
def test_the_shipped_files_are_the_ones_that_were_scored(name: str) -> None:
    assert hashlib.sha256((base.FOLDER / name).read_bytes()).hexdigest() == ABOUT["sha256"][name]


def test_the_host_loads_the_base_as_stable_diffusion_3(opened: studio.Studio) -> None:
    assert type(opened.model.model).__name__ == "SD3"
    assert opened.model.model.model_sampling.shift == 3.0


def test_the_text_encoder_has_the_closed_form_that_the_base_was_trained_on(opened: studio.Studio) -> None:
    [[context, extra]] = opened.conditioning_by_clip(CAPTIONS)
    [[expected, more]] = opened.conditioning(CAPTIONS)
    assert torch.equal(context, expected)
    torch.testing.assert_close(extra["pooled_output"], more["pooled_output"], atol=1e-5, rtol=0)


def test_latents_as_the_network_sees_them_are_normal(opened: studio.Studio) -> None:
    wanted = scenes.scenes(np.random.default_rng(11), 64)
    latents = opened.model.model.process_latent_in(opened.encode([draw.picture(scene) for scene in wanted]))
    # The encoder's training also had pictures of no world, so that a single channel may lie a little aside.
    assert latents.mean().abs() < 0.1
    assert latents.mean((0, 2, 3)).abs().max() < 0.5
    assert (latents.std((0, 2, 3)) - 1).abs().max() < 0.25


@pytest.mark.parametrize("shape", [None, *scenes.NEW_SHAPES])
def test_the_vae_can_show_scenes_that_the_base_cannot_draw(opened: studio.Studio, shape: str | None) -> None:
    vocabulary = scenes.Words(shapes=(shape,)) if shape else scenes.Words()
    wanted = scenes.scenes(np.random.default_rng(12), 40, vocabulary)
    truth = [draw.picture(scene) for scene in wanted]
    with torch.inference_mode():
        back = (opened.vae.decode(opened.encode(truth)).clamp(0, 1) * 255).round().byte().numpy()
    assert decibels(back, np.stack(truth)) >= 24
    # A small star loses its notches now and then, and is a pentagon.
    assert score.scored(list(back), wanted).shape >= 0.9


def decibels(picture: np.ndarray, truth: np.ndarray) -> float:
    """The peak signal-to-noise ratio."""
    error = np.square(picture.astype(np.float64) - truth).mean()
    return float(10 * np.log10(255**2 / error))


def test_the_base_draws_what_unseen_captions_ask_for(marks: dict[str, score.Score]) -> None:
    single, pair = marks["single"], marks["pair"]
    assert single.strict >= 0.8
    assert pair.strict >= 0.35
    assert min(single.colour, pair.colour) >= 0.9
    assert min(single.place, pair.place) >= 0.9


@pytest.mark.parametrize("shape", scenes.NEW_SHAPES)
def test_the_base_cannot_draw_a_held_out_shape(marks: dict[str, score.Score], shape: str) -> None:
    assert marks[shape].shape <= 0.2


def test_the_scores_are_those_on_record(marks: dict[str, score.Score]) -> None:
    # Half of the pictures, and other processors add in another order: a few may fall on the other side.
    recorded: dict[str, dict[str, Any]] = ABOUT["scores"]
    for name, mark in marks.items():
        for part in ("colour", "place", "shape", "strict"):
            assert getattr(mark, part) == pytest.approx(recorded[name][part], abs=0.1), (name, part)


def test_pictures_are_the_same_bit_for_bit_when_drawn_again(opened: studio.Studio) -> None:
    first, again = (opened.draw(CAPTIONS, seed=3) for _ in range(2))
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
