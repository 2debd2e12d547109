"""File names: what may be written where, and the keys inside."""

import itertools
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from ..errors import PathError

_RESERVED = re.compile(r"^(con|conin\$|conout\$|prn|aux|nul|(com|lpt)[\d¹²³])\s*(\..*)?$", re.IGNORECASE)
_FORBIDDEN = re.compile(r'[<>:"|?*]')
# Control characters, invisible ones that turn text around, halves of a character.
_INVISIBLE = ("Cc", "Cf", "Cs")
# Room for the longest ending a run may need: partial, step, number, temp file.
MAX_PART_BYTES, MAX_DEPTH = 150, 8
_REMEDY = "Give output_name a plain name such as my_lora, or subfolder/my_lora."


def output_path(root: Path, name: str) -> Path:
    """Return where the LoRA called ``name`` goes inside ``root``; nothing is created.

    Raises:
        PathError: the name is empty, leaves the folder, or is one that Windows can't hold.
    """
    cleaned = name.strip().replace("\\", "/").removesuffix(".safetensors")
    reason = _why_not(cleaned)
    if reason:
        raise PathError(name, f"output_name {reason}. {_REMEDY}")
    # Not with_suffix: a name like v1.5 holds a dot of its own.
    path = root / f"{cleaned}.safetensors"
    if not path.resolve().is_relative_to(root.resolve()):
        raise PathError(name, f"output_name leads outside {root}. {_REMEDY}")
    return path


def _why_not(cleaned: str) -> str | None:
    if not cleaned:
        return "is empty"
    if cleaned.startswith("/"):
        return "is an absolute path; LoRAs are written inside ComfyUI's LoRA folder only"
    parts = cleaned.split("/")
    if len(parts) > MAX_DEPTH:
        return f"has {len(parts)} parts; {MAX_DEPTH} are allowed"
    reasons = (_why_not_part(part) for part in parts)
    return next((reason for reason in reasons if reason), None)


def _why_not_part(part: str) -> str | None:
    if part in ("", ".", ".."):
        return f"holds '{part}' as a folder, which could lead outside the LoRA folder"
    if _FORBIDDEN.search(part) or any(unicodedata.category(letter) in _INVISIBLE for letter in part):
        return f"holds a character that not every system allows in file names: {part!r}"
    if _RESERVED.match(part) or part[-1] in " .":
        return f"holds the part '{part}', which Windows can't use as a name"
    if len(part.encode("utf-8")) > MAX_PART_BYTES:
        return f"holds a part of {len(part.encode('utf-8'))} bytes; {MAX_PART_BYTES} are allowed"
    return None


def numbered(path: Path) -> Iterator[Path]:
    """Yield ``path``, then ``name_2``, ``name_3``, ..., without end."""
    yield path
    yield from (path.with_name(f"{path.stem}_{number}{path.suffix}") for number in itertools.count(2))


def free_path(path: Path) -> Path:
    """Return the first of ``numbered`` that does not exist."""
    return next(candidate for candidate in numbered(path) if not candidate.exists())


def partial_path(path: Path, steps: int) -> Path:
    """Return the free name for what ``steps`` steps of an unfinished run left."""
    return free_path(path.with_name(f"{path.stem}_partial_step{steps:05d}{path.suffix}"))
