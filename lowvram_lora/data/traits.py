"""What planning knows of an encoding. It is in the header of each file, so that planning reads no latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from torch import Tensor

from ..errors import PathError
from . import precision
from .features import Features, text_features, visual_features
from .store import UnreadableFileError, path_of, peek, read, write

FEATURES = "features"

# As planning rounds them anyway (``distances``): nothing is lost.
_STEPS = 1024.0


def packed(features: Features) -> bytes:
    """Return ``features``, each of -1 to 1, as whole 1024ths in two bytes each, low byte first."""
    return np.rint(features.astype(np.float64) * _STEPS).astype("<i2").tobytes()


def unpacked(data: bytes) -> Features:
    """Return the features that were packed, to a 1024th."""
    return (np.frombuffer(data, dtype="<i2") / _STEPS).astype(np.float32)


def with_features(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return ``metadata`` of encoded latents with what planning compares them by."""
    return {**metadata, FEATURES: packed(visual_features(precision.decode(tensors, metadata))).hex()}


def visual_of(root: Path, key: str, on_older: Callable[[], None]) -> bytes:
    """Return the packed visual features of the latents at ``key``; nothing where they can't be read.

    A file of an older version doesn't hold them: it is read and written anew.

    Args:
        on_older: called for such a file; what it raises ends the work.
    """
    path = path_of(root, "latents", key)
    header = peek(path)
    with suppress(ValueError, UnreadableFileError):
        if header is not None and FEATURES in header.metadata:
            return bytes.fromhex(header.metadata[FEATURES])
        on_older()
        stored = read(path)
        metadata = with_features(stored.tensors, stored.metadata)
        with suppress(PathError):  # a cache that can only be read serves as well
            write(path, stored.tensors, metadata)
        return bytes.fromhex(metadata[FEATURES])
    return b""


def textual_of(captions: tuple[str, ...]) -> bytes:
    """Return the packed features of a sample's captions, all of them together."""
    return packed(text_features("\n".join(captions)))


def num_text_tokens(root: Path, key: str) -> int:
    """Return the tokens of the conditioning at ``key``, padding included; 0 where it can't be told."""
    header = peek(path_of(root, "text", key))
    shapes = () if header is None else header.shapes.values()
    return max((shape[1] for shape in shapes if len(shape) == 3), default=0)
