"""How long planning an epoch takes, and what sparse batches gain over random ones: no GPU, no pictures.

The samples are made up: groups of pictures that look alike with captions that name the group. Features are computed
from latents and captions as the pack does. CPU seconds count all threads, so they are those of one core, or above.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Made:
    """What is planned.

    Attributes:
        groups: of samples that are alike.
        channels: of the latents.
        scales: that the cache holds.
    """

    samples: int
    batch: int = 4
    groups: int = 200
    channels: int = 16
    scales: tuple[float, ...] = (1.0, 0.75, 0.5)
    seed: int = 0


def planning(wanted: Made) -> dict[str, Any]:
    """Return a row for each strategy and each way of cutting batches; ``slowest_epoch_s`` is the worst of all."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made, features_s = timed(lambda: population(wanted))
        ways = [(limit, strategy) for limit in limits(made, wanted) for strategy in get_args(PlannedStrategy)]
        rows = [row(made, *way, wanted) for way in ways]
    finally:
        torch.set_num_threads(threads)
    return {
        "samples": wanted.samples,
        "batch": wanted.batch,
        "features_ms_per_sample": round(1000 * features_s["cpu_s"] / wanted.samples, 3),
        "slowest_epoch_s": max(each["prepare_wall_s"] + each["first_epoch_wall_s"] for each in rows),
        "slowest_epoch_cpu_s": max(each["prepare_cpu_s"] + each["first_epoch_cpu_s"] for each in rows),
        "rows": rows,
    }


def limits(made: Population, wanted: Made) -> list[Limit]:
    """Return both ways of cutting."""
    return [by_count(wanted.batch), by_tokens(budget_of(made, wanted.batch), wanted.batch)]


def row(made: Population, limit: Limit, strategy: PlannedStrategy, wanted: Made) -> dict[str, Any]:
    """Return the times of one strategy, and what its epoch is like."""
    sparse = SparseConfig()
    config = EpochConfig(
        strategy=strategy, seed=wanted.seed, precision=PrecisionByScore(((0.4, "half"),)), sparse=sparse
    )
    planner, prepared = timed(lambda: EpochPlanner(made, limit, config))
    first, one = timed(lambda: planner.epoch(0))
    _, two = timed(lambda: planner.epoch(1))
    outlook = Outlook(made, first)
    space = SparsePlanner(made, limit, wanted.seed, sparse, config.precision).space
    gain, _ = timed(lambda: outlook.gain(space, wanted.seed))
    return {
        "strategy": strategy,
        "limit": limit.label,
        "prepare_wall_s": prepared["wall_s"],
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


def population(wanted: Made) -> Population:
    """Return made-up samples."""
    draw = np.random.default_rng(wanted.seed)
    centres = draw.normal(size=(wanted.groups, wanted.channels, 16, 16)).astype(np.float32)
    return Population.of([candidate(draw, centres, wanted.scales) for _ in range(wanted.samples)])


def candidate(draw: np.random.Generator, centres: Any, scales: Sequence[float]) -> Candidate:
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
