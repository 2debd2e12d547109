import errno
import hashlib
import json
import os
import shutil
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from lowvram_lora.config import ComplexityConfig, DataConfig
from lowvram_lora.data import measuring
from lowvram_lora.data.complexity import score
from lowvram_lora.data.detail import MEASURES
from lowvram_lora.data.likeness import near_duplicates
from lowvram_lora.data.measured import MeasuredStore
from lowvram_lora.data.measuring import LIKENESS, likenesses, measure
from lowvram_lora.data.scan import Dataset, scan
from lowvram_lora.errors import PathError

ALL = (*MEASURES, LIKENESS)


def make_dataset(folder: Path, count: int = 6, background: str = "#ffffff") -> Dataset:
    folder.mkdir(exist_ok=True)
    source = np.random.default_rng(0)
    for number in range(count):
        pixels = source.integers(0, 40 * (number + 1) % 256 + 2, (48, 64, 4), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"img{number}.png")
    return scan(DataConfig(folder=str(folder), bucket_step=8, background=background), [folder])


def lose_pictures(dataset: Dataset) -> None:
    for sample in dataset.samples:
        sample.image.unlink()


def shards(store: Path) -> list[Path]:
    return sorted(store.rglob("*.json"))


def test_a_picture_that_was_measured_before_is_not_read_again(tmp_path: Path) -> None:
    dataset, store = make_dataset(tmp_path / "中文 data"), tmp_path / "store"
    first = measure(dataset, ALL, store)
    lose_pictures(dataset)
    assert measure(dataset, ALL, store) == first
    assert [len(row) for row in first] == [len(ALL)] * 6


def test_a_copy_under_another_name_is_not_read_again(tmp_path: Path) -> None:
    dataset, store = make_dataset(tmp_path / "a"), tmp_path / "store"
    first = measure(dataset, ALL, store)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copied = scan(DataConfig(folder=str(tmp_path / "b"), bucket_step=8), [tmp_path])
    lose_pictures(copied)
    assert measure(copied, ALL, store) == first


def test_another_background_is_measured_anew(tmp_path: Path) -> None:
    white, store = make_dataset(tmp_path / "a"), tmp_path / "store"
    black = make_dataset(tmp_path / "a", background="#000000")
    assert measure(white, ALL, store) != measure(black, ALL, store) == measure(black, ALL)


def test_a_measure_that_is_asked_for_later_is_added_to_the_others(tmp_path: Path) -> None:
    dataset, store = make_dataset(tmp_path / "a"), tmp_path / "store"
    measure(dataset, ["entropy"], store)
    measure(dataset, ["edges", LIKENESS], store)
    lose_pictures(dataset)
    assert [set(row) for row in measure(dataset, ["entropy", "edges", LIKENESS], store)] == [
        {"entropy", "edges", LIKENESS}
    ] * 6


def test_scores_are_there_once_pictures_were_looked_at_for_copies(tmp_path: Path) -> None:
    dataset, store = make_dataset(tmp_path / "a"), tmp_path / "store"
    assert all(set(row) == {LIKENESS} for row in measure(dataset, [LIKENESS], store))
    lose_pictures(dataset)
    scores = [sample.complexity.score for sample in score(dataset, ComplexityConfig(), store).samples]
    assert len(set(scores)) == 6


