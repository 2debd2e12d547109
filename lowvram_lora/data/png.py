"""Whether a PNG holds all of its picture, found without making the pixels, which costs most of the time.

Layout of a PNG: https://www.w3.org/TR/png-3/ (chunks: 5; picture data: 7 and 10).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

# Numbers of a pixel by colour type: grey, RGB, palette, grey with alpha, RGB with alpha.
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}

# Texts that may say how the picture is to be turned.
_TURNING_TEXTS = (b"Raw profile type ", b"XML:com.adobe.xmp")

_PIECE_BYTES = 1 << 20


def is_whole_png(data: bytes) -> bool:
    """Return True if all of the picture is there and nothing turns it; False if only decoding can tell.

    Raises:
        ValueError: the picture is cut off.
        zlib.error: its data are damaged.
        struct.error: the file ends inside its header.
    """
    width, height, depth, colour, _, _, interlaced = struct.unpack_from(">IIBBBBB", data, 16)
    if interlaced or colour not in _CHANNELS:
        return False
    # One byte in front of each row names its filter.
    wanted = height * (1 + (width * depth * _CHANNELS[colour] + 7) // 8)
    found, inflater = 0, zlib.decompressobj()
    for kind, content in _chunks(data):
        if kind == b"eXIf" or (kind in (b"tEXt", b"zTXt", b"iTXt") and bytes(content[:20]).startswith(_TURNING_TEXTS)):
            return False
        if kind == b"IDAT" and found < wanted:
            found += _inflated(inflater, content, wanted - found)
    if found < wanted:
        raise ValueError(f"{found} of {wanted} bytes of its picture are there")
    return True


def _inflated(inflater: zlib._Decompress, content: memoryview, most: int) -> int:
    """Return how many bytes come out of one part of the data, up to about ``most``; none of them is kept."""
    found, left = 0, bytes(content)
    while left and not inflater.eof and found < most:
        found += len(inflater.decompress(left, _PIECE_BYTES))
        left = inflater.unconsumed_tail
    return found


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yield kind and content of each chunk; the last may be shorter than it says."""
    view, position = memoryview(data), 8
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        yield kind, view[position + 8 : position + 8 + length]
        if kind == b"IEND":
            return
        position += 12 + length
