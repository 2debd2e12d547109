"""Picture files to pixels: decoded strictly, turned upright, flattened to RGB, fitted to a bucket.

Sizes are (height, width) in pixels; tensors are ``[H, W, 3]``.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor

from ..errors import PathError
from .augment import PLAIN, Variant, jittered, window
from .colours import to_srgb
from .formats import open_image, why_unknown
from .png import is_whole_png

# Pillow's own limit, kept here because other packs switch it off for the whole process.
MAX_IMAGE_PX = 178_956_970

# Decoded, more than a hundred megabytes.
LARGE_PX = 32_000_000

_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")

# Later frames of these are no animation: a photo's second picture, the layers below a drawing.
_ONE_PICTURE = ("MPO", "PSD", "HEIF")
_ORIENTATION = 0x0112
_TURNED_ORIENTATIONS = (5, 6, 7, 8)

# What Pillow's plugins raise on damaged files.
_DAMAGED = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    ArithmeticError,
    LookupError,
    TypeError,
    AttributeError,
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


@dataclass(frozen=True)
class PictureFacts:
    """What a scan needs to know of a picture.

    Attributes:
        size_px: after the EXIF turn.
        is_animated: whether the file holds more frames, or more pages.
        has_alpha: whether some of it may be transparent.
    """

    size_px: tuple[int, int]
    is_animated: bool
    has_alpha: bool


def decode(data: bytes, path: object, enough_px: int | None = None) -> Picture:
    """Return the picture in ``data``.

    Args:
        path: where the bytes came from, for the error.
        enough_px: a JPEG may be made at a half, a quarter or an eighth of its size, its long side no shorter than this;
            that takes less time and memory.

    Raises:
        PathError: the bytes are damaged, cut off, or too large to be a photo.
    """
    with strict_decoding(), _faults_named(data, path):
        return _decode(data, path, enough_px)


def inspect(data: bytes, path: object, large: AbstractContextManager[object] | None = None) -> PictureFacts:
    """Return what a scan needs to know of the picture in ``data``, which is read to its end.

    Tolerance for cut-off files is the process's: call it inside ``strict_decoding``, which threads can share.

    Args:
        large: entered while a large picture is decoded, such as a lock.

    Raises:
        PathError: as for ``decode``.
    """
    with _faults_named(data, path), _opened(data, path) as image:
        full_size, is_animated = image.size, _is_animated(image)
        if image.format == "PNG" and is_whole_png(data):
            return PictureFacts((image.height, image.width), is_animated, has_alpha(image))
        is_reduced = _draft(image, max(image.size) // 8)
        # A progressive JPEG is held whole however few of its pixels are made.
        held_px = full_size[0] * full_size[1] if "progressive" in image.info else image.width * image.height
        with large if large is not None and held_px > LARGE_PX else nullcontext():
            _load(image)
        is_turned = image.getexif().get(_ORIENTATION) in _TURNED_ORIENTATIONS
        ImageOps.exif_transpose(image, in_place=True)
        width, height = image.size
        if is_reduced:
            width, height = reversed(full_size) if is_turned else full_size
        return PictureFacts((height, width), is_animated, has_alpha(image))


def to_pixels(
    data: bytes, path: object, bucket_px: tuple[int, int], background: str, variant: Variant = PLAIN
) -> Tensor:
    """Return the picture in ``data``, scaled (Lanczos) to cover the bucket and cropped around its centre.

    Args:
        path: where the bytes came from, for the error.
        background: ``#rrggbb``, the colour under transparent pixels.
        variant: another crop, mirrored, or with other colours.

    Returns:
        RGB ``[H, W, 3]``, float32, 0 to 1.

    Raises:
        PathError: as for ``decode``.
    """
    return jittered(_to_tensor(fit(flatten(decode(data, path).image, background), bucket_px, variant)), variant)


def flatten(image: Image.Image, background: str) -> Image.Image:
    """Return ``image`` without transparency: RGB, or for more than 8 bits a channel grey ``F`` in 0..1."""
    if image.mode == "F" or image.mode.startswith("I"):
        return _to_unit_grey(image)
    if has_alpha(image):
        below = Image.new("RGBA", image.size, "#" + background.lstrip("#"))
        return Image.alpha_composite(below, to_srgb(image, "RGBA")).convert("RGB")
    return to_srgb(image, "RGB")


def has_alpha(image: Image.Image) -> bool:
    """Return whether the picture's format lets some of it be transparent."""
    return image.mode in _ALPHA_MODES or "transparency" in image.info


