"""The data side in numbers: scan and score, memory, cache build, encodings, planning.

Pictures are made up, in a temporary folder. Times depend on the machine: compare those of one run. Where a machine is
busy, read what counts processor time: ``cpu``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from . import _data_cache, _data_encodings, _data_planning, _data_scan, _full_size

PARTS = ("scan", "build", "files", "encodings", "planning")

SCAN_S_OF_10000, PLANNING_S, MOST_OVER_BARE_LOOP = 60.0, 3.0, 1.05
# A sample is its names, digests and captions. Of a picture of 1024 pixels a side there are megabytes.
FLAT_KIB_PER_PICTURE = 16.0
_FREE_CORES = 2


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="dev.py bench data", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts alone")
    parser.add_argument("--pictures", default="100,1000,10000", help="numbers of pictures to scan, comma between")
    parser.add_argument("--others", type=int, default=100, help="of PNG and of 12-megapixel pictures; 0 for none")
    parser.add_argument("--build", type=int, default=24, help="pictures of the cache build")
    parser.add_argument("--side", type=int, default=512, help="of the pictures of the cache build, in pixels")
    parser.add_argument("--rounds", type=int, default=3, help="of the cache build")
    parser.add_argument("--samples", type=int, default=10_000, help="of an epoch, and of files against shards")
    parser.add_argument("--batch", type=int, default=4, help="of an epoch")
    parser.add_argument("--vae", type=Path, help="a VAE file, for the encodings, instead of the toy world's")
    parser.add_argument(
        "--photos", type=Path, help="a folder, for the encodings, instead of scikit-image's photographs"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    try:
        options.pictures = sorted({int(number) for number in options.pictures.split(",")})
    except ValueError:
        parser.error(f"--pictures: {options.pictures!r} is not numbers with commas between")
    smallest = min(*options.pictures, options.build, options.rounds, options.samples, options.batch)
    if smallest < 1 or options.others < 0:
        parser.error("numbers must be 1 or more, --others 0 or more")
    if options.vae and not options.vae.is_file():
        parser.error(f"--vae: there is no file {options.vae}")
    if options.photos and not _data_encodings.pictures_in(options.photos):
        parser.error(f"--photos: no picture in {options.photos}")


def main(arguments: list[str]) -> int:
    """Run the benchmark and print its numbers."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = measured(options, Path(folder))
    result["claims"] = claims(result)
    print(json.dumps(result) if options.json else "\n\n".join(text(result)))
    return 0


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the numbers of each part that is wanted, by its name."""
    pack = _full_size.enter_host() if {"build", "files", "encodings"} & set(options.only) else None
    result: dict[str, Any] = {}
    if "scan" in options.only:
        result["scan"] = _data_scan.rows(options.pictures, options.others, folder / "scan")
    with torch.inference_mode():
        if "build" in options.only:
            wanted = _data_cache.Builds(options.build, options.side, options.rounds)
            result["build"] = _data_cache.builds(pack, wanted, folder / "build")
        if "files" in options.only:
            result["files"] = _data_cache.files_and_shards(pack, options.samples, folder / "files")
        if "encodings" in options.only:
            result["encodings"] = _data_encodings.encodings(options.vae, options.photos)
    if "planning" in options.only:
        result["planning"] = _data_planning.planning(_data_planning.Made(options.samples, options.batch))
    return result


def claims(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what is claimed, the most it may be, and what was found."""
    found: list[tuple[str, float, float]] = []
    usual = [row for row in result.get("scan", ()) if row["kind"] == _data_scan.RATE_KIND]
    if usual:
        most = usual[-1]
        found.append(("10,000 pictures scanned, seconds", SCAN_S_OF_10000, 10_000 / most["scan_per_s"]))
        on_free_cores = 10_000 * most["scan_cpu_ms"] / 1000 / _FREE_CORES
        found.append(("10,000 pictures scanned, seconds of two free cores", SCAN_S_OF_10000, on_free_cores))
    if len(usual) > 1:
        found.append(("memory for each more picture, KiB", FLAT_KIB_PER_PICTURE, growth_kib(usual)))
    if "build" in result:
        name = "cache build over a bare loop over vae.encode"
        found.append((name, MOST_OVER_BARE_LOOP, result["build"]["build_over_bare_loop"]))
        # On a busy machine the clock says nothing; this counts the reading as well, which a loop on a device hides.
        found.append((f"{name}, processor time", MOST_OVER_BARE_LOOP, result["build"]["build_cpu_over_bare_loop"]))
    if "planning" in result:
        planning = result["planning"]
        name = f"an epoch of {planning['samples']:,} samples planned, seconds"
        found.append((name, PLANNING_S, planning["slowest_epoch_s"]))
        found.append((f"{name} of one free core", PLANNING_S, planning["slowest_epoch_cpu_s"]))
    rounded = [(claim, limit, round(value, 3)) for claim, limit, value in found]
    return [
        {"claim": claim, "at_most": limit, "found": value, "holds": value <= limit} for claim, limit, value in rounded
    ]


def growth_kib(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the KiB that each picture adds to a process's largest size, between the last two numbers of pictures."""
    fewer, more = rows[-2:]
    grown_mib: float = more["peak_mib"] - fewer["peak_mib"]
    return grown_mib * 1024 / (more["pictures"] - fewer["pictures"])


def text(result: Mapping[str, Any]) -> Iterable[str]:
    """Yield each part as a title with aligned text below it."""
    for name, found in result.items():
        if isinstance(found, list):
            yield f"{name}\n{table(found, upright=name == 'scan')}"
        elif name == "encodings":
            yield from (f"{name}: {source}\n{table(rows)}" for source, rows in found.items())
        else:
            plain = {key: value for key, value in found.items() if key != "rows"}
            yield f"{name}\n" + aligned([[key, cell(value)] for key, value in plain.items()])
            if "rows" in found:
                yield table(found["rows"])


def table(rows: Sequence[Mapping[str, Any]], upright: bool = False) -> str:
    """Return rows with the names of their columns above, or, ``upright``, as columns beside the names."""
    lines = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    return aligned([list(line) for line in zip(*lines, strict=True)] if upright else lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return the lines with their columns below each other."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = ("  ".join(each.ljust(width) for each, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def cell(value: Any) -> str:
    """Return a value as text that fits a line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
