"""The cache on a real disk, under several real processes: killed, at once, without room, without rights, cleaned."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from lowvram_lora.config import DataConfig
from lowvram_lora.data.cache import BuildReport, CacheIndex, CachePlan, build, generation
from lowvram_lora.data.cleaning import clean
from lowvram_lora.data.draw import Draw
from lowvram_lora.data.lock import Lease, claimed
from lowvram_lora.data.scan import scan
from lowvram_lora.data.store import path_of, peek, read, write
from lowvram_lora.data.tiers import TieredCache
from lowvram_lora.errors import CacheMissError, PathError
from lowvram_lora.fakes import FakeCodec, FakeTextEncoder
from lowvram_lora.ports import EncodedPictures

ROOT = Path(__file__).resolve().parents[2]
NUM = 8
NOBODY = 65534


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "my 图"
    (folder / "set").mkdir(parents=True)
    for number in range(NUM):
        Image.new("RGB", (64, 64), (20 * number, 100, 200)).save(folder / "set" / f"{number}.png")
        (folder / "set" / f"{number}.txt").write_text(f"图 {number}", encoding="utf-8")
    return folder


def built(base: Path, plan: CachePlan | None = None, pictures: str = "set") -> tuple[CacheIndex, BuildReport]:
    dataset = scan(DataConfig(folder=pictures, resolution=64), [base])
    return build(dataset, FakeCodec(), FakeTextEncoder(), base / "cache", lambda *_: None, plan)


def start(base: Path, log: Path, seconds: float, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("build_child.py")), str(base), str(log), str(seconds)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    return subprocess.Popen([*command, *more], env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8")


def wait_for(log: Path, num_lines: int, process: subprocess.Popen[str]) -> None:
    while len(lines(log)) < num_lines:
        assert process.poll() is None
        time.sleep(0.02)


def lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def files(base: Path) -> list[Path]:
    return sorted((base / "cache").rglob("*.safetensors"))


def contents(base: Path) -> dict[str, list[tuple[str, bytes]]]:
    """Return the tensors in each file; the order of a header's fields is free."""
    stored = {path.name: read(path).tensors for path in files(base)}
    return {name: sorted((key, t.numpy().tobytes()) for key, t in tensors.items()) for name, tensors in stored.items()}


def assert_right(base: Path) -> None:
    """Every file is whole and holds what a build from nothing puts there."""
    index, _ = built(base)
    cache = TieredCache(index)
    for number in range(NUM):
        assert cache.latents(Draw(number))[0, 0, 0] == pytest.approx(20 * number / 255 * 2 - 1, abs=1e-6)
        cache.conditioning(Draw(number))
    cache.close()


def test_two_builds_at_once_make_each_picture_once_and_a_right_cache(base: Path) -> None:
    logs = [base / "first.log", base / "second.log"]
    processes = [start(base, log, 0.3) for log in logs]
    assert [process.wait(600) for process in processes] == [0, 0]
    encoded = [line for log in logs for line in lines(log)]
    assert len(encoded) == len(set(encoded)) == NUM
    assert len(files(base)) == 2 * NUM + 1
    assert built(base)[1].latents_read == NUM
    assert_right(base)


def test_a_build_that_was_killed_leaves_a_right_cache_and_no_lock(base: Path) -> None:
    log = base / "killed.log"
    process = start(base, log, 0.2)
    wait_for(log, 4, process)
    process.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    process.wait(600)
    assert all(peek(path) is not None for path in files(base))
    _, report = built(base)
    # The fourth was being encoded; the three before it are there.
    assert (report.latents_built, report.latents_read) == (NUM - 3, 3)
    assert_right(base)


