import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowvram_lora.data.complexity import count_words
from lowvram_lora.data.features import text_features, visual_features
from lowvram_lora.data.words import words

SIZES = st.integers(1, 40)


def latents(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(SIZES, SIZES, st.sampled_from([(4, 4), (16, 4), (32, 2), (128, 1)]))
def test_visual_features_are_torchs_average_pool(height: int, width: int, kind: tuple[int, int]) -> None:
    channels, grid = kind
    picture = latents(channels, height, width, seed=height * 100 + width)
    expected = torch.nn.functional.adaptive_avg_pool2d(picture.double(), grid).flatten()
    found = visual_features(picture)
    assert found.dtype == np.float32
    # Values count in steps of 2^-16, so the whole is off by half a step a cell, and once more through its length.
    atol = 2 * 2.0**-17 * len(expected) ** 0.5 / float(expected.norm()) + 1e-6
    np.testing.assert_allclose(found, (expected / expected.norm()).numpy(), rtol=0, atol=atol)
    assert np.linalg.norm(found) == pytest.approx(1.0, abs=1e-6)


def test_pictures_of_all_shapes_compare_and_frames_are_averaged() -> None:
    tall, wide = visual_features(latents(16, 72, 40)), visual_features(latents(16, 40, 72))
    assert tall.shape == wide.shape == (256,)
    clip = latents(16, 5, 24, 32)
    np.testing.assert_allclose(visual_features(clip), visual_features(clip.mean(dim=1)), atol=1e-4)


def test_visual_features_do_not_depend_on_the_order_of_sums() -> None:
    """Whole numbers are added: a picture turned by a half has the same cells turned by a half, bit for bit."""
    picture = latents(4, 64, 48)
    turned = visual_features(picture.flip(1, 2)).reshape(4, 4, 4)
    assert np.array_equal(turned[:, ::-1, ::-1], visual_features(picture).reshape(4, 4, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_type_is_read(dtype: torch.dtype) -> None:
    picture = latents(4, 16, 16).to(dtype)
    np.testing.assert_allclose(visual_features(picture), visual_features(picture.float()), atol=1e-6)


def test_latents_without_a_direction_still_have_length_one() -> None:
    assert np.linalg.norm(visual_features(torch.zeros(4, 8, 8))) == pytest.approx(1.0)


def test_a_scaled_down_picture_is_near_its_original_and_another_is_not() -> None:
    picture = torch.nn.functional.interpolate(latents(1, 16, 6, 6), size=(64, 64), mode="bilinear")
    small = torch.nn.functional.interpolate(picture, size=(32, 32), mode="area")
    other = torch.nn.functional.interpolate(latents(1, 16, 6, 6, seed=1), size=(64, 64), mode="bilinear")
    original, scaled, different = (visual_features(each[0]) for each in (picture, small, other))
    assert original @ scaled > 0.99
    assert original @ different < 0.5


def test_order_case_and_width_of_letters_do_not_matter() -> None:
    caption = text_features("A red cat, on a MAT")
    assert np.array_equal(caption, text_features("on a mat a Red ＣＡＴ"))
    assert not np.array_equal(caption, text_features("a red cat on a hat"))


def test_captions_are_nearer_the_more_words_they_share() -> None:
    cat, mat, other = map(text_features, ("红色的猫在垫子上", "红色的猫在床上", "蓝天白云"))
    assert cat @ mat > cat @ other
    assert cat @ cat == pytest.approx(1.0)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_every_caption_has_features_of_length_one(caption: str) -> None:
    found = text_features(caption)
    assert found.shape == (256,)
    assert np.linalg.norm(found) == pytest.approx(1.0, abs=1e-6)


def test_captions_without_a_word_are_alike() -> None:
    assert np.array_equal(text_features(""), text_features(" ,\n"))


@settings(deadline=None)
@given(st.text(max_size=60))
def test_words_are_those_that_score_complexity_counts(caption: str) -> None:
    assert len(words(caption)) == count_words(caption)