def large_photo() -> Image.Image:
    """Drifting colour and grain, 1600 pixels wide."""
    source = np.random.default_rng(7)
    coarse = Image.fromarray(source.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize((1600, 1200))
    fine = Image.fromarray(source.integers(0, 256, (600, 800, 3), dtype=np.uint8)).resize((1600, 1200))
    return Image.blend(coarse, fine, 0.2)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("turn", [1, 6])
def test_a_photo_measures_nearly_the_same_as_jpeg_and_as_png(progressive: bool, turn: int, tmp_path: Path) -> None:
    """The JPEG is decoded at a smaller size; the PNG can't be."""
    (tmp_path / "a").mkdir()
    exif = Image.Exif()
    exif[0x0112] = turn
    large_photo().save(tmp_path / "a" / "photo.jpg", quality=95, progressive=progressive, exif=exif)
    with Image.open(tmp_path / "a" / "photo.jpg") as photo:
        ImageOps.exif_transpose(photo).save(tmp_path / "a" / "photo.png")
    jpeg, png = measure(scan(DataConfig(folder=str(tmp_path / "a")), [tmp_path]), ALL)
    for name in MEASURES:
        assert jpeg[name] == pytest.approx(png[name], abs=0.01)
    assert near_duplicates(likenesses([jpeg, png])) == [[0, 1]]


def test_a_photo_that_is_cut_off_is_named_though_few_of_its_pixels_are_made(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "photo.jpg"
    large_photo().save(path, quality=95)
    dataset = scan(DataConfig(folder=str(tmp_path / "a")), [tmp_path])
    path.write_bytes(path.read_bytes()[:-20_000])
    cut = replace(dataset.samples[0], image_digest=hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(PathError, match=r"photo\.jpg.*cut off"):
        measure(replace(dataset, samples=(cut,)), ALL)


BAD_FILES = [
    b"",
    b"{",
    b"\xff\xfe\x00",
    b"[]",
    b"null",
    b"[" * 200_000,
    b'{"a": ' * 20_000,
    "rows: 7",
    "rows: [1]",
    'rows: {"entropy": "high", "edges": "x", "frequency": "y", "colours": "z", "likeness": "w"}',
    'rows: {"entropy": 7.0, "edges": -1.0, "frequency": NaN, "colours": Infinity, "likeness": "00"}',
    'rows: {"entropy": true, "edges": null, "frequency": [], "colours": {}, "likeness": 5.0}',
]


@pytest.mark.parametrize("bad", BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_damaged_store_is_ignored_and_made_anew(bad: bytes | str, tmp_path: Path) -> None:
    dataset, store = make_dataset(tmp_path / "a"), tmp_path / "store"
    expected = measure(dataset, ALL, store)
    for path in shards(store):
        if isinstance(bad, bytes):
            path.write_bytes(bad)
        else:
            row = bad.removeprefix("rows: ")
            rows = ", ".join(f'"{digest}": {row}' for digest in json.loads(path.read_bytes()))
            path.write_text(f"{{{rows}}}", encoding="utf-8")
    assert measure(dataset, ALL, store) == expected
    lose_pictures(dataset)
    assert measure(dataset, ALL, store) == expected


def test_a_store_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path, caplog) -> None:
    dataset, store = make_dataset(tmp_path / "a"), tmp_path / "store"
    store.write_text("a file where the folder should be", encoding="utf-8")
    assert measure(dataset, ALL, store) == measure(dataset, ALL)
    assert "not kept" in caplog.text


def test_a_full_disk_leaves_what_was_kept_and_no_half_file(tmp_path: Path, monkeypatch, caplog) -> None:
    small = make_dataset(tmp_path / "a", 3)
    store = tmp_path / "store"
    kept = measure(small, ALL, store)
    before = {path: path.read_bytes() for path in shards(store)}
    large = make_dataset(tmp_path / "a", 8)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert measure(large, ALL, store)[:3] == kept
    assert "No space left" in caplog.text
    assert {path: path.read_bytes() for path in shards(store)} == before
    assert list(store.rglob("*.tmp")) == []


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    rows = [{f"{number % 16:x}{writer}{number}": {"entropy": 0.5} for number in range(30)} for writer in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda own: MeasuredStore(tmp_path, "s").add(own), rows))
    everything = {digest: row for own in rows for digest, row in own.items()}
    assert MeasuredStore(tmp_path, "s").known(list(everything)) == everything


def test_what_was_measured_before_a_cancel_is_kept(tmp_path: Path) -> None:
    dataset, store = make_dataset(tmp_path / "a", 12), tmp_path / "store"

    def cancel(done: int, _total: int, _text: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(dataset, ComplexityConfig(), store, cancel)
    seen: list[int] = []
    score(dataset, ComplexityConfig(), store, lambda done, _total, _text: seen.append(done))
    assert seen[0] == 5


def test_many_pictures_are_kept_in_few_writes_and_each_is_kept(tmp_path: Path, monkeypatch) -> None:
    dataset, store = make_dataset(tmp_path / "a", 120), tmp_path / "store"
    sizes: list[int] = []
    add = MeasuredStore.add

    def counted(self: MeasuredStore, rows: dict) -> None:
        sizes.append(len(rows))
        add(self, rows)

    monkeypatch.setattr(MeasuredStore, "add", counted)
    monkeypatch.setattr(measuring, "_KEEP_EVERY", 2)
    first = measure(dataset, ["entropy"], store)
    assert sum(sizes) == 120
    # Each write costs as much as all that is there by then.
    assert sum(sum(sizes[: number + 1]) for number in range(len(sizes))) < 10 * 120
    # At any time less than a third of what was measured would be lost.
    assert all(size <= max(2, sum(sizes[:number]) / 3) for number, size in enumerate(sizes))
    lose_pictures(dataset)
    assert measure(dataset, ["entropy"], store) == first


def test_progress_counts_every_sample_once(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "a", 9)
    seen: list[tuple[int, int, str]] = []
    measure(dataset, ["entropy"], None, lambda *step: seen.append(step), num_threads=3)
    assert [step[:2] for step in seen] == [(number, 9) for number in range(1, 10)]
    assert [sample.name in text for sample, (_, _, text) in zip(dataset.samples, seen, strict=True)] == [True] * 9


def test_all_pictures_that_are_gone_or_changed_are_named_at_once(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "a")
    (tmp_path / "a" / "img1.png").unlink()
    (tmp_path / "a" / "img3.png").unlink()
    Image.new("RGB", (64, 64)).save(tmp_path / "a" / "img4.png")
    with pytest.raises(PathError) as caught:
        measure(dataset, ALL, tmp_path / "store")
    assert all(name in str(caught.value) for name in ("img1.png", "img3.png", "img4.png"))
    assert "queue again" in str(caught.value)


def test_measures_of_a_changed_picture_are_not_kept_under_its_old_content(tmp_path: Path) -> None:
    dataset, store = make_dataset(tmp_path / "a", 1), tmp_path / "store"
    original = (tmp_path / "a" / "img0.png").read_bytes()
    Image.new("RGB", (64, 64)).save(tmp_path / "a" / "img0.png")
    with pytest.raises(PathError):
        measure(dataset, ALL, store)
    (tmp_path / "a" / "img0.png").write_bytes(original)
    assert measure(dataset, ALL, store) == measure(dataset, ALL)


def test_no_more_pictures_are_in_memory_than_threads(tmp_path: Path, monkeypatch) -> None:
    dataset = make_dataset(tmp_path / "a", 40)
    alive: set[int] = set()
    most = 0
    decode = measuring.decode

    def counted(*arguments: object) -> object:
        nonlocal most
        picture = decode(*arguments)
        alive.add(id(picture.image))
        weakref.finalize(picture.image, alive.discard, id(picture.image))
        most = max(most, len(alive))
        return picture

    monkeypatch.setattr(measuring, "decode", counted)
    measure(dataset, ALL, None, num_threads=3)
    assert 1 <= most <= 3
    assert not alive


def test_threads_change_no_number(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "a", 20)
    assert measure(dataset, ALL, num_threads=4) == measure(dataset, ALL, num_threads=1)


def test_large_pictures_are_read_one_at_a_time(tmp_path: Path, monkeypatch) -> None:
    dataset = make_dataset(tmp_path / "a", 8)
    inside, most = 0, 0
    decode, lock = measuring.decode, threading.Lock()

    def counted(*arguments: object) -> object:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.02)
        try:
            return decode(*arguments)
        finally:
            with lock:
                inside -= 1

    monkeypatch.setattr(measuring, "decode", counted)
    monkeypatch.setattr(measuring, "_MAX_PX_UNDER_WAY", 48 * 64 * 2 - 1)
    measure(dataset, ALL, None, num_threads=4)
    assert most == 1


def test_a_picture_that_memory_has_no_room_for_is_named(tmp_path: Path, monkeypatch) -> None:
    dataset = make_dataset(tmp_path / "a", 2)

    def no_room(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(measuring, "small_copy", no_room)
    with pytest.raises(PathError, match=r"img0\.png.*memory"):
        measure(dataset, ALL)
