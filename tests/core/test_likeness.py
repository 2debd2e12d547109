import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance
from scipy.fft import dctn
from scipy.ndimage import gaussian_filter
from scipy.sparse.csgraph import connected_components

from lowvram_lora.data.likeness import MAX_DISTANCE, Likeness, likeness, near_duplicates


def a_picture(seed: int) -> Image.Image:
    noise = np.random.default_rng(seed).normal(0, 1, (200, 300, 3))
    smooth = sum(gaussian_filter(noise, (width, width, 0)) * width * 60 for width in (3, 9, 27))
    return Image.fromarray((128 + smooth).clip(0, 255).astype(np.uint8))


def saved(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def of_bits(*values: int) -> list[Likeness]:
    return [Likeness(value, bytes(192)) for value in values]


def flipped(value: int, bits: list[int]) -> int:
    for bit in bits:
        value ^= 1 << int(bit)
    return value


def test_the_hash_is_the_coarse_cosine_transform_against_its_median() -> None:
    image = a_picture(1)
    grey = np.asarray(image.convert("L").resize((32, 32), Image.Resampling.BOX), dtype=np.float64)
    coarse = dctn(grey, norm="ortho")[:8, :8].ravel()
    expected = "".join("1" if value > np.median(coarse[1:]) else "0" for value in coarse)
    assert f"{likeness(image).bits:064b}" == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image.resize((150, 100), Image.Resampling.LANCZOS),
        lambda image: image.resize((900, 600), Image.Resampling.BICUBIC),
        lambda image: saved(image, 40),
        lambda image: ImageEnhance.Brightness(image).enhance(1.05),
        lambda image: ImageEnhance.Contrast(image).enhance(0.9),
        lambda image: image.crop((2, 2, 298, 198)),
    ],
    ids=["smaller", "larger", "jpeg", "brighter", "paler", "cropped"],
)
def test_a_changed_copy_is_found(change) -> None:
    pictures = [likeness(a_picture(seed)) for seed in range(12)]
    pictures.append(likeness(change(a_picture(4))))
    assert near_duplicates(pictures) == [[4, 12]]


def test_different_pictures_are_not_taken_for_copies() -> None:
    assert near_duplicates([likeness(a_picture(seed)) for seed in range(60)]) == []


def test_one_drawing_in_other_colours_is_no_copy() -> None:
    drawings = []
    for paper, ink in (((0, 60, 200), (255, 255, 0)), ((90, 20, 20), (180, 255, 255)), ((70, 70, 70), (250, 250, 250))):
        drawing = Image.new("RGB", (96, 96), paper)
        drawing.paste(ink, (20, 30, 60, 70))
        drawings.append(likeness(drawing))
    flat = [likeness(Image.new("RGB", (96, 96), colour)) for colour in ("red", "navy", "white", "black")]
    assert near_duplicates(drawings + flat) == []


def test_copies_of_a_flat_picture_are_found() -> None:
    flat = [likeness(Image.new("RGB", size, "teal")) for size in ((96, 96), (640, 480), (33, 70))]
    assert near_duplicates(flat) == [[0, 1, 2]]


def test_the_search_finds_what_comparing_every_pair_finds() -> None:
    source = np.random.default_rng(2)
    values = [int(value) for value in source.integers(0, 2**63, 150)]
    for start in values[:60]:
        distance = int(source.integers(0, 12))
        values.append(flipped(start, list(source.choice(64, distance, replace=False))))
    near = np.array([[(one ^ other).bit_count() <= MAX_DISTANCE for other in values] for one in values])
    _, labels = connected_components(near, directed=False)
    members = [np.flatnonzero(labels == label).tolist() for label in range(labels.max() + 1)]
    expected = sorted(group for group in members if len(group) > 1)
    assert len(expected) > 20
    assert near_duplicates(of_bits(*values)) == expected


def test_ten_thousand_pictures_are_not_compared_pair_by_pair(monkeypatch) -> None:
    from lowvram_lora.data import likeness as module

    source = np.random.default_rng(4)
    film = [Likeness(7, bytes([int(value) for value in source.integers(0, 9, 192)])) for _ in range(1000)]
    others = of_bits(*(int(value) for value in source.integers(0, 2**63, 9000)))
    compared = 0
    agreeing = module._agreeing

    def counted(index, candidates, *rest):
        nonlocal compared
        compared += len(candidates)
        return agreeing(index, candidates, *rest)

    monkeypatch.setattr(module, "_agreeing", counted)
    groups = near_duplicates(film + others)
    assert list(range(1000)) in groups
    assert compared < 60 * 10_000


def test_no_pictures_have_no_copies() -> None:
    assert near_duplicates([]) == []


def test_what_is_kept_on_disk_is_read_back() -> None:
    one = likeness(a_picture(3))
    assert Likeness.from_text(one.to_text()) == one
    for text in ("", "zz", one.to_text()[:-2], one.to_text() + "00"):
        with pytest.raises(ValueError):
            Likeness.from_text(text)
