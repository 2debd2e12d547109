"""Dynamic precision: which encoding a sample is read at."""

from __future__ import annotations

import math

import pytest

from lowvram_lora.data.schedule import PrecisionSchedule
from lowvram_lora.errors import ConfigError


def at(done: float, score: float | None) -> str:
    return PrecisionSchedule().precision(score, round(done * 1000), 1000)


def test_the_first_fifth_reads_samples_below_0_3_at_half() -> None:
    for done in (0.0, 0.1, 0.199):
        assert [at(done, score) for score in (0.0, 0.29, 0.3, 0.5, 1.0)] == ["half", "half", "full", "full", "full"]


def test_the_middle_reads_samples_below_0_2_at_half_and_below_0_6_as_bands() -> None:
    for done in (0.2, 0.5, 0.799):
        got = [at(done, score) for score in (0.0, 0.19, 0.2, 0.59, 0.6, 1.0)]
        assert got == ["half", "half", "bands", "bands", "full", "full"]


def test_the_last_fifth_reads_all_in_full() -> None:
    assert {at(done, score) for done in (0.8, 0.9, 0.999, 1.0) for score in (0.0, 0.25, 0.5, 1.0)} == {"full"}


@pytest.mark.parametrize("done", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("score", [None, math.nan])
def test_a_sample_without_a_score_is_read_in_full(done: float, score: float | None) -> None:
    assert at(done, score) == "full"


@pytest.mark.parametrize("num_steps", [5, 10, 15, 35, 55, 1005])
def test_a_fifth_is_exactly_a_fifth_of_the_steps(num_steps: int) -> None:
    names = [PrecisionSchedule().precision(0.25, step, num_steps) for step in range(num_steps)]
    fifth = num_steps // 5
    assert names == ["half"] * fifth + ["bands"] * 3 * fifth + ["full"] * fifth


def test_a_run_of_one_step_has_an_answer() -> None:
    assert PrecisionSchedule().precision(0.1, 0, 1) == "half"


def test_the_thresholds_are_the_users() -> None:
    above = PrecisionSchedule(early_half_below=0.4, middle_half_below=0.4, middle_bands_below=0.4)
    for step in range(100):
        assert above.precision(0.4, step, 100) == "full"
    always = PrecisionSchedule(early_until=0.0, late_from=1.0, middle_half_below=1.0, middle_bands_below=1.0)
    assert {always.precision(0.99, step, 100) for step in range(100)} == {"half"}


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"early_until": -0.1}, "early_until"),
        ({"early_half_below": math.nan}, "early_half_below"),
        ({"middle_bands_below": 1.5}, "middle_bands_below"),
        ({"early_until": 0.9}, "late_from"),
        ({"middle_half_below": 0.7}, "middle_bands_below"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused_by_name(wrong: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PrecisionSchedule(**wrong)
    assert caught.value.field == field
