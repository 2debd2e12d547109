"""A profile sets defaults; what is set by hand wins."""

from __future__ import annotations

from typing import get_args

import pytest

from lowvram_lora.config import CacheConfig, CacheProfile
from lowvram_lora.data.profiles import CachePlan, plan_of
from lowvram_lora.data.schedule import PrecisionSchedule
from lowvram_lora.errors import ConfigError
from lowvram_lora.units import GIB, MIB


def test_what_the_profiles_are() -> None:
    plans = {profile: plan_of(CacheConfig(profile=profile)) for profile in get_args(CacheProfile)}
    aggressive, minimal, balanced = plans["aggressive"], plans["minimal"], plans["balanced"]
    assert aggressive.ram_cache_bytes == 8 * GIB and aggressive.scales == (1.0, 0.75, 0.5)
    assert aggressive.schedule is not None
    assert all(aggressive.schedule.precision(0.4, step, 100) == "full" for step in range(100))
    assert any(aggressive.schedule.precision(0.39, step, 100) != "full" for step in range(100))
    assert minimal.encoding == "half" and minimal.scales == (1.0,) and not minimal.uses_scores
    assert balanced.encoding == "half" and balanced.predictive and balanced.uses_scores
    assert plans["disk only"] == CachePlan()


@pytest.mark.parametrize("profile", get_args(CacheProfile))
def test_what_is_set_by_hand_wins_in_every_profile(profile: CacheProfile) -> None:
    plan = plan_of(
        CacheConfig(
            profile=profile,
            ram_cache_mb=77,
            compression="high",
            scales="full, 3/4",
            dynamic_precision="on",
            half_below=0.1,
            full_above=0.5,
            predictive="off",
            disk_limit_gb=1.5,
        )
    )
    # "disk only" is a promise of its own.
    assert plan.ram_cache_bytes == (0 if profile == "disk only" else 77 * MIB)
    assert (plan.encoding, plan.scales, plan.predictive) == ("int8", (1.0, 0.75), False)
    assert plan.schedule == PrecisionSchedule(early_half_below=0.1, middle_half_below=0.1, middle_bands_below=0.5)
    assert plan.disk_limit_bytes == 3 * GIB // 2
    assert plan_of(CacheConfig(profile=profile, dynamic_precision="off")).schedule is None


def test_dynamic_precision_starts_with_the_usual_thresholds() -> None:
    assert plan_of(CacheConfig(dynamic_precision="on")).schedule == PrecisionSchedule()


@pytest.mark.parametrize("full_above", [0.0, 0.1])
def test_nothing_above_the_limit_of_full_precision_is_read_at_less(full_above: float) -> None:
    schedule = plan_of(CacheConfig(dynamic_precision="on", full_above=full_above)).schedule
    assert schedule is not None
    assert all(schedule.precision(full_above, step, 50) == "full" for step in range(50))


@pytest.mark.parametrize("profile", ["balanced", "aggressive"])
def test_a_threshold_set_by_hand_wins_over_the_profiles_other_one(profile: CacheProfile) -> None:
    schedule = plan_of(CacheConfig(profile=profile, dynamic_precision="on", half_below=0.9)).schedule
    assert schedule is not None
    assert [schedule.precision(0.89, step, 50) for step in (0, 25)] == ["half", "half"]
    with pytest.raises(ConfigError, match=r"half_below is 0\.9; it must be at most full_above, 0\.1"):
        CacheConfig(half_below=0.9, full_above=0.1)


@pytest.mark.parametrize("mib", [0, 512, 1024])
def test_older_workflows_name_their_ram_and_a_profile_and_keep_both(mib: int) -> None:
    assert plan_of(CacheConfig(ram_cache_mb=mib, profile="balanced")).ram_cache_bytes == mib * MIB
    assert plan_of(CacheConfig(ram_cache_mb=mib, profile="disk only")).ram_cache_bytes == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ram_cache_mb", -2),
        ("profile", "fast"),
        ("compression", "zip"),
        ("scales", "1/8"),
        ("dynamic_precision", "yes"),
        ("predictive", "maybe"),
        ("half_below", 1.5),
        ("full_above", -0.5),
        ("full_above", float("nan")),
        ("disk_limit_gb", -1.0),
    ],
)
def test_what_is_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        CacheConfig(**{name: value})
