"""The cache on disk: one safetensors file per encoding, named by what it was made from.

<root>/generation                      changes when the cache has lost something
<root>/latents/<2 hex>/<digest>.safetensors
<root>/text/<2 hex>/<digest>.safetensors
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from ..errors import PathError

Kind = Literal["latents", "mask", "text"]

_GENERATION = "generation"


@dataclass(frozen=True)
class Header:
    """What a cache file says about itself."""

    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, str]


@dataclass(frozen=True)
class Stored:
    """A cache file's content, on the CPU."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


class UnreadableFileError(Exception):
    """A cache file that is missing or damaged; its owner turns this into something for the user."""


def path_of(root: Path, kind: Kind, key: str) -> Path:
    """Return where the encoding ``key`` is kept."""
    return root / kind / key[:2] / f"{key}.safetensors"


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
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return Stored(tensors, header.get("__metadata__", {}))


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file so that it is there whole or not at all.

    Raises:
        PathError: the disk is full or the folder can't be written to.
    """
    _write_bytes(path, save(dict(tensors), dict(metadata)))


def discard(path: Path) -> None:
    """Remove a damaged file, so that the next build does not take it for a good one."""
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


def _write_bytes(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = f"can't be written ({error.strerror or error}). Free some disk space or fix the folder's rights."
        raise PathError(path, reason) from error
