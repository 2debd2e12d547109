"""Large folders and hostile ones: on threads, in bounded memory, to be cancelled, and always with a sentence."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

import numpy as np
import psutil
import pytest
from PIL import Image, ImageFile

from lowvram_lora.config import DataConfig
from lowvram_lora.data import scan as scanning
from lowvram_lora.data.ordered import in_order
from lowvram_lora.data.scan import Dataset, folder_fingerprint, report, scan
from lowvram_lora.errors import ConfigError, DatasetError

ON_POSIX = pytest.mark.skipif(os.name != "posix", reason="no such files there")


def picture(path: Path, size: tuple[int, int] = (64, 64), colour: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour % 256, colour // 256, 7)).save(path)
    return path


def scan_in(root: Path, **options: object) -> Dataset:
    return scan(DataConfig(folder=".", **options), [root])


def reasons(dataset: Dataset) -> dict[str, str]:
    return {skip.name: skip.reason for skip in dataset.skipped}


def write_everything(root: Path) -> None:
    for number in range(40):
        picture(root / f"set {number % 3}" / f"猫 {number}.png", colour=number)
        (root / f"set {number % 3}" / f"猫 {number}.txt").write_text(f"a, b, {number}", encoding="utf-8")
    (root / "cut.png").write_bytes((root / "set 0" / "猫 0.png").read_bytes()[:50])
    (root / "notes.md").write_text("x", encoding="utf-8")
    (root / "unknown").write_text("x", encoding="utf-8")
    (root / "metadata.jsonl").write_text('{"file_name": "gone.png", "text": "x"}\nbroken', encoding="utf-8")


def test_the_result_is_the_same_on_any_number_of_threads(tmp_path: Path) -> None:
    write_everything(tmp_path)
    config = DataConfig(
        folder=".", caption_variants=3, shuffle_tags=True, validation_share=0.2, image_variants=3, flip=True
    )
    results = [scan(config, [tmp_path], threads=threads) for threads in (1, 2, 7, 1)]
    assert all(result == results[0] for result in results)
    assert len({report(result) for result in results}) == 1
    assert len(results[0].samples) == 40
    assert set(reasons(results[0])) == {"cut.png"}


def test_progress_counts_every_file_in_order(tmp_path: Path) -> None:
    write_everything(tmp_path)
    calls: list[tuple[int, int, str]] = []
    scan(DataConfig(folder="."), [tmp_path], lambda *call: calls.append(call), threads=3)
    assert [(done, total) for done, total, _ in calls] == [(done, 42) for done in range(1, 43)]
    assert "cut.png" in calls[0][2]


class Cancelled(BaseException):
    """As the newest hosts raise it: no ordinary exception."""


@pytest.mark.parametrize("threads", [1, 4])
def test_cancel_ends_the_scan_and_leaves_the_process_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    for number in range(200):
        picture(tmp_path / f"{number}.png", (8, 8), number)
    read: list[Path] = []
    plain = scanning.inspect
    monkeypatch.setattr(scanning, "inspect", lambda data, path, large: read.append(path) or plain(data, path, large))
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)

    def cancel(done: int, total: int, text: str) -> None:
        if done == 10:
            raise Cancelled

    with pytest.raises(Cancelled):
        scan(DataConfig(folder="."), [tmp_path], cancel, threads=threads)
    num_read = len(read)
    assert num_read < 60
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True
    picture(tmp_path / "later" / "x.png")
    assert len(read) == num_read


def test_few_results_wait_and_few_calls_run_at_once() -> None:
    lock, running, most_running, started = Lock(), 0, 0, 0

    def work(item: int) -> int:
        nonlocal running, most_running, started
        with lock:
            running, started = running + 1, started + 1
            most_running = max(most_running, running)
        with lock:
            running -= 1
        return item

    ahead = []
    for position, item in enumerate(in_order(work, range(500), 3)):
        assert item == position
        ahead.append(started - position)
    assert most_running <= 3
    assert max(ahead) <= 13


def test_an_error_in_a_thread_comes_out_in_its_place() -> None:
    def work(item: int) -> int:
        if item == 5:
            raise KeyError(item)
        return item

    got = []
    with pytest.raises(KeyError):
        for item in in_order(work, range(100), 4):
            got.append(item)
    assert got == [0, 1, 2, 3, 4]


def test_memory_does_not_grow_with_the_pictures_read(tmp_path: Path) -> None:
    """c12: all of them together are more than half a gigabyte once decoded."""
    first = picture(tmp_path / "0.png", (4000, 3000))
    for number in range(1, 16):
        os.link(first, tmp_path / f"{number}.png")
    process = psutil.Process()
    before = process.memory_info().rss
    seen: list[int] = []
    scan(DataConfig(folder="."), [tmp_path], lambda *_: seen.append(process.memory_info().rss), threads=2)
    assert max(seen) - before < 200 * 2**20


def test_large_pictures_are_decoded_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowvram_lora.data.pixels.LARGE_PX", 1000)
    entered: list[int] = []

    class Gate:
        def __enter__(self) -> None:
            entered.append(1)

        def __exit__(self, *_: object) -> None:
            pass

    for name, size in {"small.bmp": (8, 8), "large.bmp": (200, 200), "plain.jpg": (200, 200)}.items():
        path = picture(tmp_path / name, size)
        scanning.inspect(path.read_bytes(), path, Gate())
    assert len(entered) == 1
    Image.new("RGB", (200, 200)).save(tmp_path / "whole.jpg", progressive=True)
    scanning.inspect((tmp_path / "whole.jpg").read_bytes(), "whole.jpg", Gate())
    assert len(entered) == 2


def test_a_folder_of_100000_files_is_listed_with_a_fixed_number_of_lookups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked of the system for each file is a constant: links are only followed where there are links."""
    picture(tmp_path / "a.png")
    first = tmp_path / "0.log"
    first.touch()
    # Names of one file: a new file each would take longer, and is listed no differently.
    for number in range(1, 100_000):
        if number % 20_000 == 0:
            first = tmp_path / f"first {number}.log"
            first.touch()
        os.link(first, tmp_path / f"{number}.log")
    resolved: list[Path] = []
    plain = Path.resolve
    monkeypatch.setattr(Path, "resolve", lambda self, strict=False: resolved.append(self) or plain(self, strict))
    dataset = scan_in(tmp_path)
    assert [sample.name for sample in dataset.samples] == ["a.png"]
    assert "not read: 100004 .log" in dataset.notes
    assert len(resolved) < 20