def test_what_another_process_is_encoding_is_waited_for_and_waiting_can_be_cancelled(base: Path) -> None:
    dataset = scan(DataConfig(folder="set", resolution=64), [base])
    key = built(base)[0].entries[0].latents_key
    path_of(base / "cache", "latents", key).unlink()
    said: list[str] = []

    def stop(_done: int, _total: int, text: str) -> None:
        said.append(text)
        if "waiting" in text:
            raise KeyboardInterrupt

    with claimed(base / "cache", key) as is_ours, pytest.raises(KeyboardInterrupt):
        assert is_ours
        build(dataset, FakeCodec(), FakeTextEncoder(), base / "cache", stop)
    # All others were done before anything was waited for.
    assert len(said) == 2 * NUM + 1
    assert built(base)[1].latents_built == 1


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are POSIX")
def test_a_disk_that_fills_ends_in_a_sentence_and_a_cache_that_is_still_right(base: Path) -> None:
    size = path_of(base / "cache", "latents", built(base)[0].entries[0].latents_key).stat().st_size
    whole = contents(base)
    for path in files(base):
        path.unlink()
    process = start(base, base / "log", 0.0, str(size - 100))
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 3
    assert "can't be written" in said and "Free some disk space" in said
    left = contents(base)
    assert left == {name: whole[name] for name in left}
    assert not list((base / "cache").rglob("*.tmp"))
    assert_right(base)
    assert contents(base) == whole


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Take the rights to write into ``folder`` away, also from root: it is somebody else meanwhile."""
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    is_root = os.geteuid() == 0
    try:
        for each in folders:
            each.chmod(0o555)
        if is_root:
            os.seteuid(NOBODY)
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for each in folders:
            each.chmod(0o755)


@pytest.mark.skipif(sys.platform == "win32", reason="rights of folders are POSIX")
def test_a_folder_that_can_only_be_read_is_read_and_named_when_it_must_be_written(base: Path) -> None:
    # pytest's own folders are closed to others.
    with tempfile.TemporaryDirectory() as opened:
        shutil.copytree(base, opened, dirs_exist_ok=True)
        folder = Path(opened)
        folder.chmod(0o755)
        built(folder)
        with read_only(folder / "cache"):
            index, report = built(folder)
            assert report.latents_read == NUM
            cache = TieredCache(index)
            cache.latents(Draw(0))
            cache.close()
        (folder / "set" / "0.txt").write_text("another caption", encoding="utf-8")
        with read_only(folder / "cache"), pytest.raises(PathError, match="can't be written"):
            built(folder)
        assert_right(folder)


def test_a_cache_whose_place_is_a_file_is_named(base: Path) -> None:
    (base / "cache").write_text("not a folder", encoding="utf-8")
    with pytest.raises(PathError, match="cache"):
        built(base)


@pytest.mark.parametrize("where", [-1, -40])
def test_a_file_that_lost_bytes_without_getting_shorter_is_never_read_and_is_rebuilt(base: Path, where: int) -> None:
    """As after a power cut: the name is there, and blocks of it are zeros."""
    index, _ = built(base)
    path = path_of(index.root, "latents", index.entries[2].latents_key)
    data = bytearray(path.read_bytes())
    data[where] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(CacheMissError, match=r"2\.png"):
        TieredCache(index).latents(Draw(2))
    assert built(base)[1].latents_built == 1
    assert_right(base)


def test_a_file_of_an_older_version_without_a_checksum_is_read(base: Path) -> None:
    from safetensors.torch import save_file

    index, _ = built(base)
    path = path_of(index.root, "latents", index.entries[0].latents_key)
    expected = TieredCache(index).latents(Draw(0))
    save_file({"latents": expected.clone()}, path)
    assert torch.equal(TieredCache(index).latents(Draw(0)), expected)


def test_names_are_short_and_say_nothing_of_the_pictures(base: Path) -> None:
    index, _ = built(base)
    relative = [str(path.relative_to(index.root)) for path in files(base)]
    assert all(len(name) <= 64 and name.isascii() for name in relative)


def total(base: Path) -> int:
    return sum(path.stat().st_size for path in files(base))


def aged(base: Path, days: float, *paths: Path) -> None:
    for path in paths or files(base):
        os.utime(path, (time.time() - 86400 * days,) * 2)


@pytest.fixture
def other(base: Path) -> Path:
    """A second dataset in the same cache."""
    (base / "other").mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64), (10, 20 * number, 250)).save(base / "other" / f"{number}.png")
    return base


def test_the_least_recently_used_go_first_and_never_those_of_the_running_build(other: Path) -> None:
    built(other, pictures="other")
    theirs = contents(other)
    aged(other, 3)
    index, _ = built(other)
    aged(other, 5, *(path_of(index.root, kind, key) for entry in index.entries for kind, key in entry.files()))
    before = generation(index.root)
    limit = total(other) - 1
    _, report = built(other, CachePlan(disk_limit_bytes=limit))
    assert report.cleaned.num_removed == 1
    assert report.cleaned.total_bytes == total(other) <= limit
    assert "1 encodings of other datasets removed" in str(report)
    assert generation(index.root) != before
    assert len(theirs.keys() - contents(other).keys()) == 1
    assert_right(other)
    assert built(other, pictures="other")[1].latents_built + built(other, pictures="other")[1].texts_built <= 1


def test_a_limit_below_what_the_dataset_needs_removes_all_others_and_says_so(other: Path) -> None:
    built(other, pictures="other")
    _, report = built(other, CachePlan(disk_limit_bytes=1))
    assert report.cleaned.total_bytes == report.disk_bytes == total(other)
    assert "above the limit" in str(report) and "disk_limit_gb" in str(report)
    assert_right(other)


def test_without_a_limit_nothing_is_removed(other: Path) -> None:
    built(other, pictures="other")
    before = contents(other)
    aged(other, 1000)
    _, report = built(other)
    assert before.keys() <= contents(other).keys()
    assert report.cleaned.num_removed == 0


def test_what_a_running_training_reads_is_not_cleaned_away(other: Path) -> None:
    index, _ = built(other, pictures="other")
    cache = TieredCache(index)
    cache.latents(Draw(0))
    _, report = built(other, CachePlan(disk_limit_bytes=1))
    assert report.cleaned.num_removed == 0
    cache.close()
    assert built(other, CachePlan(disk_limit_bytes=1))[1].cleaned.num_removed > 0


def test_what_a_running_build_has_made_is_not_cleaned_away(base: Path) -> None:
    class Cleaning(FakeCodec):
        def encode(self, pixels_BHWC: torch.Tensor) -> EncodedPictures:
            clean(base / "cache", 1)
            return super().encode(pixels_BHWC)

    dataset = scan(DataConfig(folder="set", resolution=64), [base])
    index, _ = build(dataset, Cleaning(), FakeTextEncoder(), base / "cache", lambda *_: None)
    assert all(peek(path_of(index.root, kind, key)) for entry in index.entries for kind, key in entry.files())
    assert clean(base / "cache", 1).num_removed == len(index.file_names())


def test_a_lease_ends_with_its_process(tmp_path: Path) -> None:
    path = path_of(tmp_path, "latents", "ab" * 32)
    write(path, {"latents": torch.zeros(4)}, {})
    code = (
        "import sys, time; from pathlib import Path; from lowvram_lora.data.lock import Lease\n"
        "lease = Lease(Path(sys.argv[1]), [sys.argv[2]]); print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), path.name],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline().strip() == b"held"
    assert clean(tmp_path, 1).num_removed == 0
    process.kill()
    process.wait(600)
    process.stdout.close()
    assert clean(tmp_path, 1).num_removed == 1
    assert not path.exists()
    assert not list((tmp_path / "in_use").glob("*.txt"))


def test_a_lease_that_nobody_holds_any_more_ends(tmp_path: Path) -> None:
    path = path_of(tmp_path, "latents", "ab" * 32)
    write(path, {"latents": torch.zeros(4)}, {})
    lease = Lease(tmp_path, [path.name])
    assert clean(tmp_path, 1).num_removed == 0
    del lease
    assert clean(tmp_path, 1).num_removed == 1


def test_what_a_process_that_died_left_half_written_goes_with_the_next_build(base: Path) -> None:
    index, _ = built(base)
    folder = path_of(index.root, "latents", index.entries[0].latents_key).parent
    old, new = folder / "abcdef01.12345678.tmp", folder / "abcdef01.87654321.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    aged(base, 2, old)
    built(base)
    assert not old.exists() and new.exists()


def test_files_of_the_cache_hold_plain_tensors_only(base: Path) -> None:
    """i12: nothing in it is ever unpickled."""
    built(base)
    for path in files(base):
        with safe_open(path, framework="pt") as file:
            assert set(file.keys())


def test_a_file_of_which_somebody_emptied_the_metadata_is_read_as_one_without(tmp_path: Path) -> None:
    header = b'{"__metadata__":null,"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert read(path).metadata == {}
