"""How much there is to learn in each sample: measures of its picture and the length of its caption, weighed.

Each measure is 0 to 1, and so is the score: the weighted mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..config import ComplexityConfig
from ..units import counted
from .dataset import Complexity, Dataset, Sample
from .detail import COLOURS, EDGES, ENTROPY, FREQUENCY, grey_entropy
from .histogram import bars
from .measuring import OnProgress, measure, no_progress
from .words import words

__all__ = ["SKIPPED", "count_words", "extremes", "grey_entropy", "report", "score"]

# What every sample scores that was not looked at: halfway, so that none counts as simple or hard.
SKIPPED = Complexity(entropy=0.0, caption_length=0.0, score=0.5)

_CAPTION = "caption"
_NUM_NAMED = 6

Column = npt.NDArray[np.float64]


def score(
    dataset: Dataset,
    config: ComplexityConfig,
    store_root: Path | None = None,
    on_progress: OnProgress = no_progress,
    num_threads: int | None = None,
) -> Dataset:
    """Return ``dataset`` with every sample's ``complexity`` set. With ``config.skip``, no picture is read.

    Args:
        store_root: where measures are kept by content; None keeps nothing.
        on_progress: called after each sample with samples done, their number and a line of text. What it raises ends
            the scoring; what was measured so far is kept.
        num_threads: that decode pictures; None takes one for each CPU, up to 4.

    Raises:
        PathError: images can no longer be read, or have changed; names all of them.
    """
    if config.skip:
        return replace(dataset, samples=tuple(replace(sample, complexity=SKIPPED) for sample in dataset.samples))
    weights = _weights(config)
    # Entropy is part of the result whether or not it weighs anything.
    pictures = [name for name, weight in weights.items() if name != _CAPTION and (weight > 0 or name == ENTROPY)]
    rows = measure(dataset, pictures, store_root, on_progress, num_threads)
    columns = {name: np.array([float(row[name]) for row in rows]) for name in pictures}
    columns[_CAPTION] = _caption_lengths(dataset.samples)
    scores = _weigh(columns, weights, config.percentile)
    scored = (
        replace(sample, complexity=Complexity(float(entropy), float(length), float(value)))
        for sample, entropy, length, value in zip(
            dataset.samples, columns[ENTROPY], columns[_CAPTION], scores, strict=True
        )
    )
    return replace(dataset, samples=tuple(scored))


def count_words(caption: str) -> int:
    """Return the number of words; a Chinese or Japanese character counts as one."""
    return len(words(caption))


def extremes(dataset: Dataset, limit: int = _NUM_NAMED) -> tuple[list[Sample], list[Sample]]:
    """Return the simplest samples, simplest first, and the hardest, hardest first: at most ``limit`` of each.

    No sample is in both. Where all score the same, none is simpler or harder: both are empty.
    """
    ranked = sorted((s for s in dataset.samples if s.complexity is not None), key=_score_of)
    if not ranked or _score_of(ranked[0]) == _score_of(ranked[-1]):
        return [], []
    limit = min(limit, len(ranked) // 2)
    return ranked[:limit], ranked[::-1][:limit]


def report(dataset: Dataset) -> str:
    """Return how the scores of a scored dataset are spread, in words."""
    scores = [sample.complexity.score for sample in dataset.samples if sample.complexity is not None]
    if not scores:
        return "No sample has a score."
    simplest, hardest = extremes(dataset)
    return "\n".join(
        (
            f"Complexity of {counted(len(scores), 'sample')}: min {min(scores):.3f}, "
            f"median {statistics.median(scores):.3f}, mean {statistics.fmean(scores):.3f}, max {max(scores):.3f}",
            *bars(scores),
            *([f"Simplest: {_listed(simplest)}"] if simplest else []),
            *([f"Hardest: {_listed(hardest)}"] if hardest else []),
        )
    )


def _weights(config: ComplexityConfig) -> dict[str, float]:
    return {
        ENTROPY: config.image_weight,
        _CAPTION: config.text_weight,
        FREQUENCY: config.frequency_weight,
        EDGES: config.edge_weight,
        COLOURS: config.colour_weight,
    }


def _caption_lengths(samples: Sequence[Sample]) -> Column:
    """Return the words of each sample's caption over those of the longest; of several captions, their mean counts."""
    counts = np.array([statistics.fmean(map(count_words, sample.captions)) for sample in samples])
    return counts / (counts.max(initial=0.0) or 1.0)


def _weigh(columns: Mapping[str, Column], weights: Mapping[str, float], percentile: bool) -> Column:
    used = {name: column for name, column in columns.items() if weights[name] > 0}
    if percentile:
        used = {name: _percentiles(column) for name, column in used.items()}
    total = sum(weights.values())
    mean = sum((weights[name] / total * column for name, column in used.items()), np.zeros(()))
    return np.clip(mean, 0.0, 1.0)


def _percentiles(column: Column) -> Column:
    """Return for each value the share of values below it, and half the share of those equal to it."""
    ordered = np.sort(column)
    below = np.searchsorted(ordered, column, side="left")
    up_to = np.searchsorted(ordered, column, side="right")
    return (below + up_to) / (2 * max(1, len(column)))


def _score_of(sample: Sample) -> float:
    return 0.0 if sample.complexity is None else sample.complexity.score


def _listed(samples: Sequence[Sample]) -> str:
    return ", ".join(f"{sample.name} ({_score_of(sample):.3f})" for sample in samples)
