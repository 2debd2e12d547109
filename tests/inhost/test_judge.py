"""The judge of quality: what it is fair about, what it finds fault with, and its quick verdict on the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowvram_lora.adapters.targets import select
from lowvram_lora.training import objective
from lowvram_lora.training.prepare import samples_of
from tests.bench import quality
from tests.toyworld import judge, reference, studio, task, trainers, verdict

SHORT = 3 * task.BATCH
RATE = 2e-3


@pytest.fixture(scope="module")
def opened() -> studio.Studio:
    return studio.open_studio()


@pytest.fixture(scope="module")
def lesson(opened: studio.Studio) -> task.Task:
    return task.task(opened, quality.CONCEPT, SHORT)


@pytest.fixture(scope="module")
def taught(pack: Any, lesson: task.Task) -> Callable[[str], task.Taught]:
    """What each trainer gives, trained on first use."""
    known: dict[str, task.Taught] = {}
    bench = quality.Bench(pack, None, print)

    def of(name: str) -> task.Taught:
        if name not in known:
            known[name] = bench.train(name, lesson, RATE, 1)
        return known[name]

    return of


@pytest.mark.parametrize("name", ["ours_on", "ours_off", "reference", "native"])
def test_the_hosts_loader_takes_all_that_a_trainer_gives(
    opened: studio.Studio, taught: Callable[[str], task.Taught], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    import comfy.sd

    given = taught(name)
    model = comfy.sd.load_lora_for_models(opened.model, None, given.lora, 1.0, 0.0)[0]
    assert not [record for record in caplog.records if "not loaded" in record.message.lower()]
    assert len(model.patches) >= 13
    # Every trainer sees as many pictures.
    assert len(given.losses) == (SHORT if name == "native" else SHORT // task.BATCH)
    assert any(tensor.any() for key, tensor in given.lora.items() if "lora_up" in key or "lora_B" in key)


def test_the_plain_loop_adapts_the_layers_that_ours_does(lesson: task.Task) -> None:
    network = task.fresh_model().model.diffusion_model
    assert reference.targets(network) == list(select(network, task.TARGETS))


def test_the_plain_loop_has_our_losses_when_it_is_given_our_draws(
    pack: Any, lesson: task.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = replace(lesson, samples=10 * task.BATCH)
    ours = trainers.ours_off(pack, longer, RATE, 1)
    monkeypatch.setattr(reference, "batches", lambda *_: our_draws(pack, longer, tmp_path, 1))
    plain = reference.train(longer, RATE, 1)
    assert plain.losses == pytest.approx(ours.losses, rel=1e-4)
    assert len(set(ours.losses)) == 10


def our_draws(pack: Any, asked: task.Task, folder: Path, seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """What our trainer draws for each step."""
    job = trainers.job_of(pack, asked, RATE, seed, folder)
    samples = samples_of(job)
    for step in range(job.config.steps):
        (batch,) = samples.window(step, 1)
        generator = objective.generator_for(seed, step, 0)
        sigmas = objective.draw_sigmas(job.denoiser.sigmas, len(batch), generator)
        latents = job.denoiser.scale_latents(torch.stack([samples.latents(draw) for draw in batch]))
        noise = objective.draw_noise(latents, generator)
        texts = [asked.texts[int(job.recipe.cache.text_key(draw)[2:], 16)][0] for draw in batch]
        context = torch.cat([text for text, _ in texts])
        yield latents, noise, sigmas, context, torch.cat([extra["pooled_output"] for _, extra in texts])


def test_the_exact_techniques_change_no_bit(taught: Callable[[str], task.Taught]) -> None:
    assert trainers.differing(taught("ours_exact"), taught("ours_off")) == []


def test_all_techniques_together_change_sums_by_a_rounding(taught: Callable[[str], task.Taught]) -> None:
    assert 0 < trainers.loss_distance(taught("ours_on"), taught("ours_off")) < verdict.LOSS_TOLERANCE


def test_each_technique_takes_device_bytes_off(pack: Any, lesson: task.Task) -> None:
    ways = (trainers.everything, trainers.exact, trainers.nothing)
    on, exact, off = (trainers.device_bytes(pack, lesson, way) for way in ways)
    assert on < exact < off <= reference.live_bytes(lesson)


def test_a_training_by_the_hosts_node_leaves_the_base_as_it_was(
    opened: studio.Studio, taught: Callable[[str], task.Taught]
) -> None:
    before = opened.draw(["a red circle at the top on white"], seed=3)[0]
    taught("native")
    assert (opened.draw(["a red circle at the top on white"], seed=3)[0] == before).all()


def numbers(**changes: Any) -> dict[str, dict[str, list[float]]]:
    """Marks of three seeds, the same for every trainer but for what ``changes`` say of ours_on."""
    usual = {
        "loss": [0.5, 0.51, 0.52],
        "shape": [0.8, 0.85, 0.9],
        "strict": [0.7, 0.7, 0.75],
        "drift": [0.0, 0.02, 0.04],
    }
    return {name: dict(usual) for name in ("ours_off", "reference", "native")} | {"ours_on": usual | changes}


def test_marks_within_the_spread_are_no_fault() -> None:
    assert verdict.problems(numbers(loss=[0.515, 0.52, 0.525], shape=[0.76, 0.8, 0.82])) == []


def test_an_unsteady_trainer_is_not_excused_by_its_own_spread() -> None:
    sentences = verdict.problems(numbers(shape=[0.2, 0.9, 0.9]))
    assert len(sentences) == 3
    assert all("ours_on is behind" in sentence and "0.1000 is allowed" in sentence for sentence in sentences)


def test_one_picture_more_or_less_is_no_difference_where_the_seeds_agree() -> None:
    agreed = numbers(drift=[verdict.PICTURE * 0.9] * 3)
    for name in ("ours_off", "reference", "native"):
        agreed[name]["drift"] = [0.0] * 3
    assert verdict.problems(agreed) == []
    agreed["ours_on"]["drift"] = [verdict.PICTURE * 1.1] * 3
    assert len(verdict.problems(agreed)) == 3


@pytest.mark.parametrize(
    ("measure", "fair", "behind"),
    [("loss", 1.02, 1.04), ("shape", 0.76, 0.74), ("strict", 0.76, 0.74), ("drift", 0.09, 0.11)],
)
def test_with_one_seed_fixed_margins_stand_for_the_spread(measure: str, fair: float, behind: float) -> None:
    usual = {"loss": [1.0], "shape": [0.9], "strict": [0.9], "drift": [0.0]}
    for value, faults in ((fair, 0), (behind, 3)):
        measures = {name: dict(usual) for name in ("ours_off", "reference", "native")}
        measures["ours_on"] = {**usual, measure: [value]}
        assert len(verdict.problems(measures)) == faults


def test_who_has_not_learned_or_has_forgotten_is_named() -> None:
    base = {"loss": 0.9, "shape": 0.0, "strict": 0.0, "drift": 0.0, "old_strict": 0.9}
    assert verdict.unlearned(numbers(), base) == []
    assert (
        "reference has not learned"
        in verdict.unlearned({**numbers(), "reference": numbers(shape=[0.1] * 3)["ours_on"]}, base)[0]
    )
    assert "loss" in verdict.unlearned(numbers(loss=[0.95] * 3), base)[0]
    assert "forgotten 0.20" in verdict.unlearned(numbers(drift=[0.2] * 3), base)[0]
    assert len(verdict.unlearned(numbers(loss=[float("nan")] * 3), base)) == 1
    assert "native has not learned" in verdict.unlearned({"native": numbers(strict=[0.1] * 3)["ours_on"]}, base)[0]
    assert "old right" in verdict.unlearned(numbers(), {**base, "old_strict": 0.1})[0]


def mark(shape: float, drift: float) -> judge.Marks:
    return judge.Marks(loss=0.5, shape=shape, strict=shape, drift=drift)


def sweep_of(by_rate: dict[float, list[judge.Marks]]) -> tuple[float, dict[float, int]]:
    """The rate that a sweep takes where each has these marks by seed, and how many seeds it tried for each."""
    rate, marks = quality.swept(lambda rate, seed: by_rate[rate][seed % len(by_rate[rate])], list(by_rate))
    return rate, {rate: len(each) for rate, each in marks.items()}


def test_a_sweep_takes_the_rate_worth_most_of_those_that_learned() -> None:
    assert sweep_of({1e-3: [mark(0.0, -0.3)], 2e-3: [mark(0.7, 0.05)], 4e-3: [mark(0.8, 0.4)]})[0] == 2e-3
    assert sweep_of({1e-3: [mark(0.1, 0.05)], 2e-3: [mark(0.2, 0.5)]})[0] == 1e-3


def test_a_sweep_tries_rates_that_one_seed_cannot_tell_apart_with_every_seed() -> None:
    close = mark(0.9 - 0.9 * quality.ALIKE, 0.0)
    lucky = [mark(0.9, 0.0), mark(0.6, 0.0), mark(0.6, 0.0)]
    assert sweep_of({1e-3: lucky, 2e-3: [close], 4e-3: [mark(0.9 - 1.1 * quality.ALIKE, 0.0)]}) == (
        2e-3,
        {1e-3: 3, 2e-3: 3, 4e-3: 1},
    )


def test_of_rates_worth_the_same_a_sweep_takes_the_one_with_the_lower_loss() -> None:
    better = replace(mark(0.9, 0.0), loss=0.4)
    assert sweep_of({1e-3: [mark(0.9, 0.0)], 2e-3: [better]})[0] == 2e-3
    assert sweep_of({1e-3: [better], 2e-3: [mark(0.9, 0.0)]})[0] == 1e-3


def test_a_sweep_goes_up_until_two_rates_are_worth_clearly_less() -> None:
    marks = {1e-3: [mark(0.0, 0.0)], 2e-3: [mark(0.0, 0.2)], 4e-3: [mark(0.0, 0.3)], 8e-3: [mark(0.8, 0.0)]}
    assert sweep_of({**marks, 1.6e-2: [mark(0.5, 0.0)], 3.2e-2: [mark(0.1, 0.0)], 6.4e-2: [mark(0.9, 0.0)]}) == (
        8e-3,
        {1e-3: 1, 2e-3: 1, 4e-3: 1, 8e-3: 3, 1.6e-2: 1, 3.2e-2: 1},
    )


def test_a_sweep_without_an_answer_is_a_fault() -> None:
    marks = {"0.001": [mark(0.1, 0)], "0.002": [mark(0.8, 0)], "0.004": [mark(0.9, 0)]}
    found = {"marks": {rate: [asdict(each) for each in every] for rate, every in marks.items()}}
    grid = (1e-3, 2e-3, 4e-3)
    assert quality.unsettled({"ours": {"rate": 2e-3, **found}}, grid) == []
    assert "an end of the grid" in quality.unsettled({"ours": {"rate": 4e-3, **found}}, grid)[0]
    assert len(quality.unsettled({"ours": {"rate": 1e-3, **found}}, grid)) == 2


@pytest.mark.parametrize(
    ("measure", "values"),
    [("loss", [0.55, 0.55, 0.56]), ("shape", [0.6, 0.6, 0.6]), ("strict", [0.5] * 3), ("drift", [0.1, 0.1, 0.1])],
)
def test_a_measure_worse_than_the_spread_is_named_for_each_who_is_better(measure: str, values: list[float]) -> None:
    sentences = verdict.problems(numbers(**{measure: values}))
    names = ("reference", "native", "ours_off")
    assert [name in sentence for name, sentence in zip(names, sentences, strict=True)] == [True] * 3
    assert all(sentence.startswith("ours_on is behind") and measure in sentence for sentence in sentences)


def test_better_marks_are_no_fault() -> None:
    assert verdict.problems(numbers(loss=[0.1] * 3, shape=[1.0] * 3, strict=[1.0] * 3, drift=[-0.2] * 3)) == []


def test_techniques_that_change_what_is_learned_are_named() -> None:
    assert verdict.unequal([], 9e-6) == []
    assert "joint" in verdict.unequal(["joint"], 0.0)[0]
    assert "2.0e-05" in verdict.unequal([], 2e-5)[0]
    assert verdict.unequal([], float("nan"))
    assert verdict.distance([0.1, 0.2], [0.1, 0.25]) == pytest.approx(0.2)
    assert verdict.unequal([], verdict.distance([0.1, float("nan")], [0.1, 0.1]))


def test_what_is_not_a_number_or_not_there_is_named() -> None:
    nan = float("nan")
    real = {"ours_on": {"loss": [0.1, 0.2], "shape": [0.5, 0.5]}}
    assert verdict.unreal(real) == []
    assert len(verdict.unreal({**real, "native": {"loss": [0.1, nan]}})) == 1
    assert verdict.below_floor([0.9, nan, 0.9], 0.7)
    assert verdict.below_floor([], 0.7)
    assert quality.finite({"a": [nan, 1.0], "b": (2, float("inf"))}) == {"a": [None, 1.0], "b": [2, None]}
    whole = task.Taught({"a": torch.zeros(2), "b": torch.ones(2)}, (1.0, 2.0), 0.1)
    assert trainers.differing(whole, whole) == []
    assert trainers.differing(replace(whole, lora={}), whole) == ["a", "b"]
    assert trainers.differing(replace(whole, lora={**whole.lora, "a": -torch.zeros(2)}), whole) == ["a"]
    assert verdict.unequal([], trainers.loss_distance(replace(whole, losses=(1.0, nan)), whole))
    assert verdict.unequal([], trainers.loss_distance(replace(whole, losses=(1.0,)), whole))
    assert verdict.unequal([], trainers.loss_distance(whole, replace(whole, losses=(1.0, 0.0))))


def test_a_step_that_takes_more_than_the_plain_loops_is_named() -> None:
    assert verdict.heavier({"ours_on": 5, "ours_off": 7, "reference": 7, "native": None}) == []
    assert "ours_off takes 8" in verdict.heavier({"ours_on": 5, "ours_off": 8, "reference": 7, "native": None})[0]
    assert "ours_on takes 7" in verdict.heavier({"ours_on": 7, "ours_off": 7, "reference": 7, "native": None})[0]
    assert "not known" in verdict.heavier({"ours_on": None, "ours_off": 7, "reference": 7, "native": None})[0]


def test_a_shape_score_below_the_floor_is_named() -> None:
    assert verdict.below_floor([0.7, 0.8], 0.7) == []
    assert "0.60" in verdict.below_floor([0.6, 0.8], 0.7)[0]


@pytest.mark.parametrize(("found", "status"), [([], 0), (["ours_on is behind reference."], 1)])
def test_a_fault_is_printed_and_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: list[str], status: int
) -> None:
    monkeypatch.setattr(quality._full_size, "enter_host", lambda: None)
    monkeypatch.setattr(quality.studio, "open_studio", lambda: None)
    monkeypatch.setattr(quality.Bench, "judged", lambda *_: {"problems": found})
    assert quality.main(["--quick", "--json"]) == status
    assert all(sentence in capsys.readouterr().out for sentence in found)


@pytest.fixture(scope="module")
def quick(pack: Any, opened: studio.Studio) -> dict[str, Any]:
    """What ``python3 dev.py bench quality --quick`` finds."""
    return quality.Bench(pack, opened, print).judged(quality.CONCEPT, quality.SEEDS[:1], quality.RATES)


def test_a_quick_verdict_finds_no_fault_with_our_trainer(quick: dict[str, Any]) -> None:
    assert quick["problems"] == []


@pytest.mark.parametrize("name", verdict.OURS)
def test_a_lora_of_200_steps_draws_a_shape_that_the_base_cannot_draw_and_keeps_the_others(
    quick: dict[str, Any], name: str
) -> None:
    marks = {measure: quick["trainers"][name][measure]["mean"] for measure in ("shape", "drift")}
    assert quick["samples"] == 200 * task.BATCH
    assert quick["base"]["shape"] <= 0.2
    assert marks["shape"] >= quick["base"]["shape"] + 0.4
    assert marks["drift"] <= 0.1


def test_more_strength_draws_the_shape_more_often_and_none_is_the_base(pack: Any, opened: studio.Studio) -> None:
    import comfy.sd

    bench = quality.Bench(pack, opened, print, count=quality.SWEEP_COUNT)
    asked, marking = bench.asked(quality.CONCEPT)
    lora = bench.train("ours_off", asked, quality.RATES["ours"], 0).lora
    half, full = (marking.marks(lora, strength).shape for strength in (0.5, 1.0))
    assert marking.base_marks().shape <= half < full
    captions = [scene.caption() for scene in marking.new[:4]]
    off = comfy.sd.load_lora_for_models(opened.model, None, lora, 0.0, 0.0)[0]
    pairs = zip(opened.draw(captions, 3, off), opened.draw(captions, 3), strict=True)
    assert all((one == other).all() for one, other in pairs)
