"""Which files are pictures: told by their first bytes, and by the decoders that may be asked."""

from __future__ import annotations

from pathlib import PurePath
from typing import IO

from PIL import Image, UnidentifiedImageError

# Decoders that know their files by a signature and start no program. Left out: EPS, which starts Ghostscript, WMF,
# which the system renders, those that only name a format (MPEG, BUFR, GRIB, HDF5), and those that take any bytes.
# HEIF and JXL are none of Pillow's own: asked where another pack has added them.
FORMATS = (
    *("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "JPEG2000", "HEIF", "JXL", "PPM", "ICO", "ICNS", "PSD"),
    *("QOI", "DDS", "PCX", "DCX", "SGI", "DIB", "CUR", "SUN", "FLI", "XBM", "XPM", "XVTHUMB", "MSP", "PIXAR"),
    *("BLP", "FTEX", "GBR", "FITS"),
)

# It has no signature: asked only where the name says so.
_BY_NAME = {".tga": "TGA"}

# A file with one of these endings is meant as a picture, so one that can't be read is named.
IMAGE_SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".jfif", ".jp2", ".heic", ".heif"),
    *(".tga", ".ppm", ".pgm", ".psd", ".qoi", ".ico", ".jxl"),
)
# The usual ones, for messages.
NAMED_SUFFIXES = IMAGE_SUFFIXES[:9]

# Nobody calls a picture so; such files are never opened, and a change in them changes nothing.
_OTHER_SUFFIXES = frozenset(
    (
        *(".txt", ".caption", ".md", ".json", ".jsonl", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".xml", ".html"),
        *(".py", ".js", ".css", ".sh", ".bat", ".log", ".ini", ".pdf", ".doc", ".docx", ".db", ".sqlite"),
        *(".zip", ".rar", ".7z", ".tar", ".gz", ".mp4", ".mov", ".mkv", ".avi", ".webm", ".mp3", ".wav", ".flac"),
        *(".safetensors", ".ckpt", ".pt", ".pth", ".npy", ".npz", ".bin", ".gguf", ".onnx", ".exe", ".dll"),
    )
)
_HEIC_BRANDS = (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftyphevc")


def is_named_as_image(path: PurePath) -> bool:
    """Return whether the file's ending says that it is a picture."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def may_be_image(path: PurePath) -> bool:
    """Return whether the file is worth a look: its ending is that of a picture, or says nothing."""
    return path.suffix.lower() not in _OTHER_SUFFIXES


def open_image(stream: IO[bytes], path: object) -> Image.Image:
    """Return the picture in ``stream``, of which only the header is read.

    Raises:
        UnidentifiedImageError: these bytes are no picture that one of the decoders knows.
        Exception: what a decoder raises on a damaged header.
    """
    by_name = _BY_NAME.get(PurePath(str(path)).suffix.lower())
    usable = decoders()
    return Image.open(stream, formats=[*usable, *([by_name] if by_name in Image.OPEN else [])])


def decoders() -> list[str]:
    """Return the decoders that are there and know their files by the bytes alone; other packs may add some."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def is_told_by_name(path: PurePath) -> bool:
    """Return whether it depends on the file's ending, and not on its bytes alone, that it is taken for a picture."""
    return path.suffix.lower() in _BY_NAME


def is_image(stream: IO[bytes], path: object) -> bool:
    """Return whether the header in ``stream`` is that of a picture."""
    try:
        with open_image(stream, path):
            return True
    except UnidentifiedImageError:
        return False
    except Exception:  # noqa: BLE001  (a decoder knew it and found it damaged)
        return True


def why_unknown(data: bytes) -> str:
    """Return why no decoder knows these bytes, and what to do."""
    if data[4:12] in _HEIC_BRANDS:
        return "a HEIC photo, which can't be read here; save it as png or jpg"
    return "not a picture that can be read here; save it as png or jpg"
