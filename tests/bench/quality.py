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
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import torch

from tests.bench import _full_size
from tests.toyworld import judge, native, reference, studio, task, trainers, verdict

CONCEPT, SWEEP_CONCEPT = "heart", "dome"
SEEDS = (0, 1, 2)
GRID = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
SWEEP_COUNT = 24
"""Captions of each kind that a sweep draws with each LoRA."""
RATES = {"ours": 8e-3, "reference": 8e-3, "native": 5e-4}
"""What `python3 dev.py bench quality --sweep` found."""
SWEPT = {"ours": "ours_off", "reference": "reference", "native": "native"}
"""By whom each rate is found: ours has the same on and off."""
LEAST_SWEPT = 0.3
"""Shape score that a rate must reach to be chosen."""
ALIKE = 2 / SWEEP_COUNT
"""Difference of what rates are worth, two pictures, that is chance where each was tried with one seed."""
EXACT_STEPS = 50
"""Steps after which the exact techniques are compared with none: each step does the same, and the played device takes
ten times as long for it."""
SHAPE_FLOOR = 0.5

Progress = Callable[[str], None]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="dev.py bench quality", description=__doc__)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--quick", action="store_true", help="one seed, at the rates that an earlier sweep found")
    part.add_argument("--sweep", action="store_true", help="only look for the rates")
    parser.add_argument("--trainers", nargs="+", choices=tuple(SWEPT), default=list(SWEPT), help="only look for theirs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.trainers != list(SWEPT) and not options.sweep:
        parser.error("--trainers goes with --sweep: a verdict is on all of them")
    return options


def main(arguments: Sequence[str]) -> int:
    """Judge, print the marks, and return 1 if they do not show what they must."""
    options = parse(arguments)
    began = time.perf_counter()
    pack = _full_size.enter_host()
    import comfy.utils

    comfy.utils.set_progress_bar_enabled(False)
    # Tensors are tiny: more threads wait for each other longer than they compute.
    torch.set_num_threads(1)
    said = partial(print, file=sys.stderr, flush=True)
    bench = Bench(pack, studio.open_studio(), said)
    rates = RATES
    result: dict[str, Any] = {}
    if not options.quick:
        result["sweep"] = sweeps(bench, options.trainers)
        rates = {name: found["rate"] for name, found in result["sweep"].items()}
    if not options.sweep:
        result |= bench.judged(CONCEPT, SEEDS[:1] if options.quick else SEEDS, rates)
    result["problems"] = [*unsettled(result.get("sweep", {}), GRID), *result.get("problems", ())]
    result["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(finite(result), allow_nan=False) if options.json else table(result))
    return 1 if result.get("problems") else 0


def sweeps(bench: Bench, names: Sequence[str]) -> dict[str, Any]:
    """Return what the sweep finds for each trainer; the last one, which takes longest, has a process of its own."""
    *here, last = names
    if not here:
        return bench.sweep(SWEEP_CONCEPT, GRID, names)
    command = [sys.executable, "-m", "tests.bench.quality", "--sweep", "--json", "--trainers", last]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as beside:
        found = bench.sweep(SWEEP_CONCEPT, GRID, here)
        said, _ = beside.communicate()
    return found | json.loads(said)["sweep"]


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

    def sweep(self, concept: str, grid: Sequence[float], names: Sequence[str]) -> dict[str, Any]:
        """Return for each trainer the rate that is worth most, and all marks."""
        asked, marking = self.asked(concept, SWEEP_COUNT)
        found: dict[str, Any] = {}
        for name in names:
            trainer = SWEPT[name]

            def tried(rate: float, seed: int, trainer: str = trainer) -> judge.Marks:
                marks = marking.marks(self.train(trainer, asked, rate, seed).lora)
                self._say(f"{concept}: {trainer} at {rate:g}, seed {seed}: {line(marks)}")
                return marks

            rate, marks = swept(tried, grid)
            every = {f"{rate:g}": [asdict(mark) for mark in each] for rate, each in marks.items()}
            found[name] = {"rate": rate, "marks": every}
        return found

    def train(self, name: str, asked: task.Task, rate: float, seed: int) -> task.Taught:
        """Run a trainer."""
        return self.trainers[name](asked, rate, seed)

    def judged(self, concept: str, seeds: Sequence[int], rates: dict[str, float]) -> dict[str, Any]:
        """Return the marks of every trainer on ``concept``, and what they fail to show."""
        asked, marking = self.asked(concept)
        # That one is only to be the same, bit for bit, as ours_off.
        names = [name for name in self.trainers if name != "ours_exact"]
        measures: dict[str, dict[str, list[float]]] = {name: {} for name in names}
        step_distances, differing = [], []
        for seed in seeds:
            taught: dict[str, task.Taught] = {}
            for name in names:
                rate = rates[name if name in rates else "ours"]
                taught[name] = self.train(name, asked, rate, seed)
                marks = marking.marks(taught[name].lora)
                for measure, value in {**asdict(marks), "step_s": taught[name].step_s}.items():
                    measures[name].setdefault(measure, []).append(value)
                self._say(f"seed {seed}: {name}: {line(marks)}")
            step_distances.append(trainers.loss_distance(taught["ours_on"], taught["ours_off"]))
            short = replace(asked, samples=min(asked.samples, EXACT_STEPS * task.BATCH))
            exact, off = (self.train(name, short, rates["ours"], seed) for name in ("ours_exact", "ours_off"))
            differing += trainers.differing(exact, off)
        device_bytes = self._bytes(asked)
        base = {**asdict(marking.base_marks()), "old_strict": marking.old_strict}
        distance = verdict.distance(measures["ours_on"]["loss"], measures["ours_off"]["loss"])
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
            "on_off_step_loss_distance": verdict.greatest(step_distances),
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


def swept(
    tried: Callable[[float, int], judge.Marks], grid: Sequence[float]
) -> tuple[float, dict[float, list[judge.Marks]]]:
    """Return the rate that is worth most, and the marks of every rate tried, one for each seed.

    From the lowest rate up each is tried with one seed, until two in a row are worth clearly less than the best was.
    Those that one seed can't tell from the best are then tried with the others: a sweep by one seed finds other rates
    for two trainers that are the same.

    Args:
        tried: takes a rate and a seed.
    """
    marks: dict[float, list[judge.Marks]] = {}
    for rate in grid:
        marks[rate] = [tried(rate, SEEDS[0])]
        near = alike({rate: each[0] for rate, each in marks.items()})
        if marks[max(near)][0].shape >= LEAST_SWEPT and len([rate for rate in marks if rate > max(near)]) == 2:
            break
    for rate in near:
        marks[rate] += [tried(rate, seed) for seed in SEEDS[1:]]
    return best({rate: mean(marks[rate]) for rate in near}), marks


def alike(marks: Mapping[float, judge.Marks]) -> list[float]:
    """Return the rates that one seed can't tell from the best; one that learned next to nothing is worth nothing."""
    learned = {rate: mark for rate, mark in marks.items() if mark.shape >= LEAST_SWEPT} or dict(marks)
    most = max(worth(mark) for mark in learned.values())
    return [rate for rate, mark in learned.items() if worth(mark) >= most - ALIKE - 1e-9]


def best(marks: Mapping[float, judge.Marks]) -> float:
    """Return the rate that is worth most; of two that are worth the same, the one with the lower loss."""
    return max(marks, key=lambda rate: (round(worth(marks[rate]), 6), -marks[rate].loss))


def mean(marks: Sequence[judge.Marks]) -> judge.Marks:
    """Return the mean of each mark."""
    names = [field.name for field in fields(judge.Marks)]
    return judge.Marks(**{name: statistics.fmean(getattr(mark, name) for mark in marks) for name in names})


def unsettled(sweep: Mapping[str, Any], grid: Sequence[float]) -> list[str]:
    """Return for which trainers a sweep has not found a rate: the best at an end of the grid, or nothing learned."""
    problems = []
    for name, found in sweep.items():
        if found["rate"] in (grid[0], grid[-1]):
            problems.append(f"{name}: the best rate is {found['rate']:g}, at an end of the grid; widen it.")
        shapes = [mark["shape"] for mark in found["marks"][f"{found['rate']:g}"]]
        if statistics.fmean(shapes) < LEAST_SWEPT:
            problems.append(f"{name}: no rate of the grid learned the concept.")
    return problems


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
        lines.append(f"all techniques change the loss by {result['on_off_loss_distance']:.1e} at most")
        lines.append(f"and that of any single step by {result['on_off_step_loss_distance']:.1e}")
        lines += result["problems"] or ["Everything that must hold holds."]
    return "\n".join([*lines, f"{result['seconds']:.0f} s"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
