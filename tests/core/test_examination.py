from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lowvram_lora.config import DataConfig
from lowvram_lora.data.examination import MAX_SHOWN, examination
from lowvram_lora.data.scan import Dataset, scan


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    for number in range(14):
        coarse = np.random.default_rng(number).integers(0, 256, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((128, 128)).save(tmp_path / f"图 {number}.png")
    with Image.open(tmp_path / "图 0.png") as image:
        image.resize((120, 120)).save(tmp_path / "copy.png")
    return scan(DataConfig(folder=str(tmp_path), resolution=128), [tmp_path])


def test_near_duplicates_and_missing_captions_are_told_together(dataset: Dataset) -> None:
    text = examination(dataset).text
    assert "near-duplicates" in text and "copy.png" in text
    assert "captions missing" in text


def test_the_picture_shows_the_first_samples_and_the_text_names_them(dataset: Dataset, tmp_path: Path) -> None:
    found = examination(dataset)
    assert found.picture.dtype == np.uint8 and found.picture.shape[2] == 3
    for number, sample in enumerate(dataset.samples[:MAX_SHOWN], 1):
        assert f"  {number}: {sample.name}" in found.text


def test_pictures_are_looked_at_once(dataset: Dataset, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    examination(dataset, tmp_path / "kept", lambda done, total, _: seen.append((done, total)))
    assert seen == [(number, 15) for number in range(1, 16)]
    seen.clear()
    examination(dataset, tmp_path / "kept", lambda done, total, _: seen.append((done, total)))
    assert seen == [(15, 15)]


def test_a_picture_that_is_gone_meanwhile_is_named_and_the_rest_is_still_told(dataset: Dataset) -> None:
    dataset.samples[3].image.unlink()
    text = examination(dataset).text
    assert "captions missing" in text
    assert "Near-duplicates were not looked for" in text and dataset.samples[3].image.name in text
