from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import gaussian_filter
from skimage.filters import sobel

from lowvram_lora.data.detail import (
    MEASURES,
    WORKING_PX,
    colour_count,
    edge_density,
    high_frequency,
    small_copy,
)

WHITE = "#ffffff"


def a_photo() -> Image.Image:
    """Something with texture, borders and gradients."""
    source = np.random.default_rng(5)
    smooth = gaussian_filter(source.normal(0, 400, (180, 240, 3)), (6, 6, 0))
    fine = gaussian_filter(source.normal(0, 60, (180, 240, 3)), (0.7, 0.7, 0))
    picture = 128 + smooth + fine
    picture[40:90, 60:140] = (200, 30, 60)
    return Image.fromarray(picture.clip(0, 255).astype(np.uint8))


def greys(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("L"), dtype=np.float64) / 255


def test_edge_density_agrees_with_scikit_image() -> None:
    # Theirs is the root of the mean of both squares, ours of their sum.
    gradient = sobel(greys(a_photo()), mode="nearest") * np.sqrt(2)
    assert 0.05 < edge_density(a_photo()) < 0.95
    assert edge_density(a_photo()) == pytest.approx((gradient > 0.1).mean(), abs=1e-3)


def test_a_straight_border_is_two_pixels_of_edge() -> None:
    picture = np.zeros((50, 100), dtype=np.uint8)
    picture[:, 40:] = 255
    assert edge_density(Image.fromarray(picture)) == pytest.approx(2 / 100)


def test_high_frequency_agrees_with_a_gaussian_high_pass() -> None:
    fine = greys(a_photo()) - gaussian_filter(greys(a_photo()), 2.0, mode="nearest")
    expected = min(1.0, np.sqrt((fine**2).mean()) * 4)
    assert high_frequency(a_photo()) == pytest.approx(expected, rel=0.1)


def test_a_gradient_has_no_detail_and_noise_has_all() -> None:
    gradient = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (256, 1)))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (256, 256), dtype=np.uint8))
    assert high_frequency(gradient) < 0.02
    assert high_frequency(noise) == 1.0


def test_colours_are_counted_on_a_logarithmic_scale() -> None:
    levels = np.arange(0, 256, 16, dtype=np.uint8)
    every = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(64, 64, 3)
    assert colour_count(Image.fromarray(every)) == 1.0
    assert colour_count(Image.new("RGB", (40, 40), (9, 99, 200))) == 0.0
    two = Image.new("RGB", (40, 40), (9, 99, 200))
    two.paste((200, 9, 9), (0, 0, 10, 10))
    assert colour_count(two) == pytest.approx(1 / 12)


def test_the_noise_of_a_lossy_file_adds_few_colours(tmp_path: Path) -> None:
    flag = Image.new("RGB", (400, 300), (20, 40, 160))
    flag.paste((220, 30, 30), (0, 0, 200, 300))
    flag.save(tmp_path / "flag.jpg", quality=70)
    with Image.open(tmp_path / "flag.jpg") as lossy:
        assert colour_count(lossy) - colour_count(flag) < 0.2


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (30_000, 200), (40, 30_000), (513, 512)])
def test_measures_of_any_shape_are_between_zero_and_one(size: tuple[int, int]) -> None:
    copy = small_copy(Image.new("RGB", size, (200, 10, 10)), WHITE)
    assert max(copy.size) <= WORKING_PX and copy.mode == "RGB"
    assert {name: measure(copy) for name, measure in MEASURES.items()} == dict.fromkeys(MEASURES, 0.0)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F"])
def test_measures_of_any_mode_are_between_zero_and_one(mode: str) -> None:
    picture = a_photo().convert("L").convert(mode) if mode in ("LA", "I", "F") else a_photo().convert(mode)
    if mode == "I":
        picture = picture.point(lambda grey: grey * 257)  # 16 bits
    values = [measure(small_copy(picture, WHITE)) for measure in MEASURES.values()]
    assert all(0.0 < value <= 1.0 for value in values)


def test_a_larger_copy_of_a_picture_measures_nearly_the_same() -> None:
    base = a_photo().resize((512, 384), Image.Resampling.LANCZOS)
    large = base.resize((2048, 1536), Image.Resampling.NEAREST)
    for measure in MEASURES.values():
        assert measure(small_copy(large, WHITE)) == pytest.approx(measure(small_copy(base, WHITE)), abs=1e-6)


def test_what_is_under_full_transparency_is_not_measured() -> None:
    hidden = np.random.default_rng(1).integers(0, 256, (64, 64, 4), dtype=np.uint8)
    hidden[..., 3] = 0
    copy = small_copy(Image.fromarray(hidden), "#102030")
    assert np.unique(np.asarray(copy).reshape(-1, 3), axis=0).tolist() == [[0x10, 0x20, 0x30]]
