"""The toy world: scenes by chance, how they look, and the scorer that judges trainers by pictures alone."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.harness import demo
from tests.toyworld import base, dataset, draw, exam, scenes, score, states, words
from tests.toyworld.scenes import Scene, Thing, Words

CONCEPTS = {
    "old": Words(),
    "star": Words(shapes=("star",)),
    "heart": Words(shapes=("heart",)),
    "dome": Words(shapes=("dome",)),
    "checkered": Words(textures=(scenes.NEW_TEXTURE,)),
}


def drawn(count: int, seed: int, vocabulary: Words = CONCEPTS["old"]) -> tuple[list[np.ndarray], list[Scene]]:
    wanted = scenes.scenes(np.random.default_rng(seed), count, vocabulary)
    return [draw.picture(scene) for scene in wanted], wanted


def one(**changes: object) -> Scene:
    thing = Thing("circle", "red", "solid", "large", 32.0, 32.0)
    return Scene((replace(thing, **changes),), "in the middle", "white")


def test_a_caption_says_what_differs_from_the_ordinary() -> None:
    small = Thing("square", "blue", "solid", "small", 32, 46)
    striped = Thing("circle", "red", "striped", "medium", 32, 18)
    scene = Scene((striped, small), "above", "white", "blueprint")
    assert scene.caption() == "a red striped circle above a small blue square on white in blueprint style"


def test_a_seed_gives_the_same_scenes_and_another_seed_others() -> None:
    first, again, other = (drawn(20, seed)[1] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_captions_for_tests_and_for_training_never_meet() -> None:
    rng = np.random.default_rng(3)
    seen, unseen = ({s.caption() for s in scenes.scenes(rng, 1500, unseen=kept)} for kept in (False, True))
    assert not seen & unseen


@pytest.mark.parametrize("shape", scenes.NEW_SHAPES)
def test_an_exam_asks_each_caption_once_and_none_that_is_learned_from(shape: str) -> None:
    asked = [scene.caption() for paper in exam.papers().values() for scene in paper]
    assert len(set(asked)) == len(asked) == exam.COUNT * (4 + 2 + len(scenes.NEW_SHAPES)) // 4
    assert not set(asked) & {scene.caption() for scene in dataset.lesson_scenes(shape, 192)}


def test_the_base_never_hears_of_a_held_out_concept() -> None:
    heard = " ".join(scene.caption() for scene in drawn(500, 4)[1]).split()
    assert not {*scenes.NEW_SHAPES, scenes.NEW_TEXTURE, scenes.NEW_STYLE} & set(heard)
    assert {*scenes.SHAPES, *scenes.COLOURS} <= set(heard)


def test_things_of_one_size_are_equally_large_whatever_their_shape() -> None:
    areas = {shape: draw.mask(shape, 32, 32, 9).sum() / score.UNIT**2 for shape in score.EVERY_SHAPE}
    for shape, area in areas.items():
        assert area == pytest.approx(np.pi * 81, rel=0.06), shape


@pytest.mark.parametrize("concept", CONCEPTS)
def test_the_truth_scores_nearly_one(concept: str) -> None:
    result = score.scored(*drawn(60, 5, CONCEPTS[concept]))
    assert min(asdict(result).values()) >= 0.97


def test_a_picture_scores_nearly_nothing_against_another_caption() -> None:
    pictures, wanted = drawn(100, 6)
    result = score.scored(pictures[1:] + pictures[:1], wanted)
    assert result.strict <= 0.03
    assert max(result.colour, result.place, result.shape) <= 0.35


def test_noise_and_a_bare_background_score_nothing() -> None:
    rng = np.random.default_rng(7)
    wanted, shape = scenes.scenes(rng, 20), (20, scenes.SIDE, scenes.SIDE, 3)
    for pictures in (rng.integers(0, 256, shape, np.uint8), np.full(shape, 244, np.uint8)):
        assert score.scored(list(pictures), wanted) == score.Score(0, 0, 0, 0, clean=0, strict=0)


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ("shape", {"shape": "star"}),
        ("shape", {"shape": "ring"}),
        ("clean", {"x": 46.0, "y": 18.0, "colour": "blue"}),
        ("colour", {"colour": "yellow"}),
        ("place", {"x": 46.0, "y": 18.0}),
        ("texture", {"texture": "striped"}),
    ],
)
def test_a_single_fault_is_found_and_nothing_else_is_blamed(fault: str, change: dict[str, object]) -> None:
    picture = draw.picture(one(**change))
    if fault == "clean":
        # What was asked for is there, and something else as well.
        picture = np.where(draw.mask("circle", 32, 32, 11)[..., None] > 0.5, draw.picture(one()), picture)
    result = score.score(picture, one())
    assert getattr(result, fault) == 0
    if fault != "colour":  # Without its colour a thing is not found at all.
        assert {name for name in ("colour", "place", "shape") if getattr(result, name) == 0} <= {fault}
    assert result.strict == (1 if fault == "texture" else 0)


def test_another_background_is_not_clean() -> None:
    result = score.score(draw.picture(one()), replace(one(), background="grey"))
    assert (result.shape, result.clean, result.strict) == (1, 0, 0)


@pytest.mark.parametrize("stray", ["lines", "spots", "tint"])
def test_small_things_that_are_everywhere_are_not_clean(stray: str) -> None:
    picture = draw.picture(one()).astype(np.int16)
    rows, columns = np.mgrid[: scenes.SIDE, : scenes.SIDE]
    free = draw.mask("circle", 32, 32, 14) == 0
    where = {"lines": rows % 8 < 2, "spots": (rows % 12 < 4) & (columns % 12 < 4), "tint": rows >= 0}[stray] & free
    picture[where] = picture[where] - 40 if stray == "tint" else (30, 60, 230)
    result = score.score(picture.clip(0, 255).astype(np.uint8), one())
    assert (result.shape, result.clean, result.strict) == (1, 0, 0)


@pytest.mark.parametrize("asked", scenes.NEW_SHAPES)
def test_nothing_but_the_shape_itself_counts_as_a_new_shape(asked: str) -> None:
    for shape in (*scenes.SHAPES, *scenes.NEW_SHAPES, *scenes.LOOKALIKES):
        for size in scenes.SIZES:
            drawn_as = one(shape=shape, size=size)
            found = score.score(draw.picture(drawn_as), one(shape=asked, size=size))
            assert found.shape == (shape == asked), (shape, size)


def test_one_wrong_thing_of_two_spoils_strict_and_halves_shape() -> None:
    _, wanted = drawn(30, 8)
    scene = next(s for s in wanted if len(s.things) == 2)
    first, second = scene.things
    other = next(shape for shape in scenes.SHAPES if shape != second.shape)
    wrong = replace(scene, things=(first, replace(second, shape=other)))
    result = score.score(draw.picture(wrong), scene)
    assert (result.shape, result.strict) == (0.5, 0.0)


def test_relations_are_told_from_their_opposites() -> None:
    _, wanted = drawn(60, 9)
    opposite = {**scenes.OPPOSITES, **{v: k for k, v in scenes.OPPOSITES.items()}}
    for scene in (s for s in wanted if len(s.things) == 2):
        assert score.score(draw.picture(scene), replace(scene, where=opposite[scene.where])).place == 0


def test_the_blueprint_style_is_told_from_ordinary_pictures() -> None:
    plain, wanted = drawn(20, 10)
    styled = [draw.picture(replace(scene, style=scenes.NEW_STYLE)) for scene in wanted]
    assert min(score.blueprint(picture) for picture in styled) > 0.9
    assert max(score.blueprint(picture) for picture in plain) < 0.1


def test_the_text_encoder_is_the_same_on_every_machine() -> None:
    rows = words.table(words.POSITIONS, 1)
    assert rows[0, :4].tolist() == [-0.96142578125, -0.82861328125, -0.336181640625, 0.27001953125]
    assert rows.float().std().item() == pytest.approx(0.7, rel=0.02)


def test_the_base_fits_into_twelve_megabytes() -> None:
    assert sum(file.stat().st_size for file in base.FOLDER.iterdir()) <= 12e6


def training(folder: Path, until: int) -> tuple[states.Run, torch.nn.Linear]:
    """A run of the toy trainer's own loop on a tiny layer, stopped after ``until`` of 6 steps."""
    layer = torch.nn.Linear(4, 4)
    torch.nn.init.eye_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    optimizer = states.Optimizer([layer.weight], [layer.bias])
    run = states.Run(folder / "run.safetensors", "tiny")
    stored = run.load()
    if stored is not None:
        layer.load_state_dict({name: stored[name] for name in ("weight", "bias")})
        optimizer.load(stored)
    for step in run.steps(until, lambda: {**layer.state_dict(), **optimizer.tensors()}, every=3):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        (layer(batch) - batch.flip(-1)).square().mean().backward()
        optimizer.step(states.cosine(step, 6, 0.1, warmup=2))
    return run, layer


