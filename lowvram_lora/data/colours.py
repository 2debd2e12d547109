"""A picture's colours as sRGB, which the networks were trained on, whatever profile its file carries."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image


def to_srgb(image: Image.Image, mode: str) -> Image.Image:
    """Return ``image`` in ``mode``, ``RGB`` or ``RGBA``, with its colours as sRGB.

    An embedded ICC profile is followed where it describes these colours; without one, or with one that is damaged, the
    numbers are taken for sRGB, and CMYK for its plain complement.
    """
    profile = image.info.get("icc_profile")
    converted = _by_profile(image, profile) if profile else None
    if converted is None:
        return image.convert(mode)
    if mode == "RGBA":
        converted.putalpha(image.convert("RGBA").getchannel("A"))
    return converted


def _by_profile(image: Image.Image, profile: bytes) -> Image.Image | None:
    """Return ``image`` as opaque sRGB, or None where its profile says nothing new or can't be followed."""
    from PIL import ImageCms

    # Its published types do not cover what is used here.
    cms: Any = ImageCms
    # Profiles are made for what the file stores: four inks, one grey, or red, green and blue.
    kind = image.mode if image.mode in ("CMYK", "L") else "RGB"
    try:
        source = cms.ImageCmsProfile(io.BytesIO(profile))
        if "srgb" in cms.getProfileDescription(source).lower():
            return None
        to_rgb = cms.buildTransform(source, cms.createProfile("sRGB"), kind, "RGB")
        converted: Image.Image = to_rgb.apply(image.convert(kind))
    except (cms.PyCMSError, ImportError, OSError, ValueError, TypeError):
        return None
    return converted
