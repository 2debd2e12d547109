"""Samples for the tests of planning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from lowvram_lora.data.features import Features
from lowvram_lora.data.population import Candidate, Configuration, Population, Shape
from lowvram_lora.data.tokens import Limit, budget_of, by_count, by_memory, by_tokens, latent_tokens

SQUARE, TALL, WIDE = (4, 8, 8), (4, 12, 6), (4, 6, 12)
SCALES = (1.0, 0.75, 0.5)
# Score, repeats and latent shapes by scale.
Kind = tuple[float, int, tuple[Shape, ...]]


def unit(values: Features) -> Features:
    """Return the rows at length 1."""
    return np.asarray(values / np.linalg.norm(values, axis=1, keepdims=True), dtype=np.float32)


def candidates(
    kinds: Sequence[Kind], visual: Features | None = None, textual: Features | None = None, text_tokens: int = 0
) -> list[Candidate]:
    """Return a candidate for each of ``kinds``; features are random unless given."""
    draw = np.random.default_rng(0)
    visual = unit(draw.normal(size=(len(kinds), 8))) if visual is None else visual
    textual = unit(draw.normal(size=(len(kinds), 8))) if textual is None else textual
    return [
        Candidate(score, repeats, configurations(shapes, text_tokens), visual[i], textual[i])
        for i, (score, repeats, shapes) in enumerate(kinds)
    ]


def configurations(shapes: Sequence[Shape], text_tokens: int) -> tuple[Configuration, ...]:
    """Return one configuration a scale."""
    return tuple(
        Configuration(scale, shape, latent_tokens(shape) + text_tokens)
        for scale, shape in zip(SCALES, shapes, strict=False)
    )


def smaller(shape: Shape, scale: float) -> Shape:
    """Return the latent shape of a picture of ``scale`` times the sides."""
    return shape[0], max(int(shape[1] * scale), 1), max(int(shape[2] * scale), 1)


def plain(number: int, score: float = 0.5, shape: Shape = SQUARE) -> list[Kind]:
    """Return samples that differ in nothing but their features."""
    return [(score, 1, (shape,))] * number


@st.composite
def populations(draw: st.DrawFn) -> Population:
    """Draw samples of several shapes, scores and repeats, some with fewer scales than others, some look-alikes."""
    number = draw(st.integers(1, 24))
    kinds: list[Kind] = []
    for _ in range(number):
        shape, scales = draw(st.sampled_from([SQUARE, TALL, WIDE])), draw(st.integers(1, 3))
        shapes = tuple(smaller(shape, scale) for scale in SCALES[:scales])
        kinds.append((draw(st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.5])), draw(st.integers(1, 4)), shapes))
    source = np.random.default_rng(draw(st.integers(0, 99)))
    few = unit(source.normal(size=(4, 6)))
    visual, textual = few[source.integers(0, 4, number)], few[source.integers(0, 4, number)]
    return Population.of(candidates(kinds, visual, textual, draw(st.sampled_from([0, 7]))))


@st.composite
def limits(draw: st.DrawFn, population: Population) -> Limit:
    """Draw a limit of any sort, also budgets that single samples exceed."""
    base = draw(st.integers(1, 5))
    dearest = budget_of(population, 1)
    sort = draw(st.sampled_from(["count", "tokens", "tight", "memory"]))
    if sort == "count":
        return by_count(base)
    if sort == "tokens":
        return by_tokens(budget_of(population, base), base)
    if sort == "tight":
        return by_tokens(draw(st.integers(1, dearest)), base)
    return by_memory(lambda shape: 200 // (shape[1] * shape[2]), base)
