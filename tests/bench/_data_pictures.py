"""Made-up photographs as files: colour that drifts, blobs, grain; several shapes, a caption beside each.

A file has bytes of its own, so that no measure of another one serves for it; what it shows is one of some crops.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

NUM_WORDS, LONGEST_CAPTION = 500, 40


@dataclass(frozen=True)
class PictureKind:
    """How pictures are kept.

    Attributes:
        sizes_px: (width, height) that take turns.
        file_format: of Pillow's names.
        most_distinct: so many different ones at most.
    """

    sizes_px: tuple[tuple[int, int], ...]
    file_format: str
    most_distinct: int

    @property
    def suffix(self) -> str:
        """The files' ending."""
        return {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp"}[self.file_format]


_AROUND_1024 = ((1024, 768), (768, 1024), (1024, 1024), (1152, 768), (1024, 683))

KINDS = {
    "jpeg, 1024 px": PictureKind(_AROUND_1024, "JPEG", 500),
    "png, 1024 px": PictureKind(_AROUND_1024, "PNG", 50),
    "jpeg, 12 megapixels": PictureKind(((4000, 3000), (3000, 4000)), "JPEG", 8),
}


def write_pictures(folder: Path, kind: PictureKind, number: int, seed: int = 0) -> None:
    """Write ``number`` pictures and their captions to ``folder``, which is made."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    longest = max(max(size) for size in kind.sizes_px)
    scene = _scene(draw, longest * 5 // 4)
    files = [_encoded(draw, scene, kind, index) for index in range(min(number, kind.most_distinct))]
    for index in range(number):
        # What follows the end of a picture is no part of it.
        path = folder / f"{index:05}{kind.suffix}"
        path.write_bytes(files[index % len(files)] + f"{seed}/{index}".encode("ascii"))
        path.with_suffix(".txt").write_text(_caption(draw), encoding="utf-8")


def _scene(draw: np.random.Generator, side_px: int) -> Image.Image:
    """Return a large square picture that crops are taken from."""
    layers = np.zeros((side_px, side_px, 3), dtype=np.float32)
    for cells, strength in ((6, 90.0), (48, 50.0), (side_px // 4, 16.0)):
        values = draw.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        smooth = Image.fromarray(values).resize((side_px, side_px), Image.Resampling.BICUBIC)
        layers += (np.asarray(smooth, dtype=np.float32) - 127.5) * (strength / 127.5)
    grain = draw.standard_normal((side_px, side_px, 1), dtype=np.float32) * 3.0
    return Image.fromarray(np.clip(layers + grain + 127.5, 0, 255).astype(np.uint8))


def _encoded(draw: np.random.Generator, scene: Image.Image, kind: PictureKind, index: int) -> bytes:
    width, height = kind.sizes_px[index % len(kind.sizes_px)]
    left, top = (int(draw.integers(0, scene.width - side + 1)) for side in (width, height))
    file = io.BytesIO()
    options = {} if kind.file_format == "PNG" else {"quality": 90}
    scene.crop((left, top, left + width, top + height)).save(file, kind.file_format, **options)
    return file.getvalue()


def _caption(draw: np.random.Generator) -> str:
    numbers = draw.integers(0, NUM_WORDS, int(draw.integers(3, LONGEST_CAPTION)))
    return " ".join(f"word{number}" for number in numbers)
