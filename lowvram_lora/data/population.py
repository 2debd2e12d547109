"""What planning an epoch knows of the samples: numbers only, no picture, no file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .features import Features

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Configuration:
    """One way to train on a sample.

    Attributes:
        scale: of the picture's sides: 1.0, 0.75 or 0.5.
        latent_shape: without a batch axis.
        tokens: what it costs on the device: latent tokens and text tokens together.
    """

    scale: float
    latent_shape: Shape
    tokens: int


@dataclass(frozen=True, eq=False)
class Candidate:
    """One sample as planning sees it.

    Attributes:
        score: complexity, clipped to 0 (simple) to 1 (hard). Where there are no scores, 1 for every sample.
        repeats: times the sample is seen in an epoch, 1 or more.
        configurations: those that can be had from the cache, in any order; at least one.
        visual: see ``features.visual_features``; as long for every sample. May be of length 0.
        textual: see ``features.text_features``; as long for every sample. May be of length 0.
    """

    score: float
    repeats: int
    configurations: tuple[Configuration, ...]
    visual: Features
    textual: Features


@dataclass(frozen=True, eq=False)
class Population:
    """The candidates as arrays; row i is candidate i.

    Column 0 of what has columns is the largest scale, then the next smaller one. A sample with fewer scales than others
    has its smallest once more in the columns that are left.

    Attributes:
        scores: (n,).
        repeats: (n,).
        scales, tokens, shape_ids: (n, number of scales). A shape's number is that of its place in ``shapes``.
        shapes: each latent shape once, in the order in which the candidates show them, all largest scales first.
        visual: (n, numbers). textual: (n, numbers).
    """

    scores: NDArray[np.float64]
    repeats: NDArray[np.int64]
    scales: NDArray[np.float64]
    tokens: NDArray[np.int64]
    shape_ids: NDArray[np.int64]
    shapes: tuple[Shape, ...]
    visual: Features
    textual: Features

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def num_draws(self) -> int:
        """Draws of an epoch."""
        return int(self.repeats.sum())

    @staticmethod
    def of(candidates: Sequence[Candidate]) -> Population:
        """Return ``candidates`` as arrays.

        Raises:
            ValueError: lists every candidate that is not as ``Candidate`` says.
        """
        problems = [problem for index, each in enumerate(candidates) for problem in _problems(index, each, candidates)]
        if problems:
            raise ValueError("; ".join(problems))
        width = max((len(each.configurations) for each in candidates), default=1)
        rows = [_padded(each, width) for each in candidates]
        ids: dict[Shape, int] = {}
        for column in range(width):
            for row in rows:
                ids.setdefault(row[column].latent_shape, len(ids))
        size = (len(rows), width)
        return Population(
            scores=np.clip(np.array([each.score for each in candidates], dtype=np.float64), 0.0, 1.0),
            repeats=np.array([each.repeats for each in candidates], dtype=np.int64),
            scales=np.array([[c.scale for c in row] for row in rows], dtype=np.float64).reshape(size),
            tokens=np.array([[c.tokens for c in row] for row in rows], dtype=np.int64).reshape(size),
            shape_ids=np.array([[ids[c.latent_shape] for c in row] for row in rows], dtype=np.int64).reshape(size),
            shapes=tuple(ids),
            visual=_stacked([each.visual for each in candidates]),
            textual=_stacked([each.textual for each in candidates]),
        )


def _padded(candidate: Candidate, width: int) -> list[Configuration]:
    sizes = sorted(candidate.configurations, key=lambda configuration: -configuration.scale)
    return sizes + sizes[-1:] * (width - len(sizes))


def _stacked(rows: Sequence[Features]) -> Features:
    return np.stack(rows).astype(np.float32) if rows else np.zeros((0, 0), dtype=np.float32)


def _problems(index: int, candidate: Candidate, all_of_them: Sequence[Candidate]) -> Iterator[str]:
    if not math.isfinite(candidate.score):
        yield f"sample {index}: score is {candidate.score}; it must be a number"
    if candidate.repeats < 1:
        yield f"sample {index}: repeats is {candidate.repeats}; it must be 1 or more"
    if not candidate.configurations:
        yield f"sample {index}: has no configuration; it needs one"
    if any(configuration.tokens < 1 for configuration in candidate.configurations):
        yield f"sample {index}: has a configuration of less than 1 token"
    first = all_of_them[0]
    if candidate.visual.shape != first.visual.shape or candidate.textual.shape != first.textual.shape:
        yield f"sample {index}: its features are not as long as those of sample 0"
