"""Images that other nodes made, as a dataset."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowvram_lora.config import DataConfig
from lowvram_lora.data.image_input import captions_for, write_images
from lowvram_lora.data.pixels import to_pixels
from lowvram_lora.data.scan import Dataset, scan
from lowvram_lora.errors import ConfigError, PathError


def batch(count: int = 3, channels: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 64, 64, channels), generator=generator).float() / 255


def dataset_of(folder: Path, root: Path, **options: object) -> Dataset:
    return scan(DataConfig(folder=str(folder), **options), [root])


def test_a_batch_becomes_a_dataset_with_the_same_pixels_and_order(tmp_path: Path) -> None:
    images = batch()
    with torch.inference_mode():
        folder = write_images(images.clone(), ("one", "two", "三"), tmp_path / "其他 nodes")
    dataset = dataset_of(folder, tmp_path)
    assert [sample.caption for sample in dataset.samples] == ["one", "two", "三"]
    for image, sample in zip(images, dataset.samples, strict=True):
        got = to_pixels(sample.image.read_bytes(), sample.image, (64, 64), "#ffffff")
        torch.testing.assert_close(got, image, atol=1e-6, rtol=0)


def test_more_than_nine_images_keep_their_order(tmp_path: Path) -> None:
    captions = [f"picture {number}" for number in range(12)]
    dataset = dataset_of(write_images(batch(12), captions, tmp_path), tmp_path)
    assert [sample.caption for sample in dataset.samples] == captions


def test_the_same_batch_is_written_once_and_another_caption_or_pixel_is_another_folder(tmp_path: Path) -> None:
    first = write_images(batch(), ("a", "b", "c"), tmp_path)
    stamp = first.stat().st_mtime_ns
    assert write_images(batch(), ("a", "b", "c"), tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    others = [write_images(batch(seed=1), ("a", "b", "c"), tmp_path), write_images(batch(), ("a", "b", "d"), tmp_path)]
    assert len({first, *others}) == 3
    digests = [
        [sample.image_digest for sample in dataset_of(folder, tmp_path).samples] for folder in (first, others[1])
    ]
    assert digests[0] == digests[1]


def test_a_write_that_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(PathError, match="No space left"):
        write_images(batch(), ("a", "b", "c"), tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []
    monkeypatch.undo()
    assert write_images(batch(), ("a", "b", "c"), tmp_path / "root").is_dir()


def test_images_without_captions_follow_the_policy_for_missing_ones(tmp_path: Path) -> None:
    dataset = dataset_of(write_images(batch(), (), tmp_path), tmp_path, trigger_word="sks")
    assert [sample.caption for sample in dataset.samples] == ["sks"] * 3
    assert "captions found 0 of 3" in dataset.notes


@pytest.mark.parametrize("channels", [1, 4])
def test_grey_images_and_such_with_alpha_are_written_as_they_are(tmp_path: Path, channels: int) -> None:
    images = batch(1, channels)
    dataset = dataset_of(write_images(images, (), tmp_path), tmp_path, masks="alpha")
    assert (dataset.samples[0].mask is not None) == (channels == 4)


def test_values_beyond_black_and_white_are_cut_and_such_that_are_no_numbers_refused(tmp_path: Path) -> None:
    images = batch(1)
    images[0, 0, 0] = torch.tensor([-3.0, 7.0, 0.5])
    folder = write_images(images, (), tmp_path)
    (sample,) = dataset_of(folder, tmp_path).samples
    got = to_pixels(sample.image.read_bytes(), sample.image, (64, 64), "#ffffff")[0, 0]
    torch.testing.assert_close(got, torch.tensor([0.0, 1.0, 0.5]), atol=1 / 255, rtol=0)
    images[0, 3, 3, 1] = float("nan")
    with pytest.raises(ConfigError, match="not finite"):
        write_images(images, (), tmp_path)
    for shape in ((0, 64, 64, 3), (64, 64, 3), (1, 64, 64, 7)):
        with pytest.raises(ConfigError, match="a batch of images"):
            write_images(torch.zeros(shape), (), tmp_path)


def test_captions_are_one_for_all_or_one_a_line() -> None:
    assert captions_for("a cat\n", 3) == ("a cat",) * 3
    assert captions_for(" \n", 3) == ()
    assert captions_for("a\n\n 三 ", 3) == ("a", "", "三")
    with pytest.raises(ConfigError, match=r"2 lines.*each of the 3 images"):
        captions_for("a\nb", 3)
