"""Letters for pictures that the pack draws itself. Only Latin letters and digits are sure to be there."""

from __future__ import annotations

from PIL import ImageFont


def font(size_px: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font."""
    try:
        return ImageFont.load_default(size_px)
    except TypeError:
        return ImageFont.load_default()  # Pillow before 10.1 has it in one size
