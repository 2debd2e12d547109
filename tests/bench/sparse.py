"""What each technique of the data side is worth: on and off, in bytes, tokens, time and what is learned.

The toy world's lesson (``tests/toyworld/techniques.py``) is trained with each technique on, and compared with the run
of the same seed that has all but this one: after as many pictures, each seen as often. Marks are the judge's: the
validation loss, and how often the new shape is drawn (``shape``, ``strict``). Every way has the learning rate that the
judge's sweep found for the plain way. Where a budget makes fewer and larger batches, it makes fewer updates; nothing
makes up for it. Seconds are of one run on a CPU, so only their ratios say anything.

What a toy of 96 pixels and one chunk of text can't show is counted at full size, without a device.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.bench import _full_size, _techniques, quality
from tests.bench._jobs import core_of
from tests.toyworld import judge, studio, task, techniques, trainers, verdict
from tests.toyworld.techniques import OFF, WAYS

PARTS = ("toy", "full-size")
LOW_IS_GOOD = {"loss": True, "shape": False, "strict": False, "drift": True}

Measures = dict[str, dict[str, list[float]]]
"""A value for each seed, by way and measure."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="dev.py bench sparse", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="run these parts alone")
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for and print it."""
    options = parse(arguments)
    began = time.perf_counter()
    # Tensors are tiny, or have no data: more threads would wait longer than they compute.
    torch.set_num_threads(1)
    pack = _full_size.enter_host()
    import comfy.utils

    comfy.utils.set_progress_bar_enabled(False)
    said = partial(print, file=sys.stderr, flush=True)
    result: dict[str, Any] = {}
    if "toy" in options.only:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(pack, studio.open_studio(), said, Path(folder))
            result["toy"] = bench.measured(quality.SEEDS[:1] if options.quick else quality.SEEDS)
    if "full-size" in options.only:
        result["full_size"] = list(_techniques.rows(pack, _full_size.model))
        result["latent_bytes"] = _techniques.encoded(core_of(pack))
    result["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(quality.finite(result), allow_nan=False) if options.json else table(result))
    return 0


class Bench:
    """Trains each way of the lesson and marks what it gives.

    Args:
        say: takes a line of progress.
        folder: for pictures, cache and runs.
        ways: by name; every ``against`` is among them, and comes first.
        pictures: of the lesson.
        epochs: through them.
        count: captions of each kind that are drawn.
    """

    def __init__(
        self,
        pack: Any,
        opened: studio.Studio,
        say: Callable[[str], None],
        folder: Path,
        ways: Mapping[str, techniques.Way] = WAYS,
        pictures: int = techniques.lessons.NUM_PICTURES,
        epochs: int = techniques.EPOCHS,
        count: int = judge.COUNT,
    ) -> None:
        self._pack, self._say, self._folder, self._ways, self._epochs = pack, say, folder, ways, epochs
        self._rate, self._concept = quality.RATES["ours"], quality.CONCEPT
        self.lesson = techniques.Lesson(pack, opened, self._concept, folder / "lesson", pictures)
        self._judge = judge.judge(opened, self._concept, count)

    def measured(self, seeds: Sequence[int]) -> dict[str, Any]:
        """Return all measures of all ways, and each compared with the way that lacks its technique."""
        measures: Measures = {name: {} for name in self._ways}
        details: dict[str, dict[str, Any]] = {name: {} for name in self._ways}
        same: dict[str, list[bool]] = {name: [] for name in self._ways}
        for seed in seeds:
            taught: dict[str, tuple[task.Taught, judge.Marks]] = {}
            for name, way in self._ways.items():
                given, numbers, details[name] = self._trained(name, seed)
                other = taught.get(way.against)
                is_same = other is not None and not trainers.differing(given, other[0])
                marks = other[1] if other is not None and is_same else self._judge.marks(given.lora)
                taught[name] = given, marks
                same[name].append(is_same)
                for measure, value in {**asdict(marks), **numbers}.items():
                    measures[name].setdefault(measure, []).append(value)
                self._say(f"seed {seed}: {name}: {quality.line(marks)}{' (the same bits)' if is_same else ''}")
        return {
            "concept": self._concept,
            "rate": self._rate,
            "seeds": list(seeds),
            "base": asdict(self._judge.base_marks()),
            "ways": {
                name: {
                    **details[name],
                    "measures": {measure: verdict.summary(values) for measure, values in measures[name].items()},
                }
                for name in self._ways
            },
            "compared": {
                name: {"against": way.against, "same_bits": all(same[name]), **compared(measures, name, way.against)}
                for name, way in self._ways.items()
                if way.against
            },
        }

    def _trained(self, name: str, seed: int) -> tuple[task.Taught, dict[str, float], dict[str, Any]]:
        """Return what a way gives, its numbers, and what else there is to say of it."""
        host = self._pack.nodes._host
        with tempfile.TemporaryDirectory(dir=self._folder) as folder, host.outside_inference_mode():
            drawn = self.lesson.drawn(self._ways[name], self._rate, seed, Path(folder), self._epochs)
            counted, seen, held = drawn.counted(), set(drawn.seen.values()), drawn.device_bytes()
            done = trainers.ran(drawn.job)
        # The first step makes what later ones find there.
        usual = done.seconds[1:] or done.seconds
        step_s = sum(usual) / len(usual)
        numbers = {
            "step_s": step_s,
            "picture_s": step_s * counted["steps"] / counted["samples"],
            **{f"device_bytes_{what}": value for what, value in held.items()},
            **{key: value for key, value in counted.items() if not isinstance(value, dict)},
        }
        details = {
            "times_seen": sorted(seen),
            "scales": counted["scales"],
            "precisions": counted["precisions"],
            "notes": list(done.notes),
        }
        return task.Taught(done.record.lora, done.record.losses, step_s), numbers, details


def compared(measures: Measures, name: str, other: str) -> dict[str, Any]:
    """Return how a way differs from another, seed by seed: ratios of time and bytes, differences of marks."""

    def pairs(measure: str) -> list[tuple[float, float]]:
        return list(zip(measures[name][measure], measures[other][measure], strict=True))

    ratios = ("step_s", "picture_s", "tokens_a_step", "device_bytes_planned", "device_bytes_mean")
    marks = {mark: [one - two for one, two in pairs(mark)] for mark in LOW_IS_GOOD}
    return {
        "ratios": {measure: verdict.summary([one / two for one, two in pairs(measure)]) for measure in ratios},
        "marks": {mark: verdict.summary(values) for mark, values in marks.items()},
        "worse_for_every_seed": [mark for mark, values in marks.items() if all(_is_worse(mark, v) for v in values)],
    }


def _is_worse(mark: str, difference: float) -> bool:
    return difference > 0 if LOW_IS_GOOD[mark] else difference < 0


def table(result: dict[str, Any]) -> str:
    """Return the result as lines."""
    lines = _toy_lines(result["toy"]) if "toy" in result else []
    if "full_size" in result:
        lines += ["", f"{'':68}{'kept':>10}{'recomputed':>12}  MiB{'TFLOP':>10}"]
        for row in result["full_size"]:
            name = f"{row['technique']}, {row['way']} ({row['label'].split(',')[0]})"
            lines.append(
                f"{name:68}{row['kept_mib']:10.1f}{row['recomputed_mib']:12.1f}     {row['forward_tflop']:10.2f}"
            )
        for label, encodings in result["latent_bytes"].items():
            lines.append(f"latents in RAM, {label}: " + ", ".join(f"{k} {v}" for k, v in encodings.items()))
    return "\n".join([*lines, f"{result['seconds']:.0f} s"])


def _toy_lines(toy: dict[str, Any]) -> list[str]:
    names = ("loss", "shape", "strict", "drift", "steps", "tokens_a_step", "device_bytes_planned")
    lines = [f"{toy['concept']:32}" + "".join(f"{name[:16]:>20}" for name in names)]
    lines.append(f"{'base':32}" + "".join(f"{toy['base'][name]:12.4f}        " for name in names[:4]))
    for way, row in toy["ways"].items():
        cells = (row["measures"][name] for name in names)
        lines.append(f"{way:32}" + "".join(f"{cell['mean']:12.4g} ±{cell['spread']:6.3g}" for cell in cells))
    for way, row in toy["compared"].items():
        ratios = ", ".join(f"{name} x {each['mean']:.3f}" for name, each in row["ratios"].items())
        marks = ", ".join(f"{name} {each['mean']:+.4f} ±{each['spread']:.4f}" for name, each in row["marks"].items())
        said = "the same bits" if row["same_bits"] else f"{marks}; worse for every seed: {row['worse_for_every_seed']}"
        lines.append(f"{way} against {row['against'] or OFF}: {ratios}; {said}")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
