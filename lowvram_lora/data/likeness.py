"""Which pictures show nearly the same: a perceptual hash each, and a search for close ones.

The hash keeps the signs of a picture's coarsest grey structure (a DCT against its median, as in Zauner, "Implementation
and Benchmarking of Perceptual Image Hash Functions", 2010). It survives another size, another file format and a little
brightness. Pictures of few shapes share it by chance, so a tiny colour copy must agree as well.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

HASH_BITS = 64
MAX_DISTANCE = 7

_SIDE = 8
_SAMPLED = 32
_BANDS = 4
_BAND_BITS = HASH_BITS // _BANDS
_MAX_SHARED = 256
_TINY = 8
_TINY_BYTES = _TINY * _TINY * 3
# Mean difference of the tiny copies, of 255.
_MAX_COLOUR_DIFFERENCE = 16.0


@dataclass(frozen=True)
class Likeness:
    """What one picture is compared by.

    Attributes:
        bits: the perceptual hash, 64 bits.
        tiny: RGB of the picture at 8 x 8 pixels.
    """

    bits: int
    tiny: bytes

    def to_text(self) -> str:
        """Return it as hex digits."""
        return f"{self.bits:016x}{self.tiny.hex()}"

    @classmethod
    def from_text(cls, text: str) -> Likeness:
        """Read what ``to_text`` gave.

        Raises:
            ValueError: it is something else.
        """
        data = bytes.fromhex(text)
        if len(data) != HASH_BITS // 8 + _TINY_BYTES:
            raise ValueError(f"{len(data)} bytes")
        return cls(int.from_bytes(data[:8], "big"), data[8:])


def likeness(image: Image.Image) -> Likeness:
    """Return what ``image``, RGB without transparency, is compared by."""
    grey = image.convert("L").resize((_SAMPLED, _SAMPLED), Image.Resampling.BOX)
    basis = _cosines()
    coarse = basis @ np.asarray(grey, dtype=np.float64) @ basis.T
    # Rounded: in a flat picture all but the first are a rounding error, whose sign says nothing.
    values = coarse.round(3).ravel()
    signs = values > np.median(values[1:])
    bits = int.from_bytes(np.packbits(signs).tobytes(), "big")
    return Likeness(bits, image.convert("RGB").resize((_TINY, _TINY), Image.Resampling.BOX).tobytes())


def near_duplicates(pictures: Sequence[Likeness]) -> list[list[int]]:
    """Return groups of indices of pictures that show nearly the same, each of two or more, in the order given.

    Two are joined if their hashes differ in at most ``MAX_DISTANCE`` bits and their colours in few steps; a group is
    whatever is joined by a chain of such pairs.

    The hashes are looked up by bands of 16 bits (Norouzi et al., "Fast Search in Hamming Space with Multi-Index
    Hashing", CVPR 2012): of two hashes within seven bits, one band differs in at most one. So each picture is compared
    with the few that share a band, and equal ones count as one. Where more than 256 share it, as thousands of frames of
    one film do, the last 256 are compared: the time stays in proportion to the number of pictures.
    """
    distinct: dict[Likeness, list[int]] = defaultdict(list)
    for index, picture in enumerate(pictures):
        distinct[picture].append(index)
    kinds = list(distinct)
    parents = list(range(len(kinds)))
    for one, other in _close_pairs(kinds):
        first, second = sorted((_root(parents, one), _root(parents, other)))
        parents[second] = first
    groups: dict[int, list[int]] = defaultdict(list)
    for number, kind in enumerate(kinds):
        groups[_root(parents, number)] += distinct[kind]
    return sorted(sorted(group) for group in groups.values() if len(group) > 1)


def _close_pairs(kinds: Sequence[Likeness]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of indices that are near each other, each once."""
    if not kinds:
        return
    hashes = np.array([list(kind.bits.to_bytes(8, "big")) for kind in kinds], dtype=np.uint8)
    # Plus and minus one: the product of two rows counts their equal bits less the others.
    signs = np.unpackbits(hashes, axis=1).astype(np.float32) * 2.0 - 1.0
    colours = np.array([list(kind.tiny) for kind in kinds], dtype=np.int16)
    seen: dict[tuple[int, int], deque[int]] = defaultdict(lambda: deque(maxlen=_MAX_SHARED))
    for index, kind in enumerate(kinds):
        bands = [(band, kind.bits >> band * _BAND_BITS & (1 << _BAND_BITS) - 1) for band in range(_BANDS)]
        keys = [(band, value) for band, own in bands for value in _near(own)]
        candidates = {earlier for key in keys if key in seen for earlier in seen[key]}
        yield from ((earlier, index) for earlier in _agreeing(index, sorted(candidates), signs, colours))
        for key in bands:
            seen[key].append(index)


def _agreeing(
    index: int, candidates: Sequence[int], signs: npt.NDArray[np.float32], colours: npt.NDArray[np.int16]
) -> list[int]:
    if not candidates:
        return []
    rows = np.array(candidates)
    differing_bits = (HASH_BITS - signs[rows] @ signs[index]) / 2
    rows = rows[differing_bits <= MAX_DISTANCE]
    differences = np.abs(colours[rows] - colours[index]).mean(axis=1)
    return [int(row) for row in rows[differences <= _MAX_COLOUR_DIFFERENCE]]


def _near(value: int) -> Iterator[int]:
    """Yield the band ``value`` and those that differ from it in one bit."""
    yield value
    for bit in range(_BAND_BITS):
        yield value ^ (1 << bit)


def _root(parents: list[int], index: int) -> int:
    while parents[index] != index:
        parents[index] = parents[parents[index]]
        index = parents[index]
    return index


def _cosines() -> npt.NDArray[np.float64]:
    """Return the first 8 rows of the orthonormal DCT-II of 32 values."""
    frequency = np.arange(_SIDE)[:, None]
    position = np.arange(_SAMPLED)[None, :]
    basis = np.cos(np.pi * frequency * (2 * position + 1) / (2 * _SAMPLED)) * np.sqrt(2 / _SAMPLED)
    basis[0] /= np.sqrt(2)
    return np.asarray(basis, dtype=np.float64)
