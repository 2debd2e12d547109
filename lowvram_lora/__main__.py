"""Clean the cache by hand: ``python -m lowvram_lora clean``, in the pack's folder, with ComfyUI's Python."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .data.cleaning import clean
from .data.store import has_cache
from .errors import LowVramLoraError
from .units import GIB, format_bytes

# <ComfyUI>/custom_nodes/<this pack>/lowvram_lora/__main__.py
_USUAL_CACHE = Path(__file__).resolve().parents[3] / "user" / "lowvram_lora" / "cache"
_MOST_GB = 1_000_000


def main(arguments: Sequence[str]) -> int:
    """Do what ``arguments`` ask for; return 1, with a sentence on stderr, where it can't be done."""
    options = _parse(arguments)
    root: Path = options.cache
    if not has_cache(root):
        _say(f"{root} holds no encodings of this pack. Name ComfyUI's folder user/lowvram_lora/cache with --cache.")
        return 1
    try:
        # A limit of 0 bytes would be none at all.
        cleaned = clean(root, 0 if options.limit_gb is None else max(int(options.limit_gb * GIB), 1))
    except LowVramLoraError as error:
        _say(str(error))
        return 1
    removed = f"Removed {cleaned.num_removed} encodings, {format_bytes(cleaned.freed_bytes)}. "
    sys.stdout.write(f"{removed}{root} takes {format_bytes(cleaned.total_bytes)}.\n")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lowvram_lora", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("clean", help="remove encodings that were not used for the longest time")
    command.add_argument("--cache", type=Path, default=_USUAL_CACHE, help="the folder; usually found by itself")
    command.add_argument("--limit-gb", type=_limit, help="GiB that may stay; without it, only say what there is")
    return parser.parse_args(arguments)


def _limit(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) <= _MOST_GB:
            return float(text)
    raise argparse.ArgumentTypeError(f"is {text}; it must be a number from 0 to {_MOST_GB}")


def _say(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
