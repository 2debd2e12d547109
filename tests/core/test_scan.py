import os
import struct
import unicodedata
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image

from lowvram_lora.config import DataConfig
from lowvram_lora.data.scan import Dataset, folder_fingerprint, report, scan
from lowvram_lora.errors import ConfigError, DatasetError, PathError


def picture(path: Path, size: tuple[int, int] = (64, 64), colour: tuple[int, int, int] = (200, 30, 30)) -> Path:
    """Write a picture of PIL size ``size`` in the format its name asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def noisy(path: Path) -> Path:
    values = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(values).save(path, "JPEG")
    return path


def scan_in(root: Path, folder: str = ".", **options: object) -> Dataset:
    return scan(DataConfig(folder=folder, **options), [root])


def names(dataset: Dataset) -> list[str]:
    return [sample.name for sample in dataset.samples]


def test_images_come_in_natural_order_whatever_the_order_they_were_made_in(tmp_path: Path) -> None:
    """a23"""
    for name in ("img10.png", "img2.png", "img1.png", "Img3.png", "b/img1.png", "a 10/x.png", "a 9/x.png"):
        picture(tmp_path / name)
    assert names(scan_in(tmp_path)) == [
        "a 9/x.png",
        "a 10/x.png",
        "b/img1.png",
        "img1.png",
        "img2.png",
        "Img3.png",
        "img10.png",
    ]


def test_bucket_and_size_follow_the_upright_picture(tmp_path: Path) -> None:
    """a01"""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (400, 200)).save(tmp_path / "turned.jpg", exif=exif)
    sample = scan_in(tmp_path).samples[0]
    assert sample.image_size_px == (400, 200)
    assert sample.bucket_px[0] > sample.bucket_px[1]


def test_damaged_files_are_named_and_left_out(tmp_path: Path) -> None:
    """a04"""
    picture(tmp_path / "good.png")
    whole = noisy(tmp_path / "cut.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) * 7 // 10])
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("no picture", encoding="utf-8")
    (tmp_path / "bad.png").write_bytes((tmp_path / "good.png").read_bytes()[:40])
    dataset = scan_in(tmp_path)
    assert names(dataset) == ["good.png"]
    reasons = {skip.name: skip.reason for skip in dataset.skipped}
    assert set(reasons) == {"cut.jpg", "empty.png", "text.png", "bad.png"}
    assert "cut off" in reasons["cut.jpg"]
    assert "0 bytes" in reasons["empty.png"]
    assert all(name in report(dataset) for name in reasons)


def bomb() -> bytes:
    """Return a tiny PNG that claims 30000 x 30000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("limit", [Image.MAX_IMAGE_PIXELS, None])
def test_a_decompression_bomb_is_left_out_even_if_another_pack_lifted_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    picture(tmp_path / "good.png")
    (tmp_path / "bomb.png").write_bytes(bomb())
    (skip,) = scan_in(tmp_path).skipped
    assert skip.name == "bomb.png"
    assert "pixels" in skip.reason


def test_what_systems_leave_behind_is_passed_over_in_silence(tmp_path: Path) -> None:
    """a05, a06"""
    picture(tmp_path / "a.jpg")
    for name in ("._a.jpg", "__MACOSX/._name.jpeg", "__MACOSX/b.jpg", ".hidden/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\0" * 4096)
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store"):
        (tmp_path / name).write_bytes(b"x")
    dataset = scan_in(tmp_path)
    assert names(dataset) == ["a.jpg"]
    assert dataset.skipped == ()
    assert "db" not in " ".join(dataset.notes)


