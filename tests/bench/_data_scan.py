"""What a folder of pictures costs in a process of its own: time and memory of each step before the cache.

``python -m tests.bench._data_scan FOLDER STORE`` prints one JSON object; ``rows`` runs it for several folders.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from ._data_pictures import KINDS, write_pictures
from ._full_size import ROOT

MIB = 1 << 20
RATE_KIND = "jpeg, 1024 px"
# It takes as long for each of them as for many.
MOST_SCORED_ALONE = 500
SCAN, EXAMINE, LOAD, SCORE, SCORE_ALL = "scan", "examine", "load_dataset", "score", "score_all"


@dataclass
class Steps:
    """Times each step, and looks at the process's memory after each picture."""

    process: psutil.Process = field(default_factory=psutil.Process)
    found: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0

    def look(self, *_: Any) -> None:
        """Note how much memory is in use; serves as a progress report's listener."""
        self.peak_bytes = max(self.peak_bytes, self.process.memory_info().rss)

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """Return what ``work`` returns."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        self.found[f"{name}_s"] = time.perf_counter() - wall
        self.found[f"{name}_cpu_s"] = time.process_time() - cpu
        self.look()
        self.found[f"{name}_peak_mib"] = self.peak_bytes / MIB
        return result


def rows(numbers: list[int], number_of_others: int, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each number of pictures of the usual kind, then one for each other kind."""
    wanted = [(RATE_KIND, number) for number in sorted(numbers)]
    wanted += [(kind, number_of_others) for kind in KINDS if kind != RATE_KIND and number_of_others]
    return [row(kind, number, folder / f"{index}") for index, (kind, number) in enumerate(wanted)]


def row(kind: str, number: int, folder: Path) -> dict[str, Any]:
    """Return what ``number`` pictures of ``kind`` take, in a fresh process; the pictures are removed again."""
    write_pictures(folder / "set", KINDS[kind], number)
    command = [sys.executable, "-m", __spec__.name, str(folder / "set"), str(folder / "store")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    shutil.rmtree(folder)
    if ran.returncode:
        raise RuntimeError(f"The scan of {number} pictures failed:\n{ran.stderr}")
    found: dict[str, float] = json.loads(ran.stdout)
    return {"kind": kind, "pictures": number, **figures(found, number)}


def figures(found: dict[str, float], number: int) -> dict[str, float]:
    """Return rates and costs of one picture.

    ``load_dataset`` is both that the node does; ``score`` and ``score_all`` (all measures) read the pictures anew.
    ``cpu_ms`` is what all threads of a picture's step take together: two free cores do ``2000 / cpu_ms`` a second.
    """
    for key in ("s", "cpu_s"):
        found[f"{LOAD}_{key}"] = found[f"{SCAN}_{key}"] + found[f"{EXAMINE}_{key}"]
    of_all, alone = dict.fromkeys((SCAN, EXAMINE, LOAD), number), min(number, MOST_SCORED_ALONE)
    numbers = {**of_all, SCORE: alone, SCORE_ALL: alone}
    result = {f"{name}_per_s": num / found[f"{name}_s"] for name, num in numbers.items()}
    result |= {f"{name}_cpu_ms": 1000 * found[f"{name}_cpu_s"] / num for name, num in numbers.items()}
    result |= {f"{name}_s": found[f"{name}_s"] for name in ("second_scan", "second_examine", "score_after_examine")}
    result |= {"start_mib": found["start_mib"], "scan_peak_mib": found["scan_peak_mib"]}
    result["peak_mib"] = max(value for name, value in found.items() if name.endswith("_peak_mib"))
    return {name: round(value, 3) for name, value in result.items()}


def main(arguments: list[str]) -> int:
    """Measure one folder, in this process."""
    from lowvram_lora.config import ComplexityConfig, DataConfig
    from lowvram_lora.data.complexity import score
    from lowvram_lora.data.examination import examination
    from lowvram_lora.data.scan import scan

    folder, store = map(Path, arguments)
    every = ComplexityConfig(frequency_weight=1.0, edge_weight=1.0, colour_weight=1.0)
    steps = Steps()
    steps.look()
    start = steps.peak_bytes / MIB
    config = DataConfig(folder=str(folder), upscale=True)
    dataset = steps.run(SCAN, lambda: scan(config, [folder.parent], steps.look, store_root=store))
    steps.run(EXAMINE, lambda: examination(dataset, store, steps.look))
    steps.run("score_after_examine", lambda: score(dataset, ComplexityConfig(), store, steps.look))
    steps.run("second_scan", lambda: scan(config, [folder.parent], steps.look, store_root=store))
    steps.run("second_examine", lambda: examination(dataset, store, steps.look))
    some = replace(dataset, samples=dataset.samples[:MOST_SCORED_ALONE])
    steps.run(SCORE, lambda: score(some, ComplexityConfig(), None, steps.look))
    steps.run(SCORE_ALL, lambda: score(some, every, None, steps.look))
    print(json.dumps({"start_mib": start, **steps.found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
