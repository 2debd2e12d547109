"""The bench of the data side's techniques: what is equal in it, what is off by default, and what each acts on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowvram_lora.config import CacheConfig, SamplerConfig, TrainConfig
from lowvram_lora.data.draw import Draw
from lowvram_lora.data.encodings import unpack
from lowvram_lora.data.profiles import plan_of
from lowvram_lora.data.tiers import TieredCache
from tests.bench import _techniques, quality, sparse
from tests.bench._jobs import core_of
from tests.toyworld import studio, task, trainers
from tests.toyworld.techniques import OFF, WAYS, Way

PICTURES, EPOCHS, RATE = 16, 2, 2e-3
BUDGET_ALONE = "a budget on pictures of one size"
MEASURED = (
    OFF,
    "sparse batches",
    "adaptive resolution, cost 0.6",
    "token budget, cost 0.6",
    "dynamic precision",
    "local attention",
)


@pytest.fixture(scope="module")
def opened() -> studio.Studio:
    return studio.open_studio()


@pytest.fixture(scope="module")
def bench(pack: Any, opened: studio.Studio, tmp_path_factory: pytest.TempPathFactory) -> sparse.Bench:
    """The benchmark on few pictures, with one way more."""
    ways = {name: WAYS[name] for name in MEASURED} | {BUDGET_ALONE: Way(OFF, sampler={"adaptive_batch": True})}
    folder = tmp_path_factory.mktemp("techniques")
    return sparse.Bench(pack, opened, print, folder, ways, PICTURES, EPOCHS, count=2)


@pytest.fixture(scope="module")
def found(bench: sparse.Bench) -> dict[str, Any]:
    return bench.measured((1,))


@pytest.fixture
def outside_inference_mode(pack: Any) -> Iterator[None]:
    with pack.nodes._host.outside_inference_mode():
        yield


def value(found: dict[str, Any], way: str, measure: str) -> float:
    return float(found["ways"][way]["measures"][measure]["mean"])


def test_every_way_sees_as_many_pictures_each_as_often(found: dict[str, Any]) -> None:
    for way, row in found["ways"].items():
        assert row["times_seen"] == [EPOCHS]
        assert value(found, way, "samples") == PICTURES * EPOCHS


def test_each_way_differs_from_the_one_it_is_compared_with_in_one_technique() -> None:
    names = list(WAYS)
    for name, way in WAYS.items():
        if name in (OFF, "all together"):
            continue
        other = WAYS[way.against]
        assert names.index(way.against) < names.index(name)
        differing = [
            part for part in ("sampler", "cache", "train") if {**getattr(way, part)} != {**getattr(other, part)}
        ]
        assert len(differing) == 1


def test_every_technique_is_off_by_default() -> None:
    assert WAYS[OFF] == Way()
    sampler, train, plan = SamplerConfig(), TrainConfig(), plan_of(CacheConfig())
    assert (sampler.strategy, sampler.adaptive_batch) == ("shuffle", False)
    assert (train.dynamic_text, train.attention_limit) == (False, None)
    assert (plan.schedule, plan.scales) == (None, (1.0,))


@pytest.mark.usefixtures("outside_inference_mode")
def test_with_every_technique_off_it_is_the_judges_trainer_bit_for_bit(
    pack: Any, bench: sparse.Bench, tmp_path: Path
) -> None:
    drawn = bench.lesson.drawn(WAYS[OFF], RATE, 1, tmp_path, EPOCHS)
    cache = drawn.job.recipe.cache
    tiers = TieredCache(cache)
    samples = [Draw(entry) for entry in range(len(cache.entries))]
    latents = [tiers.latents(sample) for sample in samples]
    texts = [unpack(tiers.conditioning(sample)) for sample in samples]
    asked = task.Task(trainers.torch.stack(latents), texts, PICTURES * EPOCHS)
    record = trainers.ran(drawn.job).record
    judged = trainers.ours_off(pack, asked, RATE, 1)
    assert trainers.differing(task.Taught(record.lora, record.losses, 0.0), judged) == []


def test_a_budget_on_pictures_of_one_size_changes_no_bit(found: dict[str, Any]) -> None:
    assert found["compared"][BUDGET_ALONE]["same_bits"]
    assert not found["compared"]["sparse batches"]["same_bits"]


def test_smaller_pictures_are_fewer_tokens_and_a_budget_makes_fewer_steps_of_them(found: dict[str, Any]) -> None:
    plain, sized, budgeted = "sparse batches", "adaptive resolution, cost 0.6", "token budget, cost 0.6"
    assert set(found["ways"][plain]["scales"]) == {"1.0"}
    assert "0.5" in found["ways"][sized]["scales"]
    assert value(found, sized, "tokens_a_step") < value(found, plain, "tokens_a_step")
    assert value(found, budgeted, "steps") <= value(found, sized, "steps")


def test_dynamic_precision_takes_no_device_byte_off_and_reads_fewer_from_ram(found: dict[str, Any]) -> None:
    for held in ("device_bytes_planned", "device_bytes_most", "device_bytes_mean"):
        assert value(found, "dynamic precision", held) == value(found, OFF, held)
    assert value(found, "dynamic precision", "latent_bytes_a_draw") < value(found, OFF, "latent_bytes_a_draw")
    assert len(found["ways"]["dynamic precision"]["precisions"]) > 1


def test_a_plan_holds_room_for_the_steps_that_there_are(found: dict[str, Any]) -> None:
    for way in found["ways"]:
        held = [value(found, way, f"device_bytes_{what}") for what in ("mean", "most", "planned")]
        assert held == sorted(held)


def test_the_report_says_that_local_attention_is_another_function(found: dict[str, Any]) -> None:
    assert any("Local attention is on" in note for note in found["ways"]["local attention"]["notes"])
    assert found["ways"][OFF]["notes"] == []


def test_the_result_is_plain_data_and_a_table(found: dict[str, Any]) -> None:
    assert json.loads(json.dumps(quality.finite(found), allow_nan=False))
    text = sparse.table({"toy": found, "seconds": 1.0})
    assert all(name in text for name in (*MEASURED, BUDGET_ALONE))


def test_a_mark_is_worse_for_every_seed_only_if_it_is() -> None:
    usual = {"step_s": [1.0, 1.0], "picture_s": [1.0, 1.0], "tokens_a_step": [8.0, 8.0]}
    usual |= {"device_bytes_planned": [4.0, 4.0], "device_bytes_mean": [4.0, 4.0]}
    marks = {"loss": [0.5, 0.5], "shape": [0.5, 0.5], "strict": [0.5, 0.5], "drift": [0.0, 0.0]}
    measures = {
        OFF: usual | marks,
        "on": usual | marks | {"loss": [0.6, 0.7], "shape": [0.4, 0.6], "drift": [-0.1, -0.2]},
    }
    assert sparse.compared(measures, "on", OFF)["worse_for_every_seed"] == ["loss"]


def test_at_full_size_a_budget_of_tokens_holds_more_of_what_is_smaller(pack: Any) -> None:
    held = dict(_techniques.budgeted(core_of(pack)))
    assert all(count > _techniques.BATCH for count in held.values())
    assert all(count * (side * side + 77) <= _techniques.BATCH * (128 * 128 + 77) for side, count in held.items())
    assert held[64] > held[96]
