from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from lowvram_lora.config import ComplexityConfig, DataConfig
from lowvram_lora.data.complexity import score
from lowvram_lora.data.contact import TILE_PX, contact_sheet, legend
from lowvram_lora.data.scan import Dataset, scan

COLOURS = {"1 rot.png": (200, 0, 0), "2 绿.png": (0, 200, 0), "3.png": (0, 0, 200)}
WHITE = "#ffffff"


def make_dataset(folder: Path) -> Dataset:
    for name, colour in COLOURS.items():
        Image.new("RGB", (400, 200), colour).save(folder / name)
    return scan(DataConfig(folder=str(folder), resolution=256), [folder])


def places(sheet: np.ndarray, colour: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return how many pixels have ``colour``, and the top and left of them."""
    rows, columns = (sheet == colour).all(axis=2).nonzero()
    return len(rows), rows.min(), columns.min()


def test_samples_stand_in_rows_in_their_shape(tmp_path: Path) -> None:
    sheet = contact_sheet(make_dataset(tmp_path).samples, WHITE, columns=2)
    found = [places(sheet, colour) for colour in COLOURS.values()]
    assert [area for area, _, _ in found] == [TILE_PX * TILE_PX // 2] * 3
    (_, top_1, left_1), (_, top_2, left_2), (_, top_3, left_3) = found
    assert top_1 == top_2 < top_3
    assert left_1 == left_3 < left_2


def test_the_sheet_is_an_rgb_picture_as_wide_as_its_columns(tmp_path: Path) -> None:
    samples = make_dataset(tmp_path).samples
    sheets = [contact_sheet(samples[:number], WHITE, columns=3) for number in range(4)]
    assert {sheet.shape[1:] for sheet in sheets} == {(sheets[0].shape[1], 3)}
    assert all(sheet.dtype == np.uint8 and sheet.flags.writeable for sheet in sheets)


def test_the_label_shows_bucket_and_score(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path)
    sheet = contact_sheet(dataset.samples, WHITE)
    other_bucket = tuple(replace(sample, bucket_px=(64, 64)) for sample in dataset.samples)
    scored = score(dataset, ComplexityConfig(skip=True)).samples
    for changed in (contact_sheet(other_bucket, WHITE), contact_sheet(scored, WHITE)):
        differing = (changed != sheet).any(axis=(1, 2)).nonzero()[0]
        assert len(differing) and differing.min() > TILE_PX  # below the pictures


def test_the_legend_names_what_the_numbers_stand_for(tmp_path: Path) -> None:
    assert legend(make_dataset(tmp_path).samples, 7) == ["  7: 1 rot.png", "  8: 2 绿.png", "  9: 3.png"]


def test_pictures_that_cannot_be_read_are_crossed_out(tmp_path: Path) -> None:
    samples = make_dataset(tmp_path).samples
    whole = contact_sheet(samples, WHITE)
    samples[0].image.unlink()
    samples[1].image.write_bytes(b"no picture")
    sheet = contact_sheet(samples, WHITE)
    assert sheet.shape == whole.shape
    assert [(sheet == colour).all(axis=2).sum() for colour in COLOURS.values()] == [0, 0, TILE_PX * TILE_PX // 2]
