"""The cache on disk: one safetensors file per encoding, named by what it was made from.

<root>/generation                      changes when the cache has lost something
<root>/latents/<2 hex>/<32 hex>.safetensors
<root>/mask/<2 hex>/<32 hex>.safetensors
<root>/text/<2 hex>/<32 hex>.safetensors

A file comes into being by a rename: it is there whole or not at all, and two writers of one name write the same. What a
power cut may still do to it (a name without all of its bytes) shows in its length or its checksum, so it is never read.

One file for each encoding and not one for many: an encoding is some ten to some hundred KiB, so a file wastes little,
is written and cleaned away by itself, and no index has to be kept right between processes.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from ..errors import PathError

Kind = Literal["latents", "mask", "text"]
KINDS: tuple[Kind, ...] = get_args(Kind)

SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
_GENERATION = "generation"
_CHECKSUM = "crc32"
# 128 bits tell any two encodings apart, and short names leave room for long folders on Windows.
_NAME_LENGTH = 32


@dataclass(frozen=True)
class Header:
    """What a cache file says about itself."""

    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, str]


@dataclass(frozen=True)
class Stored:
    """A cache file's content, on the CPU."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class UnreadableFileError(Exception):
    """A cache file that is missing or damaged; its owner turns this into something for the user."""


def path_of(root: Path, kind: Kind, key: str) -> Path:
    """Return where the encoding ``key`` is kept."""
    return root / kind / key[:2] / f"{key[:_NAME_LENGTH]}{SUFFIX}"


def is_encoding(name: str) -> bool:
    """Return whether a file of that name is an encoding's, as ``path_of`` names them."""
    return re.fullmatch(rf"[0-9a-f]{{1,{_NAME_LENGTH}}}{re.escape(SUFFIX)}", name) is not None


def is_temporary(name: str) -> bool:
    """Return whether a file of that name is an encoding that is being written, or never was to the end."""
    return re.fullmatch(rf"[0-9a-f]{{1,8}}\.[0-9a-f]{{8}}{re.escape(TEMPORARY)}", name) is not None


def has_cache(root: Path) -> bool:
    """Return whether ``root`` is a cache's folder: every build makes a generation before anything else."""
    return (root / _GENERATION).is_file()


def peek(path: Path) -> Header | None:
    """Return a file's header, or None if the file is missing, cut off or not safetensors. Reads no tensor."""
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            return Header(shapes, dict(file.metadata() or {}))
    except (OSError, SafetensorError):
        return None


def read(path: Path) -> Stored:
    """Return a file's content. The file is closed and not mapped when this returns.

    Raises:
        UnreadableFileError: the file is missing or damaged.
    """
    try:
        data = path.read_bytes()
        tensors = load(data)
    except (OSError, SafetensorError) as error:
        raise UnreadableFileError(str(path)) from error
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    # Files of older versions have no checksum.
    expected = metadata.pop(_CHECKSUM, None)
    if expected is not None and expected != _checksum(tensors, metadata):
        raise UnreadableFileError(f"{path}: its bytes are not those that were written")
    return Stored(tensors, metadata)


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file so that it is there whole or not at all.

    Raises:
        PathError: the disk is full or the folder can't be written to.
    """
    checked = {**metadata, _CHECKSUM: _checksum(tensors, metadata)}
    _write_bytes(path, save(dict(tensors), checked))


def touch(path: Path) -> None:
    """Note that the file is in use: those that were not for the longest time are cleaned away first."""
    with suppress(OSError):  # a folder that can't be written to is not cleaned either
        os.utime(path)


def discard(path: Path) -> None:
    """Remove a damaged file, so that the next build does not take it for a good one."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def generation(root: Path) -> str:
    """Return the cache's generation, a random hex text kept in ``root``; it is made if it is not there.

    It changes when the folder was cleaned away, and with ``invalidate``.

    Raises:
        PathError: ``root`` can't be written to.
    """
    try:
        text = (root / _GENERATION).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        text = ""
    return text or invalidate(root)


def invalidate(root: Path) -> str:
    """Give the cache a new generation, so that Build Tiered Cache runs again, and return it.

    Raises:
        PathError: ``root`` can't be written to.
    """
    text = secrets.token_hex(16)
    _write_bytes(root / _GENERATION, text.encode("utf-8"))
    return text


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    total = zlib.crc32(json.dumps(sorted(metadata.items())).encode("utf-8"))
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _write_bytes(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.stem[:8]}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(data)
            _replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = f"can't be written ({error.strerror or error}). Free some disk space or fix the folder's rights."
        raise PathError(path, reason) from error


def _replace(temporary: Path, path: Path) -> None:
    try:
        os.replace(temporary, path)
    except PermissionError:
        # Windows replaces no file that somebody reads. One of this name that is whole holds the same.
        if peek(path) is None:
            raise
