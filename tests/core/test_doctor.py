from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lowvram_lora.config import DataConfig
from lowvram_lora.data.doctor import Finding, Intent, describe, examine, exposed, foreseen
from lowvram_lora.data.index import CacheEntry
from lowvram_lora.data.measuring import LIKENESS, likenesses, measure
from lowvram_lora.data.scan import Dataset, scan
from lowvram_lora.data.text_window import TextWindow, by_pieces, rough_pieces


def add(folder: Path, name: str, caption: str | None = "", size: tuple[int, int] = (256, 256), seed: int = 0) -> None:
    """Write a picture of coarse noise; a caption of ``""`` is made up, None writes none."""
    coarse = np.random.default_rng([seed, *name.encode()]).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(folder / name)
    if caption is not None:
        (folder / name).with_suffix(".txt").write_text(caption or f"a picture of {name}", encoding="utf-8")


def scanned(folder: Path, **options: Any) -> Dataset:
    return scan(DataConfig(**{"folder": str(folder), "resolution": 256, **options}), [folder])


def kinds(findings: tuple[Finding, ...]) -> list[str]:
    return [finding.kind for finding in findings]


def the(kind: str, findings: tuple[Finding, ...]) -> Finding:
    (found,) = [finding for finding in findings if finding.kind == kind]
    return found


def looked_at(dataset: Dataset) -> tuple[Finding, ...]:
    return examine(dataset, pictures=likenesses(measure(dataset, [LIKENESS])))


def test_a_good_dataset_has_nothing_to_put_right(tmp_path: Path) -> None:
    for number in range(12):
        add(tmp_path, f"{number}.png")
    dataset = scanned(tmp_path)
    intent = Intent(steps=200, batch_size=2, text_window=TextWindow(num_tokens=75))
    findings = examine(dataset, intent, likenesses(measure(dataset, [LIKENESS])))
    assert findings == ()
    assert "nothing" in describe(findings)


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    add(tmp_path, "long.png", "word " * 200)
    add(tmp_path, "tiny.png", "same words", size=(40, 40))
    add(tmp_path, "small.png", "same words", size=(90, 150))
    add(tmp_path, "wide.png", None, size=(200, 100))
    (tmp_path / "copy.png").write_bytes((tmp_path / "long.png").read_bytes())
    (tmp_path / "empty.png").write_bytes(b"")
    dataset = scanned(tmp_path)
    findings = examine(dataset, Intent(steps=500, batch_size=4, text_window=TextWindow(num_tokens=75)))
    assert set(kinds(findings)) == {
        "unusable files",
        "tiny images",
        "resolution above the images",
        "near-duplicates",
        "captions missing",
        "captions identical",
        "captions too long",
        "thin buckets",
        "batch larger than a bucket",
        "too few images for the steps",
    }
    report = describe(findings)
    for name in ("long.png", "tiny.png", "small.png", "wide.png", "copy.png", "empty.png"):
        assert name in report


def test_damaged_files_are_grouped_by_what_to_do(tmp_path: Path) -> None:
    add(tmp_path, "good.png", size=(300, 300))
    whole = (tmp_path / "good.png").read_bytes()
    for number, share in enumerate((0.3, 0.5, 0.7)):
        (tmp_path / f"cut{number}.png").write_bytes(whole[: int(len(whole) * share)])
    (tmp_path / "空 1.png").write_bytes(b"")
    (tmp_path / "空 2.png").write_bytes(b"")
    found = the("unusable files", examine(scanned(tmp_path)))
    assert {frozenset(group.names) for group in found.groups} == {
        frozenset({"cut0.png", "cut1.png", "cut2.png"}),
        frozenset({"空 1.png", "空 2.png"}),
    }
    assert all("save it again" in group.label for group in found.groups)


def test_tiny_images_are_named_with_their_size(tmp_path: Path) -> None:
    for number in range(5):
        add(tmp_path, f"{number}.png")
    add(tmp_path, "half.png", size=(128, 128))
    add(tmp_path, "tiny.png", size=(127, 128))
    found = the("tiny images", examine(scanned(tmp_path)))
    assert [(group.label, group.names) for group in found.groups] == [("127x128", ("tiny.png",))]


def test_the_resolution_that_is_proposed_is_one_that_fits(tmp_path: Path) -> None:
    for number in range(6):
        add(tmp_path, f"{number}.png", size=(400, 300))
    found = the("resolution above the images", examine(scanned(tmp_path, resolution=1024)))
    assert len(found.names) == 6
    proposed = int(re.search(r"Set resolution to about (\d+)", found.sentence).group(1))
    assert 300 <= proposed <= 400
    assert "resolution above the images" not in kinds(examine(scanned(tmp_path, resolution=proposed)))


