"""Picture files to pixels: decoded strictly, turned upright, flattened to RGB, fitted to a bucket.

Sizes are (height, width) in pixels; tensors are ``[H, W, 3]``.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor

from ..errors import PathError

# Pillow's own limit, kept here because other packs switch it off for the whole process.
MAX_IMAGE_PX = 178_956_970

# Only these decoders are asked: others, such as that of EPS, start programs.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")

_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa")

# What Pillow's plugins raise on damaged files.
_DAMAGED = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    ArithmeticError,
    LookupError,
    TypeError,
    RuntimeError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


@dataclass(frozen=True)
class Picture:
    """A fully decoded, upright picture.

    Attributes:
        image: its first frame.
        is_animated: whether the file holds more frames, or more pages.
    """

    image: Image.Image
    is_animated: bool

    @property
    def size_px(self) -> tuple[int, int]:
        """Height and width after the EXIF turn."""
        return self.image.height, self.image.width


def decode(data: bytes, path: object) -> Picture:
    """Return the picture in ``data``.

    Args:
        path: where the bytes came from, for the error.

    Raises:
        PathError: the bytes are damaged, cut off, or too large to be a photo.
    """
    if not data:
        raise PathError(path, "the file is empty (0 bytes); remove it or save it again")
    try:
        with _strict_decoding():
            return _decode(data)
    except UnidentifiedImageError as error:
        raise PathError(path, "not a picture that can be read here; save it as png or jpg") from error
    except _DAMAGED as error:
        raise PathError(path, f"damaged or cut off ({error}); remove it or save it again") from error


def to_pixels(data: bytes, path: object, bucket_px: tuple[int, int], background: str) -> Tensor:
    """Return the picture in ``data``, scaled (Lanczos) to cover the bucket and cropped around its centre.

    Args:
        path: where the bytes came from, for the error.
        background: ``#rrggbb``, the colour under transparent pixels.

    Returns:
        RGB ``[H, W, 3]``, float32, 0 to 1.

    Raises:
        PathError: as for ``decode``.
    """
    fitted = _fit(flatten(decode(data, path).image, background), bucket_px)
    if fitted.mode == "F":
        grey = np.clip(np.asarray(fitted, dtype=np.float32), 0.0, 1.0)
        return torch.from_numpy(np.repeat(grey[:, :, None], 3, axis=2))
    return torch.from_numpy(np.asarray(fitted, dtype=np.float32) / 255.0)


def flatten(image: Image.Image, background: str) -> Image.Image:
    """Return ``image`` without transparency: RGB, or for more than 8 bits a channel grey ``F`` in 0..1."""
    if image.mode == "F" or image.mode.startswith("I"):
        return _to_unit_grey(image)
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        below = Image.new("RGBA", image.size, "#" + background.lstrip("#"))
        return Image.alpha_composite(below, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


@contextmanager
def _strict_decoding() -> Iterator[None]:
    # Other packs turn tolerance for cut-off files on for the whole process; such files would train as grey.
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _decode(data: bytes) -> Picture:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if image.width * image.height > MAX_IMAGE_PX:
            raise ValueError(f"{image.width}x{image.height} pixels, over the limit of {MAX_IMAGE_PX}")
        # Phones write MPO: a photo with a small second picture that nobody means to train on.
        is_animated = bool(getattr(image, "is_animated", False)) and image.format != "MPO"
        image.load()
        if image.mode == "F" and not np.isfinite(np.asarray(image)).all():
            raise ValueError("some of its pixels are not numbers")
        return Picture(ImageOps.exif_transpose(image), is_animated)


def _to_unit_grey(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    return Image.fromarray((values / _white_of(image.mode, float(values.max()))).astype(np.float32))


def _white_of(mode: str, brightest: float) -> float:
    """Return the value that stands for white. 32-bit files don't say; theirs is the next usual one."""
    if mode == "F" and brightest <= 255.0:
        return 1.0 if brightest <= 1.0 else 255.0
    return 65535.0 if brightest <= 65535.0 else float(2**31 - 1)


def _fit(image: Image.Image, bucket_px: tuple[int, int]) -> Image.Image:
    height, width = bucket_px
    scale = min(image.height / height, image.width / width)
    top = max((image.height - height * scale) / 2, 0.0)
    left = max((image.width - width * scale) / 2, 0.0)
    # Rounding may put an edge a hair outside the picture, which Pillow refuses.
    box = (left, top, min(left + width * scale, image.width), min(top + height * scale, image.height))
    return image.resize((width, height), Image.Resampling.LANCZOS, box=box)
