"""What a LoRA is worth, by what the host draws with it: our trainer against the host's own and a plain PEFT loop.

All learn a shape that the base model can't draw, from the same pictures, and see as many of them, each at the rate that
one sweep, the same for all, found for it on another shape. Ours and the plain loop take steps of 8 pictures. The host's
node takes steps of 1, since its batches are at fault, and so 8 times as many steps, which if anything helps it.
Arithmetic is float32 everywhere. Marks: see tests/toyworld/judge.py; what they must show: tests/toyworld/verdict.py.
Seconds are reported and not judged: ours_on runs on a played device.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from tests.bench import _full_size
from tests.toyworld import judge, native, reference, studio, task, trainers, verdict

CONCEPT, SWEEP_CONCEPT = "heart", "dome"
SEEDS = (0, 1, 2)
GRID = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
SWEEP_COUNT = 24
"""Captions of each kind that a sweep draws: enough to tell rates from each other that differ by two."""
RATES = {"ours": 4e-3, "reference": 8e-3, "native": 5e-4}
"""What `python3 dev.py bench quality --sweep` found."""
SWEPT = {"ours": "ours_off", "reference": "reference", "native": "native"}
"""By whom each rate is found: ours has the same on and off."""
LEAST_SWEPT = 0.3
"""Shape score that a rate must reach to be chosen."""
ALIKE = 2 / SWEEP_COUNT
"""Difference of what rates are worth, two pictures, that is chance."""
SHAPE_FLOOR = 0.5

Progress = Callable[[str], None]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="dev.py bench quality", description=__doc__)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--quick", action="store_true", help="one seed, at the rates that an earlier sweep found")
    part.add_argument("--sweep", action="store_true", help="only look for the rates")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Judge, print the marks, and return 1 if they do not show what they must."""
    options = parse(arguments)
    began = time.perf_counter()
    pack = _full_size.enter_host()
    import comfy.utils

    comfy.utils.set_progress_bar_enabled(False)
    said = partial(print, file=sys.stderr, flush=True)
    bench = Bench(pack, studio.open_studio(), said)
    rates = RATES
    result: dict[str, Any] = {}
    if not options.quick:
        result["sweep"] = bench.sweep(SWEEP_CONCEPT, GRID)
        rates = {name: found["rate"] for name, found in result["sweep"].items()}
    if not options.sweep:
        result |= bench.judged(CONCEPT, SEEDS[:1] if options.quick else SEEDS, rates)
    result["problems"] = [*unsettled(result.get("sweep", {}), GRID), *result.get("problems", ())]
    result["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(finite(result), allow_nan=False) if options.json else table(result))
    return 1 if result.get("problems") else 0


class Bench:
    """Runs trainers and marks what they give.

    Args:
        say: takes a line of progress.
        samples: pictures that each trainer sees.
        count: captions of each kind that are drawn.
    """

    def __init__(
        self, pack: Any, opened: studio.Studio, say: Progress, samples: int = task.SAMPLES, count: int = judge.COUNT
    ) -> None:
        self._pack, self._studio, self._say = pack, opened, say
        self._samples, self._count = samples, count
        self.trainers: dict[str, task.Trainer] = {
            "ours_on": partial(trainers.ours_on, pack),
            "ours_off": partial(trainers.ours_off, pack),
            "ours_exact": partial(trainers.ours_exact, pack),
            "reference": reference.train,
            "native": native.train,
        }

    def sweep(self, concept: str, grid: Sequence[float], count: int = SWEEP_COUNT) -> dict[str, Any]:
        """Return for each trainer the rate that is worth most, and all marks."""
        asked, marking = self.asked(concept, count)
        found: dict[str, Any] = {}
        for name, trainer in SWEPT.items():
            marks: dict[float, judge.Marks] = {}
            for rate in grid:
                marks[rate] = marking.marks(self.train(trainer, asked, rate, 0).lora)
                self._say(f"{concept}: {name} at {rate:g}: {line(marks[rate])}")
            found[name] = {"rate": best(marks), "marks": {f"{rate:g}": asdict(mark) for rate, mark in marks.items()}}
        return found

    def train(self, name: str, asked: task.Task, rate: float, seed: int) -> task.Taught:
        """Run a trainer on one thread: its tensors are tiny, and two would wait longer than they compute."""
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            return self.trainers[name](asked, rate, seed)
        finally:
            torch.set_num_threads(threads)

    def judged(self, concept: str, seeds: Sequence[int], rates: dict[str, float]) -> dict[str, Any]:
        """Return the marks of every trainer on ``concept``, and what they fail to show."""
        asked, marking = self.asked(concept)
        # That one is only to be the same, bit for bit, as ours_off.
        names = [name for name in self.trainers if name != "ours_exact"]
        measures: dict[str, dict[str, list[float]]] = {name: {} for name in names}
        distances, differing = [], []
        for seed in seeds:
            taught: dict[str, task.Taught] = {}
            for name in names:
                rate = rates[name if name in rates else "ours"]
                taught[name] = self.train(name, asked, rate, seed)
                marks = marking.marks(taught[name].lora)
                for measure, value in {**asdict(marks), "step_s": taught[name].step_s}.items():
                    measures[name].setdefault(measure, []).append(value)
                self._say(f"seed {seed}: {name}: {line(marks)}")
            distances.append(trainers.loss_distance(taught["ours_on"], taught["ours_off"]))
            exact = self.train("ours_exact", asked, rates["ours"], seed)
            differing += trainers.differing(exact, taught["ours_off"])
        device_bytes = self._bytes(asked)
        base = {**asdict(marking.base_marks()), "old_strict": marking.old_strict}
        # max() would pass over a NaN that is not the first.
        distance = max(distances) if all(map(math.isfinite, distances)) else math.nan
        found = [
            *verdict.heavier(device_bytes),
            *verdict.unreal(measures),
            *verdict.unequal(differing, distance),
            *verdict.problems(measures),
            *verdict.unlearned(measures, base),
            *verdict.below_floor(measures["ours_on"]["shape"], SHAPE_FLOOR),
        ]
        return {
            "concept": concept,
            "samples": asked.samples,
            "seeds": list(seeds),
            "rates": rates,
            "base": base,
            "trainers": {
                name: {measure: verdict.summary(values) for measure, values in each.items()}
                for name, each in measures.items()
            },
            "device_bytes": device_bytes,
            "exact_differing": differing,
            "on_off_loss_distance": distance,
            "problems": found,
        }

    def asked(self, concept: str, count: int | None = None) -> tuple[task.Task, judge.Judge]:
        """Return what is to be learned, and the exam on it; ``count`` captions of each kind, or as many as usual."""
        asked = task.task(self._studio, concept, self._samples)
        return asked, judge.judge(self._studio, concept, count or self._count)

    def _bytes(self, asked: task.Task) -> dict[str, int | None]:
        """Return the device bytes of a step: ours simulated, the plain loop's counted, the host's not known."""
        return {
            "ours_on": trainers.device_bytes(self._pack, asked, trainers.everything),
            "ours_off": trainers.device_bytes(self._pack, asked, trainers.nothing),
            "reference": reference.live_bytes(asked),
            "native": None,
        }


def worth(marks: judge.Marks) -> float:
    """Return what a sweep looks for: the new is drawn, and nothing is forgotten."""
    return marks.shape - marks.drift


def best(marks: Mapping[float, judge.Marks]) -> float:
    """Return the rate that is worth most; one that learned next to nothing is worth nothing for having kept all.

    Of rates that so few pictures can't tell apart, the one with the lowest loss is taken.
    """
    learned = {rate: mark for rate, mark in marks.items() if mark.shape >= LEAST_SWEPT} or dict(marks)
    most = max(worth(mark) for mark in learned.values())
    alike = {rate: mark for rate, mark in learned.items() if worth(mark) >= most - ALIKE}
    return min(alike, key=lambda rate: alike[rate].loss)


def unsettled(sweep: Mapping[str, Any], grid: Sequence[float]) -> list[str]:
    """Return for which trainers a sweep has not found a rate: the best at an end of the grid, or nothing learned."""
    found = []
    for name, swept in sweep.items():
        if swept["rate"] in (grid[0], grid[-1]):
            found.append(f"{name}: the best rate is {swept['rate']:g}, at an end of the grid; widen it.")
        if swept["marks"][f"{swept['rate']:g}"]["shape"] < LEAST_SWEPT:
            found.append(f"{name}: no rate of the grid learned the concept.")
    return found


def line(marks: judge.Marks) -> str:
    """Return marks in one line."""
    return " ".join(f"{name} {value:.3f}" for name, value in asdict(marks).items())


def finite(value: Any) -> Any:
    """Return ``value`` with None for every number that JSON has no word for."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(result: dict[str, Any]) -> str:
    """Return the result as lines."""
    lines = [f"rate of {name:10} {found['rate']:g}" for name, found in result.get("sweep", {}).items()]
    if "trainers" in result:
        names = ("loss", "shape", "strict", "drift", "step_s")
        lines.append(f"{result['concept']:10}" + "".join(f"{name:>18}" for name in names) + f"{'device KiB':>12}")
        lines.append(f"{'base':10}" + "".join(f"{result['base'][name]:12.4f}      " for name in names[:-1]))
        for trainer, each in result["trainers"].items():
            cells = (f"{each[name]['mean']:10.4f} ±{each[name]['spread']:6.4f}" for name in names)
            num_bytes = result["device_bytes"][trainer]
            lines.append(f"{trainer:10}" + "".join(cells) + f"{num_bytes >> 10 if num_bytes else 'not known':>12}")
        lines.append(f"exact techniques change {len(result['exact_differing'])} tensors")
        lines.append(f"all techniques change a step's loss by {result['on_off_loss_distance']:.1e} at most")
        lines += result["problems"] or ["Everything that must hold holds."]
    return "\n".join([*lines, f"{result['seconds']:.0f} s"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
