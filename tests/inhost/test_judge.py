"""The judge of quality: what it is fair about, what it finds fault with, and its quick verdict on the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowvram_lora.adapters.targets import select
from lowvram_lora.training import objective
from lowvram_lora.training.prepare import samples_of
from tests.bench import quality
from tests.toyworld import reference, studio, task, trainers, verdict

SHORT = 3 * task.BATCH
RATE = 2e-3


@pytest.fixture(scope="module")
def opened() -> studio.Studio:
    return studio.open_studio()


@pytest.fixture(scope="module")
def star(opened: studio.Studio) -> task.Task:
    return task.task(opened, "star", SHORT)


@pytest.fixture(scope="module")
def taught(pack: Any, star: task.Task) -> Callable[[str], task.Taught]:
    """What each trainer gives, trained on first use."""
    known: dict[str, task.Taught] = {}
    bench = quality.Bench(pack, None, print)

    def of(name: str) -> task.Taught:
        if name not in known:
            known[name] = bench.train(name, star, RATE, 1)
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


def test_the_plain_loop_adapts_the_layers_that_ours_does(star: task.Task) -> None:
    network = task.fresh_model().model.diffusion_model
    plain = [name for name, _ in network.named_modules() if reference.LAYER.fullmatch(name)]
    assert plain == list(select(network, task.TARGETS))


def test_the_plain_loop_has_our_losses_when_it_is_given_our_draws(
    pack: Any, star: task.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = replace(star, samples=10 * task.BATCH)
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


def test_each_technique_takes_device_bytes_off(pack: Any, star: task.Task) -> None:
    ways = (trainers.everything, trainers.exact, trainers.nothing)
    on, exact, off = (trainers.device_bytes(pack, star, way) for way in ways)
    assert on < exact < off <= reference.live_bytes(star)


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


@pytest.mark.parametrize(
    ("measure", "values"),
    [("loss", [0.55, 0.55, 0.56]), ("shape", [0.6, 0.6, 0.6]), ("strict", [0.5] * 3), ("drift", [0.1, 0.1, 0.1])],
)
def test_a_measure_worse_than_the_spread_is_named_for_each_who_is_better(measure: str, values: list[float]) -> None:
    sentences = verdict.problems(numbers(**{measure: values}))
    assert [name in sentence for name, sentence in zip(("reference", "native"), sentences, strict=True)] == [True] * 2
    assert all(sentence.startswith("ours_on is behind") and measure in sentence for sentence in sentences)


def test_better_marks_are_no_fault() -> None:
    assert verdict.problems(numbers(loss=[0.1] * 3, shape=[1.0] * 3, strict=[1.0] * 3, drift=[-0.2] * 3)) == []


def test_techniques_that_change_what_is_learned_are_named() -> None:
    assert verdict.unequal([], 9e-6) == []
    assert "joint" in verdict.unequal(["joint"], 0.0)[0]
    assert "2.0e-05" in verdict.unequal([], 2e-5)[0]
    assert verdict.unequal([], float("nan"))


def test_what_is_not_a_number_or_not_there_is_named() -> None:
    nan = float("nan")
    real = {"ours_on": {"loss": [0.1, 0.2], "shape": [0.5, 0.5]}}
    assert verdict.unreal(real) == []
    assert len(verdict.unreal({**real, "native": {"loss": [0.1, nan]}})) == 1
    assert verdict.below_floor([0.9, nan, 0.9], 0.7)
    whole = task.Taught({"a": torch.zeros(2), "b": torch.ones(2)}, (1.0, 2.0), 0.1)
    assert trainers.differing(whole, whole) == []
    assert trainers.differing(replace(whole, lora={}), whole) == ["a", "b"]
    assert trainers.differing(replace(whole, lora={**whole.lora, "a": -torch.zeros(2)}), whole) == ["a"]
    assert verdict.unequal([], trainers.loss_distance(replace(whole, losses=(1.0, nan)), whole))


def test_a_step_that_takes_more_than_the_plain_loops_is_named() -> None:
    assert verdict.heavier({"ours_on": 5, "ours_off": 7, "reference": 7, "native": None}) == []
    assert "ours_off takes 8" in verdict.heavier({"ours_on": 5, "ours_off": 8, "reference": 7, "native": None})[0]


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


def test_a_quick_verdict_finds_no_fault_with_our_trainer(pack: Any, opened: studio.Studio) -> None:
    few = quality.Bench(pack, opened, print, samples=20 * task.BATCH, count=16)
    result = few.judged("heart", quality.SEEDS[:1], quality.RATES)
    assert result["problems"] == []
    assert result["base"]["shape"] <= 0.2
    assert result["trainers"]["ours_on"]["shape"]["mean"] >= quality.SHAPE_FLOOR
