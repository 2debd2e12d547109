"""Variants of pictures: mirrored, cropped elsewhere, with other colours; and masks, which go the same way."""

from __future__ import annotations

import io
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms.v2 import functional as TF

from lowvram_lora.config import DataConfig
from lowvram_lora.data.augment import MIN_ZOOM, PLAIN, Variant, jittered, variants_of, window
from lowvram_lora.data.masks import mask_weights
from lowvram_lora.data.pixels import to_pixels
from lowvram_lora.data.scan import Dataset, scan

WHITE = "#ffffff"


def png(values: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, "PNG")
    return stream.getvalue()


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8)


def config(**options: object) -> DataConfig:
    return DataConfig(folder="", **options)


def test_the_plain_picture_is_always_the_first_variant() -> None:
    everything = config(image_variants=6, flip=True, random_crop=True, colour_jitter=0.2)
    assert variants_of("d", config()) == (PLAIN,)
    assert variants_of("d", config(image_variants=6)) == (PLAIN,)
    assert variants_of("d", config(image_variants=6, flip=True)) == (PLAIN, replace(PLAIN, flip=True))
    assert variants_of("d", everything)[0] == PLAIN
    assert len(variants_of("d", everything)) == 6
    assert [variant.flip for variant in variants_of("d", everything)] == [False, True] * 3


def test_variants_follow_the_seed_and_the_picture() -> None:
    options = {"image_variants": 4, "random_crop": True, "colour_jitter": 0.2}
    assert variants_of("d", config(**options)) == variants_of("d", config(**options))
    assert variants_of("d", config(**options)) != variants_of("e", config(**options))
    assert variants_of("d", config(**options)) != variants_of("d", config(variant_seed=1, **options))


@settings(deadline=None)
@given(st.floats(0.0, 0.5), st.text(min_size=1))
def test_variants_stay_within_what_is_asked(jitter: float, digest: str) -> None:
    for variant in variants_of(digest, config(image_variants=8, random_crop=True, colour_jitter=jitter)):
        assert MIN_ZOOM <= variant.zoom <= 1.0
        assert 0.0 <= variant.across <= 1.0
        assert 0.0 <= variant.down <= 1.0
        for factor in (variant.brightness, variant.contrast, variant.saturation):
            assert 1.0 - jitter <= factor <= 1.0 + jitter


def test_a_flipped_variant_is_the_mirrored_picture() -> None:
    data = png(noise(48, 80))
    plain = to_pixels(data, "a", (48, 80), WHITE)
    flipped = to_pixels(data, "a", (48, 80), WHITE, Variant(flip=True))
    assert torch.equal(flipped, plain.flip(1))


@pytest.mark.parametrize(("across", "left"), [(0.0, 0), (0.5, 16), (1.0, 32)])
def test_a_crop_shows_the_part_it_names(across: float, left: int) -> None:
    values = noise(48, 80)
    got = to_pixels(png(values), "a", (48, 48), WHITE, Variant(across=across))
    assert torch.equal(got, torch.from_numpy(values[:, left : left + 48]).float() / 255)


SIDES = st.integers(1, 4000)
SHARES = st.floats(0.0, 1.0)


@settings(deadline=None)
@given(SIDES, SIDES, st.integers(8, 2048), st.integers(8, 2048), st.floats(MIN_ZOOM, 1.0), SHARES, SHARES)
def test_every_crop_lies_in_the_picture_and_has_the_shape_of_the_bucket(
    height: int, width: int, bucket_height: int, bucket_width: int, zoom: float, across: float, down: float
) -> None:
    variant = Variant(zoom=zoom, across=across, down=down)
    left, top, right, bottom = window((height, width), (bucket_height, bucket_width), variant)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert (right - left) * bucket_height == pytest.approx((bottom - top) * bucket_width)
    # Never less of the picture than the bucket has pixels, unless the plain crop has less already.
    plain = window((height, width), (bucket_height, bucket_width))
    assert right - left >= min(bucket_width, plain[2] - plain[0]) - 1e-6


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.3])
@pytest.mark.parametrize("kind", ["brightness", "contrast", "saturation"])
def test_colours_change_as_in_torchvision(kind: str, factor: float) -> None:
    pixels = torch.from_numpy(noise(20, 30)).float() / 255
    expected = getattr(TF, f"adjust_{kind}")(pixels.permute(2, 0, 1), factor).permute(1, 2, 0)
    torch.testing.assert_close(jittered(pixels, Variant(**{kind: factor})), expected, atol=2e-3, rtol=0)


