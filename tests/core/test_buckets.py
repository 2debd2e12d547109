import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowvram_lora.config import DataConfig
from lowvram_lora.data.buckets import MAX_ASPECT, bucket_for, buckets_of, is_upscaled, kept_fraction
from lowvram_lora.errors import ConfigError

SIDES = st.integers(1, 12000)


@settings(deadline=None)
@given(SIDES, SIDES, st.integers(64, 2048), st.sampled_from(range(8, 65, 8)))
def test_every_size_gets_a_bucket_within_the_limits(height: int, width: int, resolution: int, step: int) -> None:
    bucket = bucket_for((height, width), resolution, step)
    assert bucket[0] * bucket[1] <= resolution**2
    assert min(bucket) >= step
    assert bucket[0] % step == bucket[1] % step == 0
    assert max(bucket) <= MAX_ASPECT * min(bucket)


def test_limits_between_two_steps_are_met_by_whole_steps_and_near_equal_shapes_share_a_bucket() -> None:
    """a30"""
    buckets = buckets_of(DataConfig(folder="", resolution=512, min_side=300, max_side=700))
    found = {buckets.for_image((1000, width)) for width in (400, 1000, 2500)}
    assert len(found) == 3
    assert all(side % 64 == 0 and 300 <= side <= 700 for bucket in found for side in bucket)
    square = bucket_for((5000, 5000), 512, 64)
    assert bucket_for((5000, 5002), 512, 64) == bucket_for((5002, 5000), 512, 64) == square


@settings(deadline=None)
@given(SIDES, SIDES, st.sampled_from([512, 768, 1000, 1024]))
def test_a_turned_image_gets_the_turned_bucket(height: int, width: int, resolution: int) -> None:
    bucket = bucket_for((height, width), resolution, 64)
    assert bucket_for((width, height), resolution, 64) == (bucket[1], bucket[0])


@settings(deadline=None)
@given(st.integers(100, 4000), st.floats(1.0, 2.5))
def test_no_bucket_of_the_same_rules_is_nearer(height: int, aspect: float) -> None:
    image = (height, round(height * aspect))
    chosen = bucket_for(image, 512, 64)
    widest = {h: max(w for w in range(64, 1025, 64) if h * w <= 512**2 and w <= 3 * h) for h in range(64, 513, 64)}

    def distance(bucket: tuple[int, int]) -> float:
        return abs(math.log(bucket[1] / bucket[0]) - math.log(image[1] / image[0]))

    assert distance(chosen) <= min(distance(bucket) for bucket in widest.items()) + 1e-12


def test_resolution_512_has_several_buckets_and_long_pictures_are_not_forced_into_2_to_1() -> None:
    """a29: 2000x200 stops at the stated 3:1, not at the square."""
    chosen = {bucket_for((1000, width), 512, 64) for width in range(350, 3000, 50)}
    assert len(chosen) >= 6
    assert bucket_for((200, 2000), 512, 64) == (256, 768)
    assert kept_fraction((200, 2000), (256, 768)) == pytest.approx(0.3)


def test_known_buckets() -> None:
    assert bucket_for((1024, 1024), 512, 64) == (512, 512)
    assert bucket_for((3000, 2000), 1024, 64) == (1216, 832)
    assert bucket_for((300, 300), 500, 64) == (448, 448)


def test_upscaling_is_told() -> None:
    assert is_upscaled((500, 600), (512, 512))
    assert not is_upscaled((512, 600), (512, 512))


def test_a_step_above_the_resolution_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        bucket_for((10, 10), 64, 128)
    assert caught.value.field == "bucket_step"


@settings(deadline=None)
@given(SIDES, SIDES, st.sampled_from([256, 512, 1000]), st.sampled_from([8, 32, 64]), st.sampled_from([1.0, 2.0, 3.0]))
def test_without_upscaling_no_bucket_is_larger_than_its_image(
    height: int, width: int, resolution: int, step: int, max_aspect: float
) -> None:
    options = {"folder": "", "resolution": resolution, "bucket_step": step, "max_aspect": max_aspect}
    bucket = buckets_of(DataConfig(**options, upscale=False)).for_image((height, width))
    if bucket is None:
        assert min(height, width) < step
        return
    assert not is_upscaled((height, width), bucket)
    assert bucket[0] % step == bucket[1] % step == 0
    assert bucket[0] * bucket[1] <= resolution**2
    assert max(bucket) <= max_aspect * min(bucket)
    normal = bucket_for((height, width), resolution, step, max_aspect)
    if not is_upscaled((height, width), normal):
        assert bucket == normal


@settings(deadline=None)
@given(SIDES, SIDES, st.integers(0, 512), st.integers(512, 1024))
def test_every_bucket_keeps_the_limits_of_its_sides(height: int, width: int, smallest: int, largest: int) -> None:
    config = DataConfig(folder="", resolution=512, min_side=smallest, max_side=largest)
    bucket = buckets_of(config).for_image((height, width))
    assert bucket is not None
    assert smallest <= min(bucket) <= max(bucket) <= largest
