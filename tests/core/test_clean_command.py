"""Cleaning the cache by hand, as a person types it in the pack's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowvram_lora.__main__ import main
from lowvram_lora.data.lock import Lease
from lowvram_lora.data.store import generation, path_of, write
from lowvram_lora.units import GIB

ROOT = Path(__file__).resolve().parents[2]
NUM = 4


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    root = tmp_path / "user 图" / "cache"
    for number in range(NUM):
        path = path_of(root, "latents", f"{number:02x}" * 32)
        write(path, {"latents": torch.full((64,), float(number))}, {})
        os.utime(path, (number, number))
    generation(root)
    (root / "mine.txt").write_text("not an encoding", encoding="utf-8")
    return root


def typed(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lowvram_lora", *map(str, arguments)]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8", check=False
    )


def there(root: Path) -> list[int]:
    return [n for n in range(NUM) if path_of(root, "latents", f"{n:02x}" * 32).is_file()]


def test_without_a_limit_it_says_what_there_is_and_removes_nothing(cache: Path) -> None:
    said = typed("clean", "--cache", cache)
    assert said.returncode == 0 and str(cache) in said.stdout
    assert there(cache) == list(range(NUM))


def test_what_was_not_used_for_the_longest_time_goes_first_and_nothing_but_encodings_goes(cache: Path) -> None:
    num_bytes = path_of(cache, "latents", "00" * 32).stat().st_size
    before = generation(cache)
    assert main(["clean", "--cache", str(cache), "--limit-gb", str(2.5 * num_bytes / GIB)]) == 0
    assert there(cache) == [2, 3]
    # So that Build Tiered Cache runs again.
    assert generation(cache) != before
    assert main(["clean", "--cache", str(cache), "--limit-gb", "0"]) == 0
    assert there(cache) == []
    assert (cache / "mine.txt").is_file()


def test_what_a_running_process_reads_stays(cache: Path) -> None:
    lease = Lease(cache, [path_of(cache, "latents", "01" * 32).name])
    assert main(["clean", "--cache", str(cache), "--limit-gb", "0"]) == 0
    assert there(cache) == [1]
    lease.release()


def test_a_folder_that_is_no_cache_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", "--cache", str(tmp_path), "--limit-gb", "0"]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path) in said and "--cache" in said


def test_what_the_cache_has_not_written_is_never_removed(cache: Path, tmp_path: Path) -> None:
    own = tmp_path / "precious.safetensors"
    strangers = [
        cache / "text" / "t5" / "model-00001.safetensors",
        cache / "latents" / "00" / "notes.safetensors",
        cache / "latents" / "00" / "notes.tmp",
        tmp_path / "elsewhere" / f"{'ee' * 16}.safetensors",
    ]
    for path in (own, *strangers):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
        os.utime(path, (0, 0))
    (cache / "latents" / "ee").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (cache / "latents" / "00" / f"{'00' * 15}11.safetensors").symlink_to(own)
    assert main(["clean", "--cache", str(cache), "--limit-gb", "0"]) == 0
    assert there(cache) == []
    assert all(path.read_bytes() == b"mine" for path in (own, *strangers))


@pytest.mark.parametrize("limit", ["1e305", "-1", "nan", "inf", "many"])
def test_a_limit_that_is_none_is_refused(cache: Path, limit: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["clean", "--cache", str(cache), f"--limit-gb={limit}"])
    assert ended.value.code == 2
    assert there(cache) == list(range(NUM))