def test_a_folder_of_broken_files_gives_a_message_one_can_read(tmp_path: Path) -> None:
    for number in range(500):
        (tmp_path / f"{number}.png").write_bytes(b"x")
    with pytest.raises(DatasetError) as caught:
        scan_in(tmp_path)
    assert len(caught.value.problems) < 150
    assert "and 400 more" in caught.value.problems[-1]
    picture(tmp_path / "good.png")
    text = report(scan_in(tmp_path))
    assert "500 files skipped" in text
    assert "and 400 more" in text


def test_many_cropped_pictures_make_few_lines(tmp_path: Path) -> None:
    for number in range(50):
        picture(tmp_path / f"{number}.png", (640, 64), number)
    assert len(report(scan_in(tmp_path)).splitlines()) < 20


def test_a_very_long_picture_is_used_and_its_loss_told(tmp_path: Path) -> None:
    picture(tmp_path / "long.jpg", (30_000, 200))
    dataset = scan_in(tmp_path)
    assert dataset.samples[0].image_size_px == (200, 30_000)
    assert any("long.jpg (30000x200)" in note and "98% of it" in note for note in dataset.notes)
    wide = scan_in(tmp_path, max_aspect=8.0).samples[0].bucket_px
    assert wide[1] > 3 * wide[0]


