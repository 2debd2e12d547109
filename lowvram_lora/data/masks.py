"""Which part of an image counts in the loss: weights of its pixels, from its alpha or from a file of its own."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import PathError
from .augment import PLAIN, Variant, window
from .formats import may_be_image
from .pixels import decode, fit, flatten, has_alpha

MASK_FOLDERS = ("masks", "mask")

# How far the shape of a mask may be from its image's: rounding of one that was scaled.
_SHAPE_TOLERANCE = 0.02

Size = tuple[int, int]


def is_mask(path: Path, folder: Path) -> bool:
    """Return whether ``path`` lies in a folder of masks below ``folder``, the dataset's, whatever that one's name."""
    return path.parent.name.casefold() in MASK_FOLDERS and path.parent != folder


def masks_by_image(files: Iterable[Path], folder: Path) -> Mapping[tuple[Path, str], Path]:
    """Return the files in mask folders by the folder above and the name without its ending."""
    masks = (path for path in files if is_mask(path, folder) and may_be_image(path))
    return {(path.parent.parent, _spelled(path.stem)): path for path in masks}


def mask_of(image: Path, masks: Mapping[tuple[Path, str], Path]) -> Path | None:
    """Return the mask of ``image``: ``masks/cat.png`` for ``cat.jpg``, or ``masks/cat.jpg.png``."""
    stem, name = (_spelled(each) for each in (image.stem, image.name))
    return masks.get((image.parent, stem)) or masks.get((image.parent, name))


def _spelled(name: str) -> str:
    """Return ``name`` as every system would write it: macOS takes letters and their accents apart."""
    return unicodedata.normalize("NFC", name)


def check_mask(data: bytes, path: Path, image_size_px: Size, bucket_px: Size, from_alpha: bool) -> None:
    """Refuse a mask that can't be used.

    Raises:
        PathError: it is damaged, of another shape than the image, or black in all that the bucket shows.
    """
    grey = _grey(data, path, from_alpha)
    (height, width), (mask_height, mask_width) = image_size_px, (grey.height, grey.width)
    distortion = (mask_height * width) / (mask_width * height)
    if not 1 - _SHAPE_TOLERANCE <= distortion <= 1 + _SHAPE_TOLERANCE:
        reason = f"{mask_width}x{mask_height} is not the shape of the image, {width}x{height}"
        raise PathError(path, f"{reason}; draw it over the whole image, at any size, or remove it")
    if not np.asarray(grey).any():
        empty = "the image is transparent all over" if from_alpha else "it is black all over"
        raise PathError(path, f"{empty}, so nothing would be trained on")
    box = window(image_size_px, bucket_px)
    left, top, right, bottom = (edge * mask_width / width for edge in box)
    seen = grey.crop((math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom)))
    if not np.asarray(seen).any():
        cropped = "what counts is cropped away, so nothing would be trained on"
        raise PathError(path, f"{cropped}; crop the image around it yourself, or raise max_aspect")


def mask_weights(
    data: bytes, path: Path, image_size_px: Size, bucket_px: Size, from_alpha: bool, variant: Variant = PLAIN
) -> Tensor:
    """Return the weights of an image's pixels, fitted to the bucket as ``to_pixels`` fits the image.

    Args:
        data: the mask's file, or the image's own where its alpha is the mask.
        image_size_px: the image's, after the EXIF turn; the mask may have another resolution.

    Returns:
        ``[H, W]``, float32, 0 (black or transparent: does not count) to 1.

    Raises:
        PathError: the file is damaged.
    """
    grey = _grey(data, path, from_alpha)
    height, width = image_size_px
    if grey.size != (width, height):
        grey = grey.resize((width, height), Image.Resampling.BILINEAR)
    fitted = np.asarray(fit(grey, bucket_px, variant), dtype=np.float32)
    return torch.from_numpy(np.clip(fitted, 0.0, 1.0))


def _grey(data: bytes, path: Path, from_alpha: bool) -> Image.Image:
    """Return the weights as a grey picture, mode ``F`` in 0..1."""
    image = decode(data, path).image
    if from_alpha:
        channel = image.convert("RGBA").getchannel("A") if has_alpha(image) else Image.new("L", image.size, 255)
    else:
        channel = flatten(image, "#000000")
    if channel.mode == "F":
        return channel
    return Image.fromarray(np.asarray(channel.convert("L"), dtype=np.float32) / 255.0)