def test_near_duplicates_stand_together(tmp_path: Path) -> None:
    for number in range(6):
        add(tmp_path, f"{number}.png")
    with Image.open(tmp_path / "2.png") as image:
        image.resize((200, 200)).save(tmp_path / "2 small.jpg", quality=70)
        image.save(tmp_path / "2 large.webp")
    with Image.open(tmp_path / "5.png") as image:
        image.crop((2, 2, 254, 254)).save(tmp_path / "裁剪.png")
    found = the("near-duplicates", looked_at(scanned(tmp_path)))
    assert {frozenset(group.names) for group in found.groups} == {
        frozenset({"2.png", "2 small.jpg", "2 large.webp"}),
        frozenset({"5.png", "裁剪.png"}),
    }


def test_without_a_look_at_the_pictures_equal_files_are_found(tmp_path: Path) -> None:
    add(tmp_path, "a.png")
    add(tmp_path, "b.png")
    (tmp_path / "c.png").write_bytes((tmp_path / "a.png").read_bytes())
    assert the("near-duplicates", examine(scanned(tmp_path))).names == ("a.png", "c.png")


@pytest.mark.parametrize("trigger", ["", "sks 猫"])
def test_images_without_words_of_their_own_are_named(trigger: str, tmp_path: Path) -> None:
    add(tmp_path, "a.png", "a cat")
    add(tmp_path, "blank.png", " \n")
    add(tmp_path, "none.png", None)
    found = the("captions missing", examine(scanned(tmp_path, trigger_word=trigger)))
    assert found.names == ("blank.png", "none.png")
    assert (trigger or "empty prompt") in found.sentence


def test_equal_captions_are_grouped_by_their_words(tmp_path: Path) -> None:
    for name, caption in (("a", "一只红猫"), ("b", "a dog"), ("c", "一只红猫"), ("d", "a dog"), ("e", "a bird")):
        add(tmp_path, f"{name}.png", caption)
    found = the("captions identical", examine(scanned(tmp_path)))
    assert {(group.label, group.names) for group in found.groups} == {
        ("'一只红猫'", ("a.png", "c.png")),
        ("'a dog'", ("b.png", "d.png")),
    }


def test_what_would_be_cut_of_a_caption_is_shown(tmp_path: Path) -> None:
    add(tmp_path, "a.png", "one two three four five six, sks")
    add(tmp_path, "b.png", "one two three four")

    def words(caption: str) -> list[str]:
        return re.findall(r"\s*\S+", caption)

    found = the(
        "captions too long",
        examine(scanned(tmp_path), Intent(text_window=TextWindow(num_tokens=4, read=by_pieces(words)))),
    )
    (group,) = found.groups
    assert group.names == ("a.png",)
    assert "7 tokens" in group.label and "'five six, sks'" in group.label and "about" not in group.label
    assert "is cut" in found.sentence


def test_a_window_that_is_read_in_parts_cuts_nothing(tmp_path: Path) -> None:
    add(tmp_path, "a.png", "red " * 100)
    window = TextWindow(num_tokens=75, is_chunked=True)
    found = the("captions too long", examine(scanned(tmp_path), Intent(text_window=window)))
    assert "All is read" in found.sentence and "about 100 tokens" in found.groups[0].label
    assert "is cut" not in found.sentence and "first part alone" in found.sentence


def test_an_encoder_that_reads_everything_at_once_is_named_beside_the_window(tmp_path: Path) -> None:
    add(tmp_path, "a.png", "red " * 100)
    window = TextWindow(num_tokens=75, is_chunked=True, unlimited=("t5xxl",))
    found = the("captions too long", foreseen(scanned(tmp_path).samples, Intent(text_window=window)))
    assert "t5xxl at once" in found.sentence


def test_entries_of_a_cache_are_counted_as_the_samples_they_are_of(tmp_path: Path) -> None:
    for number in range(5):
        add(tmp_path, f"{number}.png", size=(64, 64))
    samples = scanned(tmp_path, resolution=64).samples
    entries = [CacheEntry.single(sample.name, "l", "t", (4, 8, 8), sample.repeats) for sample in samples]
    # Five draws in batches of two are three batches.
    mean = 5 / 3
    for steps in (1, 100, 1000):
        told = foreseen(samples, Intent(steps=steps, batch_size=2))
        assert exposed(entries, steps, mean) == told[-1:] * (steps != 100)
    assert kinds(exposed(entries, 1000, 2)) == ["too few images for the steps"]


def test_thin_buckets_are_not_shown_more_often_than_their_batches_can(tmp_path: Path) -> None:
    for number in range(8):
        add(tmp_path, f"{number}.png", size=(64, 64 + 64 * number))
    samples = scanned(tmp_path, resolution=256, max_aspect=9.0, max_side=1024).samples
    num_buckets = len({sample.bucket_px for sample in samples})
    assert num_buckets >= 4
    # 50 steps are 50 batches of some 8 / num_buckets draws, not 50 of 8.
    assert "too few images for the steps" not in kinds(foreseen(samples, Intent(steps=50, batch_size=8)))
    assert "too few images for the steps" in kinds(foreseen(samples, Intent(steps=50 * num_buckets, batch_size=8)))