def test_a_stopped_base_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    _, whole = training(tmp_path / "whole", 6)
    training(tmp_path / "parts", 3)
    run, parts = training(tmp_path / "parts", 6)
    assert run.step == 6
    assert torch.equal(whole.weight, parts.weight)
    assert torch.equal(whole.bias, parts.bias)


def test_a_base_training_by_another_recipe_is_not_taken_up(tmp_path: Path) -> None:
    run, _ = training(tmp_path, 3)
    with pytest.raises(states.OtherRecipeError, match="other settings"):
        states.Run(run.file, "other").load()
    recipes = {states.digest(1, "a"), states.digest(2, "a"), states.digest(1, torch.ones(2)), states.digest(np.ones(2))}
    assert len(recipes) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        ["--steps", "0"],
        ["--steps", "-3"],
        ["--resolution", "0"],
        ["--resolution", "64"],
        ["--dataset", ""],
        ["--dataset", "/"],
        ["--dataset", __file__],
        ["--checkpoint", str(Path(__file__).parent)],
        ["--checkpoint", "no such file"],
        ["--checkpoint", __file__],
        ["--checkpoint", "x" * 5000],
        ["--dataset", "x" * 5000],
        ["--steps", "9" * 5000],
    ],
)
def test_the_demo_refuses_what_cannot_work_before_it_starts(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.parse(wrong)
    message = capsys.readouterr().err
    assert wrong[0] in message
    assert len(message) < 2000


def test_the_demo_offers_a_linked_checkpoint_by_the_name_of_the_link(tmp_path: Path) -> None:
    (tmp_path / "9f86d08").write_bytes(b"weights")
    (tmp_path / "sd15.safetensors").symlink_to(tmp_path / "9f86d08")
    options = demo.parse(["--checkpoint", str(tmp_path / "sd15.safetensors")])
    assert demo.graph_options(options, "photos").checkpoint == "sd15.safetensors"


def test_demos_that_start_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    assert len({demo.new_folder(tmp_path) for _ in range(3)}) == 3
