"""How long planning an epoch takes, and what sparse batches gain over random ones: no GPU, no pictures.

The samples are made up: groups of pictures that look alike with captions that name the group. Features are computed
from latents and captions as the pack does. CPU seconds count all threads, so they are those of one core, or above.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import torch

from lowvram_lora.data.epochs import EpochConfig, EpochPlanner, PlannedStrategy
from lowvram_lora.data.features import text_features, visual_features
from lowvram_lora.data.outlook import Outlook
from lowvram_lora.data.place import PrecisionByScore
from lowvram_lora.data.population import Candidate, Configuration, Population
from lowvram_lora.data.sparse import SparseConfig, SparsePlanner
from lowvram_lora.data.tokens import Limit, budget_of, by_count, by_tokens, latent_tokens

# Height and width of the buckets in latent pixels, that are drawn from.
BUCKETS = ((128, 128), (112, 144), (144, 112), (104, 152), (152, 104), (88, 176))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="dev.py bench planning", description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=200, help="groups of samples that are alike")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--channels", type=int, default=16, help="of the latents")
    parser.add_argument("--scales", default="1,0.75,0.5", help="what the cache holds, comma between")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if min(options.samples, options.groups, options.batch, options.channels) < 1:
        parser.error("--samples, --groups, --batch and --channels must be 1 or more")
    return options


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    options = parse(arguments)
    torch.set_num_threads(1)
    made, features_s = timed(lambda: population(options))
    rows = [
        row(made, limit, strategy, options) for limit in limits(made, options) for strategy in get_args(PlannedStrategy)
    ]
    result = {
        "samples": options.samples,
        "batch": options.batch,
        "features_ms_per_sample": round(1000 * features_s["cpu_s"] / options.samples, 3),
        "rows": rows,
    }
    print(json.dumps(result) if options.json else table(result))
    return 0


def limits(made: Population, options: argparse.Namespace) -> list[Limit]:
    """Return both ways of cutting."""
    return [by_count(options.batch), by_tokens(budget_of(made, options.batch), options.batch)]


def row(made: Population, limit: Limit, strategy: PlannedStrategy, options: argparse.Namespace) -> dict[str, Any]:
    """Return the times of one strategy, and what its epoch is like."""
    sparse = SparseConfig()
    config = EpochConfig(
        strategy=strategy, seed=options.seed, precision=PrecisionByScore(((0.4, "half"),)), sparse=sparse
    )
    planner, prepared = timed(lambda: EpochPlanner(made, limit, config))
    first, one = timed(lambda: planner.epoch(0))
    _, two = timed(lambda: planner.epoch(1))
    outlook = Outlook(made, first)
    space = SparsePlanner(made, limit, options.seed, sparse, config.precision).space
    gain, _ = timed(lambda: outlook.gain(space, options.seed))
    return {
        "strategy": strategy,
        "limit": limit.label,
        "prepare_cpu_s": prepared["cpu_s"],
        "first_epoch_wall_s": one["wall_s"],
        "first_epoch_cpu_s": one["cpu_s"],
        "next_epoch_cpu_s": two["cpu_s"],
        "batches": len(first),
        "mean_tokens": round(sum(outlook.tokens) / len(first)),
        "max_tokens": max(outlook.tokens),
        "mean_shapes": round(sum(outlook.num_shapes) / len(first), 3),
        "gain": round(gain.planned, 4),
        "gain_by_chance": round(gain.by_chance, 4),
    }


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Return what ``work`` returns, and its seconds by the clock and by the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, {
        "wall_s": round(time.perf_counter() - wall, 3),
        "cpu_s": round(time.process_time() - cpu, 3),
    }


def population(options: argparse.Namespace) -> Population:
    """Return made-up samples."""
    draw = np.random.default_rng(options.seed)
    centres = draw.normal(size=(options.groups, options.channels, 16, 16)).astype(np.float32)
    scales = [float(value) for value in options.scales.split(",")]
    return Population.of([candidate(draw, centres, scales) for _ in range(options.samples)])


def candidate(draw: np.random.Generator, centres: Any, scales: list[float]) -> Candidate:
    """Return one sample: near one of ``centres``, its caption naming the group and some of 500 words."""
    group, (height, width) = int(draw.integers(len(centres))), BUCKETS[int(draw.integers(len(BUCKETS)))]
    latents = torch.from_numpy(centres[group] + draw.normal(0, 0.5, centres[group].shape).astype(np.float32))
    drawn = draw.integers(0, 500, int(draw.integers(3, 40)))
    caption = " ".join([f"group{group}", *(f"word{number}" for number in drawn)])
    shapes = [(len(latents), int(height * scale), int(width * scale)) for scale in scales]
    sizes = [
        Configuration(scale, shape, latent_tokens(shape, 2) + 77) for scale, shape in zip(scales, shapes, strict=True)
    ]
    return Candidate(float(draw.beta(4, 3)), 1, tuple(sizes), visual_features(latents), text_features(caption))


def table(result: dict[str, Any]) -> str:
    """Return the rows as aligned text."""
    rows = result["rows"]
    names = [name for name in rows[0] if name != "limit"]
    text = [f"{result['samples']} samples; features {result['features_ms_per_sample']} ms a sample, data made included"]
    for limit in dict.fromkeys(each["limit"] for each in rows):
        lines = [names, *([str(each[name]) for name in names] for each in rows if each["limit"] == limit)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
        text += ["", limit]
        text += ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