def test_images_that_keep_their_size_are_not_said_to_be_enlarged(tmp_path: Path) -> None:
    add(tmp_path, "a.png", size=(100, 100))
    enlarged, kept = (examine(scanned(tmp_path, upscale=upscale)) for upscale in (True, False))
    for kind in ("tiny images", "resolution above the images"):
        assert the(kind, enlarged).sentence != the(kind, kept).sentence
    assert "enlarged" in describe(enlarged) and "costs memory" in describe(enlarged)
    assert "enlarged" not in describe(kept) and "costs memory" not in describe(kept)


def test_a_node_further_down_hears_what_its_knowledge_brings_up_and_nothing_else(tmp_path: Path) -> None:
    add(tmp_path, "a.png", "red " * 100)
    add(tmp_path, "b.png", None, size=(20, 20))
    dataset = scanned(tmp_path)
    assert foreseen(dataset.samples, Intent()) == ()
    intent = Intent(steps=500, batch_size=4, text_window=TextWindow(num_tokens=75))
    more = foreseen(dataset.samples, intent)
    assert set(more) == set(examine(dataset, intent)) - set(examine(dataset))
    assert kinds(more) == ["captions too long", "batch larger than a bucket", "too few images for the steps"]


@pytest.mark.parametrize(
    "text", ["a cat", "  two  blanks ", "一只猫, 在 mat 上", "don't", "x" * 50, "\n", "", "🐈 1girl, b_c"]
)
def test_the_pieces_of_a_caption_are_the_caption(text: str) -> None:
    assert "".join(rough_pieces(text)) == text


def test_an_image_alone_in_its_bucket_is_named(tmp_path: Path) -> None:
    for number in range(4):
        add(tmp_path, f"{number}.png")
    add(tmp_path, "wide.png", size=(400, 200))
    found = the("thin buckets", examine(scanned(tmp_path)))
    assert found.names == ("wide.png",)
    assert "1 draw" in found.groups[0].label


def test_repeats_fill_a_batch(tmp_path: Path) -> None:
    for repeats in (1, 4):
        folder = tmp_path / f"data {repeats}" / f"{repeats}_cat"
        folder.mkdir(parents=True)
        add(folder, "a.png")
        add(folder, "b.png", size=(400, 200))
    once, often = (scanned(tmp_path / f"data {repeats}") for repeats in (1, 4))
    found = the("batch larger than a bucket", examine(once, Intent(batch_size=4)))
    assert len(found.names) == 2 and "2 draws" in found.sentence
    assert "batch larger than a bucket" not in kinds(examine(often, Intent(batch_size=4)))
    partly = the("batch larger than a bucket", examine(often, Intent(batch_size=6)))
    assert len(partly.groups) == 2


def test_twenty_images_for_fifty_epochs_are_called_overfitting(tmp_path: Path) -> None:
    for number in range(20):
        add(tmp_path, f"{number}.png", size=(64, 64))
    dataset = scanned(tmp_path, resolution=64)
    found = the("too few images for the steps", examine(dataset, Intent(steps=20 * 50)))
    assert len(found.names) == 20 and "Overfitting" in found.sentence
    fewer = int(re.search(r"Use (\d+) steps or fewer", found.sentence).group(1))
    assert fewer < 20 * 50
    assert examine(dataset, Intent(steps=fewer)) == ()
    assert kinds(examine(dataset, Intent(steps=fewer + 1))) == ["too few images for the steps"]
    assert kinds(examine(dataset, Intent(steps=250, batch_size=4))) == ["too few images for the steps"]


def test_only_the_images_that_are_repeated_too_often_are_named(tmp_path: Path) -> None:
    for folder, names in (("20_a", ("a.png",)), ("b", tuple(f"b{number}.png" for number in range(20)))):
        (tmp_path / folder).mkdir()
        for name in names:
            add(tmp_path / folder, name)
    found = the("too few images for the steps", examine(scanned(tmp_path), Intent(steps=200)))
    assert found.names == ("20_a/a.png",)


def test_steps_that_do_not_reach_every_image_are_told_with_what_is_enough(tmp_path: Path) -> None:
    for number in range(9):
        add(tmp_path, f"{number}.png", size=(64, 64))
    dataset = scanned(tmp_path, resolution=64)
    found = the("too many images for the steps", examine(dataset, Intent(steps=2, batch_size=2)))
    assert "Use 5 steps or more" in found.sentence
    assert "too many images for the steps" not in kinds(examine(dataset, Intent(steps=5, batch_size=2)))


def test_the_report_of_a_huge_dataset_stays_short(tmp_path: Path) -> None:
    add(tmp_path, "a.png", None, size=(20, 20))
    dataset = scanned(tmp_path)
    many = tuple(replace(dataset.samples[0], name=f"{number}.png") for number in range(10_000))
    findings = examine(replace(dataset, samples=many), Intent(steps=10, batch_size=20_000))
    assert len(the("tiny images", findings).names) == 10_000
    assert len(describe(findings).splitlines()) < 60


def test_a_dataset_without_samples_has_no_complaint_about_them(tmp_path: Path) -> None:
    add(tmp_path, "a.png")
    none = replace(scanned(tmp_path), samples=())
    assert examine(none, Intent(steps=10, batch_size=2, text_window=TextWindow(num_tokens=75)), []) == ()