def fit(image: Image.Image, bucket_px: tuple[int, int], variant: Variant = PLAIN) -> Image.Image:
    """Return the part of ``image`` that ``variant`` shows, scaled (Lanczos) to the bucket, mirrored if it says so."""
    height, width = bucket_px
    box = window((image.height, image.width), bucket_px, variant)
    fitted = image.resize((width, height), Image.Resampling.LANCZOS, box=box)
    return ImageOps.mirror(fitted) if variant.flip else fitted


@contextmanager
def strict_decoding() -> Iterator[None]:
    """Refuse cut-off files, for the whole process.

    Other packs turn tolerance for them on, and they would train as grey.
    """
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


@contextmanager
def _faults_named(data: bytes, path: object) -> Iterator[None]:
    if not data:
        raise PathError(path, "the file is empty (0 bytes); remove it or save it again")
    try:
        yield
    except UnidentifiedImageError as error:
        raise PathError(path, why_unknown(data)) from error
    except _DAMAGED as error:
        raise PathError(path, f"damaged or cut off ({error}); remove it or save it again") from error


def _decode(data: bytes, path: object, enough_px: int | None) -> Picture:
    with _opened(data, path) as image:
        is_animated = _is_animated(image)
        if enough_px is not None:
            _draft(image, enough_px)
        _load(image)
        return Picture(ImageOps.exif_transpose(image), is_animated)


@contextmanager
def _opened(data: bytes, path: object) -> Iterator[Image.Image]:
    with open_image(io.BytesIO(data), path) as image:
        if image.width * image.height > MAX_IMAGE_PX:
            raise ValueError(f"{image.width}x{image.height} pixels, over the limit of {MAX_IMAGE_PX}")
        yield image


def _is_animated(image: Image.Image) -> bool:
    return bool(getattr(image, "is_animated", False)) and image.format not in _ONE_PICTURE


def _draft(image: Image.Image, enough_px: int) -> bool:
    """Let fewer pixels be made where the format can. All of the file is read, so damage shows as in the whole picture.

    Returns:
        Whether the format can.
    """
    if image.format not in ("JPEG", "MPO"):
        return False
    share = min(1.0, enough_px / max(image.size))
    image.draft(image.mode, (max(int(image.width * share), 1), max(int(image.height * share), 1)))
    return True


def _load(image: Image.Image) -> None:
    image.load()
    if image.mode == "F" and not np.isfinite(np.asarray(image)).all():
        raise ValueError("some of its pixels are not numbers")
    if image.mode == "LAB":
        raise ValueError("its colours are Lab; save it as RGB")


def _to_tensor(image: Image.Image) -> Tensor:
    if image.mode == "F":
        grey = np.clip(np.asarray(image, dtype=np.float32), 0.0, 1.0)
        return torch.from_numpy(np.repeat(grey[:, :, None], 3, axis=2))
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255.0)


def _to_unit_grey(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    return Image.fromarray((values / _white_of(image.mode, float(values.max()))).astype(np.float32))


def _white_of(mode: str, brightest: float) -> float:
    """Return the value that stands for white. 32-bit files don't say; theirs is the next usual one."""
    if mode == "F" and brightest <= 255.0:
        return 1.0 if brightest <= 1.0 else 255.0
    return 65535.0 if brightest <= 65535.0 else float(2**31 - 1)