def test_a_plain_variant_leaves_the_pixels_alone() -> None:
    pixels = torch.rand(4, 5, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(jittered(pixels, PLAIN), pixels)


def test_weights_of_a_mask_lie_where_its_picture_does_in_every_variant() -> None:
    """The picture is its own mask: both must be cut and mirrored alike."""
    values = noise(60, 100, 1) // 4 + 96  # scaling does not overshoot white or black
    for variant in (PLAIN, Variant(flip=True, zoom=0.9, across=0.2, down=0.7)):
        pixels = to_pixels(png(values), "a", (32, 32), WHITE, variant)
        weights = mask_weights(png(values), Path("a"), (60, 100), (32, 32), False, variant)
        assert weights.shape == (32, 32)
        # The picture is rounded to 8 bits on the way, the mask is not.
        torch.testing.assert_close(weights, pixels[..., 0], atol=0.02, rtol=0)


def test_a_mask_of_half_the_size_covers_the_same_part() -> None:
    mask = np.zeros((30, 50), dtype=np.uint8)
    mask[:, 25:] = 255
    weights = mask_weights(png(mask), Path("m"), (60, 100), (60, 100), False)
    assert weights[:, :48].max() == 0.0
    assert weights[:, 52:].min() == 1.0


def write_set(folder: Path) -> Path:
    (folder / "masks").mkdir(parents=True)
    half = noise(64, 64, 4)
    half[..., 3] = 255
    half[:, :32, 3] = 0
    Image.fromarray(half).save(folder / "alpha 猫.png")
    for name in ("one.jpg", "two.jpg", "none.jpg"):
        Image.fromarray(noise(64, 64)).save(folder / name)
    white = Image.new("L", (32, 32), 255)
    white.save(folder / "masks" / "one.png")
    white.save(folder / "masks" / "two.jpg.png")
    white.save(folder / "masks" / "alpha 猫.webp")
    return folder


def masks_of(dataset: Dataset) -> dict[str, str | None]:
    return {sample.name: sample.mask and sample.mask.name for sample in dataset.samples}


def test_masks_come_from_the_folder_beside_the_images(tmp_path: Path) -> None:
    dataset = scan(DataConfig(folder=".", masks="folder"), [write_set(tmp_path)])
    assert masks_of(dataset) == {
        "alpha 猫.png": "alpha 猫.webp",
        "none.jpg": None,
        "one.jpg": "one.png",
        "two.jpg": "two.jpg.png",
    }
    assert "masks found 3 of 4" in dataset.notes
    assert "no mask, all of it counts: 1 (none.jpg)" in dataset.notes
    assert not [note for note in dataset.notes if "not read" in note]


def test_a_mask_is_found_however_a_system_spells_its_accents(tmp_path: Path) -> None:
    (tmp_path / "masks").mkdir()
    Image.fromarray(noise(64, 64)).save(tmp_path / f"{unicodedata.normalize('NFC', 'é')}.png")
    Image.new("L", (32, 32), 255).save(tmp_path / "masks" / f"{unicodedata.normalize('NFD', 'é')}.png")
    (mask,) = masks_of(scan(DataConfig(folder=".", masks="folder"), [tmp_path])).values()
    assert mask is not None


def test_masks_come_from_the_alpha_of_the_images(tmp_path: Path) -> None:
    write_set(tmp_path)
    dataset = scan(DataConfig(folder=".", masks="alpha"), [tmp_path])
    assert masks_of(dataset)["alpha 猫.png"] == "alpha 猫.png"
    assert masks_of(dataset)["one.jpg"] is None
    sample = next(sample for sample in dataset.samples if sample.mask is not None)
    assert sample.mask_digest == sample.image_digest
    weights = mask_weights(sample.mask.read_bytes(), sample.mask, sample.image_size_px, (64, 64), True)
    assert weights[:, :31].max() == 0.0
    assert weights[:, 33:].min() == 1.0


@pytest.mark.parametrize("masks", ["none", "alpha"])
def test_a_folder_of_masks_that_are_trained_on_is_pointed_out(tmp_path: Path, masks: Any) -> None:
    dataset = scan(DataConfig(folder=".", masks=masks), [write_set(tmp_path)])
    assert masks_of(dataset)["masks/one.png"] is None
    assert any("set masks to folder" in note for note in dataset.notes)


def test_a_dataset_may_itself_be_called_masks(tmp_path: Path) -> None:
    write_set(tmp_path / "masks")
    dataset = scan(DataConfig(folder="masks", masks="folder"), [tmp_path])
    assert masks_of(dataset)["one.jpg"] == "one.png"


def test_masks_that_can_not_be_used_are_named(tmp_path: Path) -> None:
    write_set(tmp_path)
    Image.new("L", (64, 32), 255).save(tmp_path / "masks" / "one.png")
    Image.new("L", (64, 64), 0).save(tmp_path / "masks" / "two.jpg.png")
    (tmp_path / "masks" / "none.png").write_bytes(b"no picture")
    dataset = scan(DataConfig(folder=".", masks="folder"), [tmp_path])
    reasons = {skip.name: skip.reason for skip in dataset.skipped}
    assert set(reasons) == {"one.jpg", "two.jpg", "none.jpg"}
    assert "masks/one.png: 64x32 is not the shape of the image, 64x64" in reasons["one.jpg"]
    assert "black" in reasons["two.jpg"]
    assert "masks/none.png" in reasons["none.jpg"]


@pytest.mark.parametrize(("white", "is_used"), [((0, 200), False), ((280, 300), True)])
def test_a_mask_of_which_the_crop_shows_nothing_is_named(tmp_path: Path, white: tuple[int, int], is_used: bool) -> None:
    (tmp_path / "masks").mkdir()
    Image.new("RGB", (640, 64), "red").save(tmp_path / "long.png")
    Image.new("RGB", (64, 64), "red").save(tmp_path / "other.png")
    for name, size in (("long", (320, 32)), ("other", (64, 64))):
        mask = Image.new("L", size)
        mask.paste(255, (white[0] // 2, 0, white[1] // 2, 32) if name == "long" else (0, 0, *size))
        mask.save(tmp_path / "masks" / f"{name}.png")
    dataset = scan(DataConfig(folder=".", masks="folder", resolution=64), [tmp_path])
    assert ("long.png" in masks_of(dataset)) is is_used
    assert [skip.name for skip in dataset.skipped] == ([] if is_used else ["long.png"])
    assert is_used or "cropped away" in dataset.skipped[0].reason


def test_an_image_that_is_transparent_all_over_is_no_mask(tmp_path: Path) -> None:
    Image.new("RGBA", (64, 64), (9, 9, 9, 0)).save(tmp_path / "a.png")
    Image.new("RGB", (64, 64)).save(tmp_path / "b.png")
    dataset = scan(DataConfig(folder=".", masks="alpha"), [tmp_path])
    assert [(skip.name, "transparent" in skip.reason) for skip in dataset.skipped] == [("a.png", True)]


def test_another_mask_is_another_dataset(tmp_path: Path) -> None:
    write_set(tmp_path)
    options = DataConfig(folder=".", masks="folder")
    before = scan(options, [tmp_path]).fingerprint
    Image.new("L", (32, 32), 100).save(tmp_path / "masks" / "one.png")
    assert scan(options, [tmp_path]).fingerprint != before


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"flip": True}, "set image_variants"),
        ({"image_variants": 4}, "turn flip"),
        ({"caption_variants": 4}, "turn shuffle_tags on"),
        ({"shuffle_tags": True}, "set caption_variants"),
        ({"flip": True, "image_variants": 4}, "variants of each image: 2"),
        ({"caption_dropout": 0.1}, "caption_dropout: in 0.1 of all draws"),
    ],
)
def test_what_a_setting_does_or_can_not_do_is_told(tmp_path: Path, options: dict[str, object], word: str) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    dataset = scan(DataConfig(folder=".", **options), [tmp_path])
    assert any(word in note for note in dataset.notes)
