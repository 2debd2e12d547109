import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowvram_lora.data.population import Population
from lowvram_lora.data.tokens import (
    PRESETS,
    budget_of,
    by_count,
    by_memory,
    by_tokens,
    cut,
    latent_tokens,
    preset_size,
)
from lowvram_lora.errors import ConfigError
from tests.core.planning_cases import SQUARE, TALL, candidates, plain, populations, smaller

WEIGHTS = st.lists(st.integers(0, 50), max_size=40)


@settings(deadline=None)
@given(WEIGHTS, st.integers(1, 60), st.integers(1, 6))
def test_cutting_loses_nothing_moves_nothing_and_keeps_the_budget(
    weights: list[int], budget: int, base_size: int
) -> None:
    order, limit = list(range(len(weights))), by_tokens(budget, base_size)
    batches = cut(order, weights, limit)
    assert [index for batch in batches for index in batch] == order
    for batch in batches:
        assert 1 <= len(batch) <= 4 * base_size
        assert sum(weights[i] for i in batch) <= budget or len(batch) == 1


@settings(deadline=None)
@given(WEIGHTS, st.integers(1, 60), st.integers(1, 6))
def test_a_batch_ends_only_where_the_next_sample_does_not_fit(weights: list[int], budget: int, base_size: int) -> None:
    batches = cut(range(len(weights)), weights, by_tokens(budget, base_size))
    for batch, after in pairwise(batches):
        load = sum(weights[i] for i in batch) + weights[after[0]]
        assert load > budget or len(batch) == 4 * base_size


def test_a_sample_over_the_budget_is_alone_in_its_batch() -> None:
    assert cut("abcd", [3, 11, 4, 5], by_tokens(10, 4)) == [("a",), ("b",), ("c", "d")]


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 7))
def test_by_count_the_last_batch_alone_is_short(number: int, batch_size: int) -> None:
    sizes = [len(batch) for batch in cut(range(number), [1] * number, by_count(batch_size))]
    assert all(size == batch_size for size in sizes[:-1])
    assert sum(sizes) == number


@settings(deadline=None)
@given(populations(), st.integers(1, 4))
def test_the_budget_of_a_base_size_holds_so_many_of_any_samples(population: Population, base_size: int) -> None:
    limit = by_tokens(budget_of(population, base_size), base_size)
    weights = limit.weights(population)[:, 0].tolist()
    batches = cut(range(len(weights)), weights, limit)
    assert all(base_size <= len(batch) <= 4 * base_size for batch in batches[:-1])


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(0, 500))
def test_a_batch_of_one_shape_is_as_large_as_the_memory_model_says(base_size: int, fits: int) -> None:
    """Between 1 and 4 times the base size."""
    limit = by_memory(lambda shape: fits, base_size)
    weight = limit.weigh(SQUARE, 1)
    first, *_ = cut(range(600), [weight] * 600, limit)
    assert len(first) == min(max(fits, base_size), 4 * base_size)


@settings(deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=30))
def test_shapes_share_a_batch_by_what_the_memory_model_says_of_each(fitting: list[int]) -> None:
    limit = by_memory(lambda shape: shape[1], base_size=2)
    shares = [Fraction(1, min(max(fits, 2), 8)) for fits in fitting]
    batches = cut(range(len(fitting)), [limit.weigh((4, fits, 1), 1) for fits in fitting], limit)
    for batch, after in pairwise(batches):
        assert sum(shares[i] for i in batch) <= 1
        assert sum(shares[i] for i in (*batch, after[0])) > 1 or len(batch) == 8


def test_the_memory_model_is_asked_once_for_each_shape() -> None:
    asked = []

    def size_for(shape: tuple[int, ...]) -> int:
        asked.append(shape)
        return 4

    kinds = plain(5) + plain(5, shape=TALL)
    by_memory(size_for, 2).weights(Population.of(candidates(kinds, text_tokens=3)))
    assert sorted(asked) == sorted([SQUARE, TALL])


def test_smaller_scales_give_larger_batches() -> None:
    kinds = [(0.5, 1, (SQUARE, smaller(SQUARE, 0.75), smaller(SQUARE, 0.5)))] * 12
    population = Population.of(candidates(kinds, text_tokens=8))
    limit = by_tokens(budget_of(population, 2), 2)
    sizes = [len(cut(range(12), column.tolist(), limit)[0]) for column in limit.weights(population).T]
    assert sizes == [144 // 72, 144 // 44, 144 // 24]


def test_presets_start_at_8_4_2_and_1() -> None:
    assert [preset_size(resolution) for resolution in sorted(PRESETS)] == [8, 4, 2, 1]
    assert [preset_size(resolution) for resolution in (64, 513, 800, 1025, 4096)] == [8, 4, 2, 1, 1]


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), max_size=1), st.integers(1, 99), st.integers(1, 99), st.integers(1, 4))
def test_latent_tokens_are_patches_of_all_frames(frames: list[int], height: int, width: int, patch: int) -> None:
    expected = math.prod(frames) * math.ceil(height / patch) * math.ceil(width / patch)
    assert latent_tokens((16, *frames, height, width), patch) == expected


def test_limits_below_one_are_refused_by_name() -> None:
    for make in (lambda: by_count(0), lambda: by_tokens(5, 0), lambda: by_memory(lambda shape: 1, 0)):
        with pytest.raises(ConfigError, match="batch_size is 0"):
            make()
    with pytest.raises(ConfigError, match="token budget is 0"):
        by_tokens(0, 1)
