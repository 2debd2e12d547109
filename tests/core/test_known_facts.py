"""A folder that was scanned before: nothing is decoded again, and nothing old is taken for what is there now."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lowvram_lora.config import DataConfig
from lowvram_lora.data import scan as scanning
from lowvram_lora.data.scan import Dataset, scan


def write_pictures(folder: Path) -> None:
    folder.mkdir()
    source = np.random.default_rng(0)
    for number, suffix in enumerate(("png", "jpg", "webp", "gif", "png")):
        channels = 4 if number == 4 else 3
        pixels = source.integers(0, 256, (64 + 8 * number, 80, channels), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"猫 {number}.{suffix}")
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    (folder / "cut.jpg").write_bytes((folder / "猫 1.jpg").read_bytes()[:300])


def scanned(folder: Path, store: Path | None, **config: object) -> Dataset:
    return scan(DataConfig(folder=str(folder), bucket_step=8, **config), [folder], store_root=store)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pictures(tmp_path / "数据 set")
    return tmp_path / "数据 set"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the pictures that are decoded, as they are."""
    names: list[str] = []
    inspect = scanning.inspect

    def counted(data: bytes, path: Path, *more: object) -> object:
        names.append(path.name)
        return inspect(data, path, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(scanning, "inspect", counted)
    return names


def test_a_second_scan_finds_the_same_and_decodes_no_whole_picture(
    folder: Path, store: Path, looked_at: list[str]
) -> None:
    first = scanned(folder, store, masks="alpha")
    assert first == scanned(folder, None, masks="alpha")
    assert sorted({*looked_at}) == sorted(path.name for path in folder.iterdir())
    looked_at.clear()
    second = scanned(folder, store, masks="alpha")
    assert second == first
    # What is damaged is looked at each time: it may be another decoder's turn.
    assert looked_at == ["cut.jpg"]
    assert [skip.name for skip in second.skipped] == ["cut.jpg"]


def test_only_what_changed_is_decoded_and_a_new_caption_is_read(
    folder: Path, store: Path, looked_at: list[str]
) -> None:
    scanned(folder, store)
    looked_at.clear()
    Image.new("RGB", (96, 72), "green").save(folder / "猫 0.png")
    (folder / "猫 1.txt").write_text("一只猫", encoding="utf-8")
    again = {sample.name: sample for sample in scanned(folder, store).samples}
    assert sorted(looked_at) == ["cut.jpg", "猫 0.png"]
    assert again["猫 0.png"].image_size_px == (72, 96)
    assert again["猫 1.jpg"].captions == ("一只猫",)


def test_a_copy_elsewhere_is_known_by_its_content(folder: Path, store: Path, looked_at: list[str]) -> None:
    scanned(folder, store)
    looked_at.clear()
    (folder / "again").mkdir()
    (folder / "again" / "copy.png").write_bytes((folder / "猫 0.png").read_bytes())
    assert len(scanned(folder, store).samples) == 7
    assert looked_at == ["cut.jpg"]


@pytest.mark.parametrize("wrong", ["", "0x64", "64x-1", "99999999x99999999", "64x64 moving", "x", None, 1.5, [], {}])
def test_facts_that_nobody_wrote_so_are_found_anew(
    wrong: object, folder: Path, store: Path, looked_at: list[str]
) -> None:
    first = scanned(folder, store)
    for shard in store.rglob("*.json"):
        rows = json.loads(shard.read_text(encoding="utf-8"))
        shard.write_text(json.dumps({digest: {"facts": wrong} for digest in rows}), encoding="utf-8")
    looked_at.clear()
    assert scanned(folder, store) == first
    assert len(looked_at) == 7


def test_what_was_found_before_a_cancel_is_kept(folder: Path, store: Path, looked_at: list[str]) -> None:
    class StoppedError(Exception):
        pass

    def stop(done: int, total: int, text: str) -> None:
        if done == total:
            raise StoppedError

    with pytest.raises(StoppedError):
        scan(DataConfig(folder=str(folder), bucket_step=8), [folder], stop, store_root=store)
    looked_at.clear()
    scanned(folder, store)
    assert looked_at == ["cut.jpg"]


def test_a_store_that_cannot_be_written_costs_nothing_but_time(folder: Path, store: Path) -> None:
    store.write_text("a file where the folder should be", encoding="utf-8")
    assert scanned(folder, store) == scanned(folder, None)
