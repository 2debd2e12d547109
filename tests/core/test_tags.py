"""Variants of captions, what stands in for a missing one, and which images are held out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lowvram_lora.config import DataConfig
from lowvram_lora.data.scan import Dataset, report, scan
from lowvram_lora.data.tags import caption_variants
from lowvram_lora.data.validation import held_out
from lowvram_lora.errors import ConfigError, DatasetError

TAGS = ["1girl", "red hair", "smile", "park", "day"]
WRITTEN = ", ".join(TAGS)


def variants(digest: str = "d", written: tuple[str, ...] = (WRITTEN,), **options: object) -> tuple[str, ...]:
    return caption_variants(written, digest, DataConfig(folder="", **options))


def test_the_caption_as_written_comes_first_and_alone_unless_variants_are_asked_for() -> None:
    assert variants() == (WRITTEN,)
    assert variants(caption_variants=8) == (WRITTEN,)
    assert variants(shuffle_tags=True) == (WRITTEN,)
    assert variants(caption_variants=8, shuffle_tags=True)[0] == WRITTEN


def test_shuffled_variants_hold_the_same_tags_in_other_orders() -> None:
    got = variants(caption_variants=8, shuffle_tags=True)
    assert len(got) == 8
    assert all(Counter(caption.split(", ")) == Counter(TAGS) for caption in got)


@settings(deadline=None)
@given(st.integers(0, 6), st.floats(0.0, 0.9), st.booleans(), st.integers(0, 2**64 - 1))
def test_kept_tags_stay_in_front_and_nothing_is_made_up(keep: int, dropout: float, shuffle: bool, seed: int) -> None:
    options = {"keep_tags": keep, "tag_dropout": dropout, "shuffle_tags": shuffle, "variant_seed": seed}
    for caption in variants(caption_variants=6, **options):
        tags = caption.split(", ")
        assert tags[:keep] == TAGS[:keep]
        assert not Counter(tags) - Counter(TAGS)
        assert tags != [""]
        if not shuffle:
            assert tags == [tag for tag in TAGS if tag in tags]


def test_a_seed_repeats_the_variants_and_another_image_has_others() -> None:
    options = {"caption_variants": 5, "shuffle_tags": True, "tag_dropout": 0.3}
    assert variants(**options) == variants(**options)
    assert variants(**options) != variants("another", **options)
    assert variants(**options) != variants(variant_seed=1, **options)


def test_tags_are_left_out_about_as_often_as_asked() -> None:
    written = ", ".join(f"tag{number}" for number in range(50))
    got = variants(written=(written,), caption_variants=32, tag_dropout=0.3)[1:]
    share = sum(len(caption.split(", ")) for caption in got) / (50 * len(got))
    assert 0.65 < share < 0.75


def test_all_captions_that_were_written_are_kept() -> None:
    got = variants(written=("a, b", "c, d", "e, f"), caption_variants=2, shuffle_tags=True)
    assert got == ("a, b", "c, d", "e, f")
    more = variants(written=("a, b", "c, d"), caption_variants=8, shuffle_tags=True)
    assert {frozenset(caption.split(", ")) for caption in more} == {frozenset("ab"), frozenset("cd")}


def folder_of(root: Path) -> Path:
    """Write three images with a caption, with a blank one and without one."""
    folder = root / "my set" / "3_black cat"
    folder.mkdir(parents=True)
    for number, name in enumerate("abc"):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(folder / f"{name}.png")
    (folder / "a.txt").write_text("a, b, c, d", encoding="utf-8")
    (folder / "b.txt").write_bytes(b"")
    return root


def scan_in(root: Path, **options: object) -> Dataset:
    return scan(DataConfig(folder="my set", **options), [root])


@pytest.mark.parametrize(
    ("policy", "trigger", "expected"),
    [
        ("trigger word", "sks", "sks"),
        ("trigger word", "", ""),
        ("empty", "sks", ""),
        ("folder name", "sks", "sks, black cat"),
        ("folder name", "", "black cat"),
    ],
)
def test_what_stands_in_for_a_missing_caption_is_chosen_and_told(
    tmp_path: Path, policy: str, trigger: str, expected: str
) -> None:
    """a14"""
    dataset = scan_in(folder_of(tmp_path), missing_captions=policy, trigger_word=trigger)
    assert [sample.caption for sample in dataset.samples][2] == expected
    assert "no caption: 1 (3_black cat/c.png)" in dataset.notes


def test_images_without_a_caption_can_be_left_out_by_name(tmp_path: Path) -> None:
    """a14: a blank caption is one; a missing one is not."""
    dataset = scan_in(folder_of(tmp_path), missing_captions="skip")
    assert [sample.name for sample in dataset.samples] == ["3_black cat/a.png", "3_black cat/b.png"]
    assert [(skip.name, "no caption" in skip.reason) for skip in dataset.skipped] == [("3_black cat/c.png", True)]
    for name in "ab":
        (tmp_path / "my set" / "3_black cat" / f"{name}.txt").unlink()
    with pytest.raises(DatasetError, match="missing_captions is skip"):
        scan_in(tmp_path, missing_captions="skip")


def test_the_trigger_word_is_in_every_variant_once(tmp_path: Path) -> None:
    dataset = scan_in(
        folder_of(tmp_path), trigger_word="c", caption_variants=8, shuffle_tags=True, tag_dropout=0.6, keep_tags=0
    )
    first = dataset.samples[0]
    assert len(first.captions) > 3
    assert all(caption.split(", ").count("c") == 1 for caption in first.captions)
    assert first.caption == "a, b, c, d"


def test_repeats_of_the_dataset_multiply_those_of_its_folders(tmp_path: Path) -> None:
    dataset = scan_in(folder_of(tmp_path), repeats=4)
    assert [sample.repeats for sample in dataset.samples] == [12, 12, 12]
    assert "3 images, 36 an epoch" in report(dataset)


@settings(deadline=None)
@given(st.sets(st.text(min_size=1), min_size=2, max_size=40), st.floats(0.001, 0.5))
def test_the_share_held_out_is_the_rounded_one_never_nothing_and_never_all(digests: set[str], share: float) -> None:
    held = held_out(digests, share)
    assert held <= digests
    assert 1 <= len(held) < len(digests)
    assert abs(len(held) - share * len(digests)) <= 1


def test_which_images_are_held_out_follows_their_content_alone(tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        for number in range(20):
            name = f"{number}.png" if place == "one" else f"{19 - number} renamed.png"
            Image.new("RGB", (64, 64), (number, 0, 0)).save(tmp_path / place / name)
    Image.new("RGB", (64, 64), (3, 0, 0)).save(tmp_path / "two" / "3 again.png")
    one, two = (scan(DataConfig(folder=place, validation_share=0.25), [tmp_path]) for place in ("one", "two"))
    held = [{sample.image_digest for sample in dataset.samples if sample.is_validation} for dataset in (one, two)]
    trained = [
        {sample.image_digest for sample in dataset.samples if not sample.is_validation} for dataset in (one, two)
    ]
    assert held[0] == held[1]
    assert len(held[0]) == 5
    assert not held[1] & trained[1]
    assert "15 an epoch" in report(one)
    assert any(note.startswith("held out for validation: 5 (") for note in one.notes)


def test_one_image_is_never_held_out(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    dataset = scan(DataConfig(folder=".", validation_share=0.5), [tmp_path])
    assert not dataset.samples[0].is_validation
    assert any("only one image" in note for note in dataset.notes)


@pytest.mark.parametrize(
    "options",
    [
        {"missing_captions": "nope"},
        {"caption_variants": 0},
        {"tag_dropout": 0.95},
        {"tag_dropout": float("nan")},
        {"keep_tags": -1},
        {"caption_dropout": 1.1},
        {"max_aspect": 0.5},
        {"min_side": -1},
        {"min_side": 512, "max_side": 256},
        {"repeats": 0},
        {"image_variants": 17},
        {"colour_jitter": 0.6},
        {"variant_seed": -1},
        {"masks": "nope"},
        {"validation_share": 0.6},
        {"custom_extension": "../x"},
        {"custom_extension": ".png"},
        {"custom_extension": "TIF"},
        {"custom_extension": "a\nb"},
    ],
)
def test_settings_outside_their_range_are_named(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        DataConfig(folder="x", **options)  # type: ignore[arg-type]
    assert caught.value.field in options