@ON_POSIX
def test_a_pipe_is_named_and_never_opened(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    os.mkfifo(tmp_path / "pipe.png")
    os.mkfifo(tmp_path / "a.txt")
    os.mkfifo(tmp_path / "metadata.jsonl")
    dataset = scan_in(tmp_path)
    assert reasons(dataset) == dict.fromkeys(
        ("a.txt", "metadata.jsonl", "pipe.png"), "not a file, or a link to nothing"
    )
    assert folder_fingerprint(DataConfig(folder="."), [tmp_path])


@pytest.fixture
def public() -> Iterator[Path]:
    """Return a folder below which a user without rights may look."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def without_rights() -> Iterator[None]:
    """Let the test be a user whom permissions hold back: root is not."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield
    os.seteuid(before)


@ON_POSIX
def test_what_may_not_be_read_is_named(public: Path, request: pytest.FixtureRequest) -> None:
    for name in ("a.png", "locked.png", "locked/b.png", "captioned.png"):
        picture(public / name)
    (public / "captioned.txt").write_text("a cat", encoding="utf-8")
    (public / "metadata.csv").write_text("file_name,text\na.png,x\n", encoding="utf-8")
    for name in ("locked.png", "locked", "captioned.txt", "metadata.csv"):
        (public / name).chmod(0)
    request.addfinalizer(lambda: (public / "locked").chmod(0o755))
    request.getfixturevalue("without_rights")
    dataset = scan_in(public)
    assert [sample.name for sample in dataset.samples] == ["a.png", "captioned.png"]
    assert reasons(dataset) == {
        "locked": "this folder can't be opened (Permission denied)",
        "locked.png": "can't be read (Permission denied)",
    }
    assert any("captioned.png can't be read" in note for note in dataset.notes)
    assert any("metadata.csv can't be read" in note for note in dataset.notes)


@ON_POSIX
def test_a_whole_folder_that_may_not_be_read_is_a_sentence(public: Path, request: pytest.FixtureRequest) -> None:
    picture(public / "set" / "a.png")
    (public / "set").chmod(0)
    request.addfinalizer(lambda: (public / "set").chmod(0o755))
    request.getfixturevalue("without_rights")
    with pytest.raises(DatasetError, match="can't be opened"):
        scan(DataConfig(folder="set"), [public])


def test_pictures_are_known_by_content_whatever_they_are_called(tmp_path: Path) -> None:
    kinds = {"a.jpg": "PNG", "b.dat": "JPEG", "no ending": "WEBP", "c.PART": "GIF", "猫.图片": "BMP", "d.tga": "TGA"}
    for name, kind in kinds.items():
        Image.new("RGB", (64, 64)).save(tmp_path / name, kind)
    for name in ("words", "words.dat", "LICENSE"):
        (tmp_path / name).write_text("no picture", encoding="utf-8")
    (tmp_path / "film.png").write_bytes(b"\0\0\0\x18ftypmp42" + b"\0" * 99)
    dataset = scan_in(tmp_path)
    assert {sample.name for sample in dataset.samples} == set(kinds)
    assert set(reasons(dataset)) == {"film.png"}
    assert "not read: 1 .dat, 2 no ending" in dataset.notes
    (tmp_path / "no ending").unlink()
    assert scan_in(tmp_path).fingerprint != dataset.fingerprint


def test_a_file_far_larger_than_any_picture_is_not_read(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(scanning.MAX_FILE_BYTES + 1)
    with (tmp_path / "huge.dat").open("wb") as file:
        file.truncate(scanning.MAX_FILE_BYTES + 1)
    dataset = scan_in(tmp_path)
    assert set(reasons(dataset)) == {"huge.png"}
    assert "too large for a picture" in reasons(dataset)["huge.png"]


def test_captions_no_person_wrote_are_not_read(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        picture(tmp_path / name)
    for name in ("a.txt", "metadata.jsonl"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 33)
    dataset = scan_in(tmp_path)
    assert [sample.caption for sample in dataset.samples] == ["", ""]
    assert any("a.png is larger than" in note for note in dataset.notes)
    assert any("metadata.jsonl is larger than" in note for note in dataset.notes)


def test_without_upscaling_small_pictures_keep_their_size_and_tiny_ones_are_named(tmp_path: Path) -> None:
    for name, size in {"large": (900, 700), "small": (300, 200), "tiny": (63, 500)}.items():
        picture(tmp_path / f"{name}.png", size)
    dataset = scan_in(tmp_path, upscale=False)
    assert {sample.name: sample.bucket_px for sample in dataset.samples} == {
        "large.png": scan_in(tmp_path).samples[0].bucket_px,
        "small.png": (192, 256),
    }
    assert "turn upscale on" in reasons(dataset)["tiny.png"]
    assert not any("scaled up" in note for note in dataset.notes)


def test_limits_that_leave_no_bucket_are_a_setting_to_change(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="min_side"):
        scan_in(tmp_path, min_side=576)
    assert scan_in(tmp_path, min_side=448, max_side=512).samples[0].bucket_px == (512, 512)


def test_every_setting_that_decides_training_is_in_the_fingerprint(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (64, 64, 4), dtype=np.uint8)
    for name in "abcd":
        Image.fromarray(values).save(tmp_path / f"{name}.png")
        values = values + 1
    changes: list[dict[str, object]] = [
        {"caption_dropout": 0.1},
        {"repeats": 2},
        {"image_variants": 2, "flip": True},
        {"masks": "alpha"},
        {"validation_share": 0.3},
        {"max_side": 64, "resolution": 64},
        {"missing_captions": "folder name"},
    ]
    found = [scan_in(tmp_path, **change).fingerprint for change in [{}, *changes]]
    assert len(set(found)) == len(found)