@pytest.mark.parametrize(("picture_form", "caption_form"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_caption_is_found_however_a_system_spells_its_accents(
    tmp_path: Path, picture_form: Literal["NFC", "NFD"], caption_form: Literal["NFC", "NFD"]
) -> None:
    picture(tmp_path / f"{unicodedata.normalize(picture_form, 'Müller é')}.png")
    file = tmp_path / f"{unicodedata.normalize(caption_form, 'Müller é')}.txt"
    file.write_text("a portrait", encoding="utf-8")
    (sample,) = scan_in(tmp_path).samples
    assert sample.caption == "a portrait"


def test_endings_in_any_case(tmp_path: Path) -> None:
    """a08"""
    for name in ("IMG_1.JPG", "b.Png", "c.JpEg"):
        picture(tmp_path / name)
    assert sorted(names(scan_in(tmp_path))) == ["IMG_1.JPG", "b.Png", "c.JpEg"]


@pytest.mark.parametrize("name", ["日本語の写真", "é à ü", "Ünïcödé 猫", "кошка", "🐈"])
def test_folders_and_files_may_have_any_letters(tmp_path: Path, name: str) -> None:
    """a35"""
    picture(tmp_path / name / f"{name}.png")
    (tmp_path / name / f"{name}.txt").write_text("一只猫", encoding="utf-8")
    (sample,) = scan_in(tmp_path, name).samples
    assert sample.name == f"{name}.png" and sample.captions == ("一只猫",)


def test_every_stated_format_is_read(tmp_path: Path) -> None:
    endings = ("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff")
    for ending in endings:
        picture(tmp_path / f"{ending}.{ending}")
    assert len(names(scan_in(tmp_path))) == len(endings)


def test_captions_are_counted(tmp_path: Path) -> None:
    """a09, a11, a13, a14"""
    for name in "abcde":
        picture(tmp_path / f"{name}.png")
    (tmp_path / "a.txt").write_bytes(b"it\x92s a cat")
    (tmp_path / "b.caption").write_bytes("\ufeffa dog".encode())
    (tmp_path / "c.txt").write_bytes(b"")
    (tmp_path / "d.txt").write_bytes(b" \n")
    dataset = scan_in(tmp_path)
    assert [sample.caption for sample in dataset.samples] == ["it’s a cat", "a dog", "", "", ""]
    notes = "\n".join(dataset.notes)
    assert "captions found 4 of 5" in notes
    assert "blank captions: 2 (c.png, d.png)" in notes
    assert "no caption: 1 (e.png)" in notes
    assert "empty prompt" in notes
    assert "a.png is not UTF-8" in notes


def test_the_trigger_word_leads_every_caption(tmp_path: Path) -> None:
    """a10"""
    for name in "abc":
        picture(tmp_path / f"{name}.png")
    (tmp_path / "a.txt").write_bytes("\ufeff一只猫在窗台上".encode())
    (tmp_path / "b.txt").write_text("a photo of sks", encoding="utf-8")
    dataset = scan_in(tmp_path, trigger_word="sks")
    assert [sample.caption for sample in dataset.samples] == ["sks, 一只猫在窗台上", "a photo of sks", "sks"]
    assert "'sks' alone" in "\n".join(dataset.notes)


def test_gbk_captions(tmp_path: Path) -> None:
    picture(tmp_path / "猫.png")
    (tmp_path / "猫.txt").write_bytes("一只橘猫坐在窗台上".encode("gbk"))
    dataset = scan_in(tmp_path)
    assert dataset.samples[0].caption == "一只橘猫坐在窗台上"
    assert any("猫.png" in note and "GB18030" in note for note in dataset.notes)


def test_names_with_dots_are_two_samples(tmp_path: Path) -> None:
    """a15"""
    picture(tmp_path / "aaa.bbb.jpg", colour=(255, 0, 0))
    picture(tmp_path / "aaa.ccc.jpg", colour=(0, 0, 255))
    first, second = scan_in(tmp_path).samples
    assert (first.name, second.name) == ("aaa.bbb.jpg", "aaa.ccc.jpg")
    assert first.image_digest != second.image_digest


def test_leaf_and_parent_both_work(tmp_path: Path) -> None:
    """a19, a20, a21, a22"""
    picture(tmp_path / "my set" / "10_cat" / "1.png")
    picture(tmp_path / "my set" / "10_cat" / "sub" / "2.png")
    picture(tmp_path / "my set" / "30_black mamba" / "3.png")
    picture(tmp_path / "my set" / "CROP" / "4.png")
    parent = scan_in(tmp_path, "my set")
    assert {sample.name: sample.repeats for sample in parent.samples} == {
        "10_cat/1.png": 10,
        "10_cat/sub/2.png": 10,
        "30_black mamba/3.png": 30,
        "CROP/4.png": 1,
    }
    leaf = scan_in(tmp_path, "my set/10_cat")
    assert {sample.name: sample.repeats for sample in leaf.samples} == {"1.png": 10, "sub/2.png": 10}


def test_a_date_is_no_number_of_repeats_and_zero_leaves_out(tmp_path: Path) -> None:
    picture(tmp_path / "20240131_cats" / "1.png")
    picture(tmp_path / "0_unused" / "2.png")
    dataset = scan_in(tmp_path)
    assert [(sample.name, sample.repeats) for sample in dataset.samples] == [("20240131_cats/1.png", 1)]
    assert any("20240131" in note for note in dataset.notes)
    assert [(skip.name, "0 repeats" in skip.reason) for skip in dataset.skipped] == [("0_unused/2.png", True)]


def test_nothing_usable_says_what_is_there(tmp_path: Path) -> None:
    """a19"""
    for name in ("a.txt", "b.txt", "c.mp4"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "broken.png").write_bytes(b"x")
    with pytest.raises(DatasetError) as caught:
        scan_in(tmp_path)
    first, second = caught.value.problems
    assert str(tmp_path) in first
    assert "2 .txt" in first
    assert "1 .mp4" in first
    assert second.startswith("broken.png")


def test_long_pictures_and_small_ones_are_reported(tmp_path: Path) -> None:
    """a29"""
    picture(tmp_path / "long.png", (2000, 200))
    picture(tmp_path / "small.png", (100, 100))
    picture(tmp_path / "fits.png", (512, 512))
    dataset = scan_in(tmp_path)
    assert {sample.name: sample.bucket_px for sample in dataset.samples} == {
        "long.png": (256, 768),
        "small.png": (512, 512),
        "fits.png": (512, 512),
    }
    notes = "\n".join(dataset.notes)
    assert "long.png (2000x200) goes into 768x256: 70% of it is cropped away (buckets go up to 3:1)" in notes
    assert "scaled up: 2 (long.png, small.png)" in notes
    assert "512x512: 2 images" in report(dataset)


def test_animation_is_stated(tmp_path: Path) -> None:
    """a33"""
    frames = [Image.new("RGB", (64, 64), (80 * i, 0, 0)) for i in range(3)]
    frames[0].save(tmp_path / "moving.webp", save_all=True, append_images=frames[1:])
    picture(tmp_path / "still.webp")
    notes = [note for note in scan_in(tmp_path).notes if "first frame" in note]
    assert len(notes) == 1
    assert "moving.webp" in notes[0]
    assert "still.webp" not in notes[0]


@pytest.mark.parametrize("typed", ["cats", "cats/", " cats ", '"cats"', "'cats/'", "./cats", "cats\\"])
def test_a_relative_name_is_looked_up_in_each_root(tmp_path: Path, typed: str) -> None:
    """i09"""
    (tmp_path / "first").mkdir()
    picture(tmp_path / "second" / "cats" / "a.png")
    dataset = scan(DataConfig(folder=typed), [tmp_path / "first", tmp_path / "second"])
    assert dataset.folder == tmp_path / "second" / "cats"


def test_an_absolute_name_inside_a_root_works(tmp_path: Path) -> None:
    picture(tmp_path / "猫 set" / "a.png")
    assert names(scan_in(tmp_path, f'"{tmp_path / "猫 set"}/"')) == ["a.png"]


def test_a_missing_folder_shows_the_paths_tried_and_what_to_do(tmp_path: Path) -> None:
    roots = [tmp_path / "one", tmp_path / "two"]
    with pytest.raises(PathError) as caught:
        scan(DataConfig(folder="nope"), roots)
    text = str(caught.value)
    assert str(roots[0] / "nope") in text
    assert str(roots[1] / "nope") in text
    assert f"- {roots[0]}\n- {roots[1]}" in text
    assert "datasets:" in text
    assert "extra_model_paths.yaml" in text


@pytest.mark.parametrize("typed", ["../secret", "sub/../../secret", "..\\secret", "C:\\secret", "", "/"])
def test_names_that_lead_out_are_refused(tmp_path: Path, typed: str) -> None:
    """e10"""
    picture(tmp_path / "secret" / "a.png")
    (tmp_path / "root" / "sub").mkdir(parents=True)
    with pytest.raises(PathError, match="Datasets may be read from"):
        scan_in(tmp_path / "root", typed)


def test_an_absolute_folder_outside_is_refused_the_same_whether_it_is_there_or_not(tmp_path: Path) -> None:
    """e10"""
    picture(tmp_path / "secret" / "a.png")
    (tmp_path / "root").mkdir()
    messages = []
    for name in ("secret", "nosuch"):
        with pytest.raises(PathError) as caught:
            scan_in(tmp_path / "root", str(tmp_path / name))
        messages.append(caught.value.reason)
    assert messages[0] == messages[1]
    assert "outside" in messages[0]


def test_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    """e10"""
    root = tmp_path / "root"
    picture(root / "set" / "own.png")
    picture(tmp_path / "secret" / "a.png")
    (tmp_path / "secret" / "own.txt").write_text("password", encoding="utf-8")
    (root / "linked").symlink_to(tmp_path / "secret")
    (root / "set" / "folder").symlink_to(tmp_path / "secret")
    (root / "set" / "file.png").symlink_to(tmp_path / "secret" / "a.png")
    (root / "set" / "own.txt").symlink_to(tmp_path / "secret" / "own.txt")
    with pytest.raises(PathError, match="outside"):
        scan_in(root, "linked")
    dataset = scan_in(root, "set")
    assert names(dataset) == ["own.png"]
    assert dataset.samples[0].caption == ""
    assert [skip.name for skip in dataset.skipped] == ["file.png", "folder", "own.txt"]


def test_links_inside_the_roots_are_followed_and_loops_end(tmp_path: Path) -> None:
    picture(tmp_path / "store" / "a.png")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "store")
    (tmp_path / "set" / "loop").symlink_to(tmp_path / "set")
    assert names(scan_in(tmp_path, "set")) == ["linked/a.png"]


def test_a_step_above_the_resolution_is_a_setting_not_a_broken_file(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    with pytest.raises(ConfigError):
        scan_in(tmp_path, resolution=64, bucket_step=128)


def write_caption(folder: Path) -> None:
    (folder / "a.txt").write_text("a dog", encoding="utf-8")


def recolour(folder: Path) -> None:
    picture(folder / "a.png", colour=(1, 2, 3))


def add_image(folder: Path) -> None:
    picture(folder / "new.png", colour=(9, 9, 9))


def rename(folder: Path) -> None:
    os.replace(folder / "b.png", folder / "c.png")


@pytest.mark.parametrize("change", [write_caption, recolour, add_image, rename])
def test_fingerprints_see_every_change(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """i02, a17"""
    for name in "ab":
        picture(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("a cat", encoding="utf-8")
        os.utime(tmp_path / f"{name}.png", ns=(10**18, 10**18))
        os.utime(tmp_path / f"{name}.txt", ns=(10**18, 10**18))
    config = DataConfig(folder=".")
    cheap, full = folder_fingerprint(config, [tmp_path]), scan_in(tmp_path).fingerprint
    assert (folder_fingerprint(config, [tmp_path]), scan_in(tmp_path).fingerprint) == (cheap, full)
    change(tmp_path)
    assert folder_fingerprint(config, [tmp_path]) != cheap
    assert scan_in(tmp_path).fingerprint != full


def test_settings_are_in_the_fingerprints(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    plain = DataConfig(folder=".")
    for other in (
        replace(plain, resolution=256),
        replace(plain, background="#000000"),
        replace(plain, trigger_word="x"),
    ):
        assert folder_fingerprint(other, [tmp_path]) != folder_fingerprint(plain, [tmp_path])
        assert scan(other, [tmp_path]).fingerprint != scan(plain, [tmp_path]).fingerprint


def test_the_fingerprint_of_a_dataset_does_not_depend_on_its_place(tmp_path: Path) -> None:
    for place in ("here", "there"):
        picture(tmp_path / place / "a.png")
    assert scan_in(tmp_path, "here").fingerprint == scan_in(tmp_path, "there").fingerprint


def test_the_fingerprint_of_a_missing_folder_is_constant(tmp_path: Path) -> None:
    got = {folder_fingerprint(DataConfig(folder=name), [tmp_path]) for name in ("nope", "", "../x")}
    assert len(got) == 1


def test_other_files_do_not_change_the_folder_fingerprint(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    before = folder_fingerprint(DataConfig(folder="."), [tmp_path])
    (tmp_path / "notes.md").write_text("x", encoding="utf-8")
    (tmp_path / ".DS_Store").write_bytes(b"x")
    assert folder_fingerprint(DataConfig(folder="."), [tmp_path]) == before
