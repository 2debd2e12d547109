"""Variants of a picture that are encoded beside it: mirrored, cropped elsewhere, with other colours.

A variant is drawn from a seed and the picture's content, so the same dataset gives the same variants on every machine.
A latent can't be mirrored in place of the picture: that is not what the VAE makes of the mirrored picture.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import DataConfig

# A random crop keeps at least this share of each side of what the plain crop keeps.
MIN_ZOOM = 0.8

# Luma of red, green and blue (ITU-R BT.601).
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Variant:
    """How one encoded variant differs from the picture. Plain numbers, fit for a digest.

    Attributes:
        flip: mirrored, left for right.
        zoom: the crop's sides as shares of the largest crop of the bucket's shape, above 0 to 1.
        across, down: where the crop lies in the room that is left, 0 (left, top) to 1.
        brightness, contrast, saturation: factors; 1 changes nothing.
    """

    flip: bool = False
    zoom: float = 1.0
    across: float = 0.5
    down: float = 0.5
    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0


PLAIN = Variant()


def variants_of(image_digest: str, config: DataConfig) -> tuple[Variant, ...]:
    """Return the variants of one picture to encode: the plain one first, then ``config.image_variants - 1`` others.

    With ``flip`` every second one is mirrored. There are fewer where they would repeat: one without any change turned
    on, two where flipping is the only one.
    """
    drawn = (_draw(image_digest, number, config) for number in range(1, config.image_variants))
    return tuple(dict.fromkeys((PLAIN, *drawn)))


def window(
    image_size_px: tuple[int, int], bucket_px: tuple[int, int], variant: Variant = PLAIN
) -> tuple[float, float, float, float]:
    """Return the part of the picture that a variant shows, as left, top, right, bottom in pixels.

    It has the bucket's shape. A zoom never goes so far that the picture would have to be scaled up for it.
    """
    (image_height, image_width), (height, width) = image_size_px, bucket_px
    # Pixels of the picture for one of the bucket.
    widest = min(image_height / height, image_width / width)
    scale = max(widest * variant.zoom, min(widest, 1.0))
    top = max((image_height - height * scale) * variant.down, 0.0)
    left = max((image_width - width * scale) * variant.across, 0.0)
    # Rounding may put an edge a hair outside the picture, which Pillow refuses.
    return left, top, min(left + width * scale, image_width), min(top + height * scale, image_height)


def jittered(pixels_HWC: Tensor, variant: Variant) -> Tensor:
    """Return ``pixels_HWC`` (RGB, 0 to 1) with the variant's brightness, contrast and saturation, in this order.

    Each is a blend: with black, with the mean grey of the picture, with the grey of each pixel.
    """
    if variant.brightness != 1.0:
        pixels_HWC = (pixels_HWC * variant.brightness).clamp(0.0, 1.0)
    if variant.contrast != 1.0:
        pixels_HWC = torch.lerp(_grey(pixels_HWC).mean(), pixels_HWC, variant.contrast).clamp(0.0, 1.0)
    if variant.saturation != 1.0:
        pixels_HWC = torch.lerp(_grey(pixels_HWC), pixels_HWC, variant.saturation).clamp(0.0, 1.0)
    return pixels_HWC


def _draw(image_digest: str, number: int, config: DataConfig) -> Variant:
    # Text seeds are hashed by Python itself, the same on every version and machine.
    source = random.Random(f"{config.variant_seed}/{image_digest}/{number}")
    crop = (source.uniform(MIN_ZOOM, 1.0), source.random(), source.random()) if config.random_crop else (1.0, 0.5, 0.5)
    low, high = 1.0 - config.colour_jitter, 1.0 + config.colour_jitter
    colours = (source.uniform(low, high), source.uniform(low, high), source.uniform(low, high))
    return Variant(config.flip and number % 2 == 1, *crop, *colours)


def _grey(pixels_HWC: Tensor) -> Tensor:
    return (pixels_HWC * torch.tensor(_LUMA)).sum(dim=-1, keepdim=True)
