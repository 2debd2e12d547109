from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowvram_lora.data.epochs import EpochConfig, EpochPlanner, PlannedStrategy
from lowvram_lora.data.outlook import Outlook, gain_line
from lowvram_lora.data.place import PrecisionByScore, wrongly_seen
from lowvram_lora.data.population import Population
from lowvram_lora.data.sparse import SparseConfig, SparsePlanner
from lowvram_lora.data.tokens import Limit, budget_of, by_count, by_tokens
from lowvram_lora.errors import ConfigError
from tests.core.planning_cases import SQUARE, TALL, WIDE, candidates, limits, plain, populations, unit

STRATEGIES = st.sampled_from(get_args(PlannedStrategy))


def planner(population: Population, limit: Limit, strategy: PlannedStrategy, seed: int = 0) -> EpochPlanner:
    return EpochPlanner(population, limit, EpochConfig(strategy=strategy, seed=seed))


@settings(deadline=None)
@given(st.data(), populations(), STRATEGIES, st.integers(0, 3))
def test_every_strategy_shows_each_sample_exactly_repeats_times_within_the_limit(
    data: st.DataObject, population: Population, strategy: PlannedStrategy, number: int
) -> None:
    limit = data.draw(limits(population))
    epoch = planner(population, limit, strategy).epoch(number)
    assert wrongly_seen(epoch, population.repeats) == []
    weights = limit.weights(population)
    for batch in epoch:
        columns = [population.scales[place.entry].tolist().index(place.scale) for place in batch]
        load = sum(int(weights[place.entry, column]) for place, column in zip(batch, columns, strict=True))
        assert 1 <= len(batch) <= limit.max_count
        assert load <= limit.capacity or len(batch) == 1


@settings(max_examples=40, deadline=None)
@given(st.data(), populations(), STRATEGIES, st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_any_batch_can_be_had_at_any_time(
    data: st.DataObject, population: Population, strategy: PlannedStrategy, wanted: list[int]
) -> None:
    limit = data.draw(limits(population))
    straight = [batch for n in range(21) for batch in planner(population, limit, strategy).epoch(n)]
    resumed = planner(population, limit, strategy)
    assert [resumed.batch(k) for k in wanted] == [straight[k] for k in wanted]


@settings(deadline=None)
@given(populations(), st.integers(1, 4), STRATEGIES)
def test_by_count_all_epochs_are_equally_long(
    population: Population, batch_size: int, strategy: PlannedStrategy
) -> None:
    made = planner(population, by_count(batch_size), strategy)
    assert len({len(made.epoch(number)) for number in range(4)}) == 1


@settings(deadline=None)
@given(st.data(), populations())
def test_bucketed_batches_are_of_one_shape(data: st.DataObject, population: Population) -> None:
    epoch = planner(population, data.draw(limits(population)), "bucketed").epoch(0)
    assert set(Outlook(population, epoch).num_shapes) == {1}


def test_only_sparse_changes_the_scale_and_each_strategy_follows_the_precision() -> None:
    kinds = [(index / 10, 1, (SQUARE, TALL)) for index in range(10)]
    config = {"precision": PrecisionByScore(((0.5, "half"),))}
    for strategy in get_args(PlannedStrategy):
        made = EpochPlanner(Population.of(candidates(kinds)), by_count(2), EpochConfig(strategy=strategy, **config))
        places = [place for batch in made.epoch(0) for place in batch]
        assert all((place.precision == "half") == (place.entry < 5) for place in places)
        assert strategy == "sparse" or all(place.scale == 1.0 for place in places)


def test_an_unknown_strategy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'sparse', 'bucketed', 'sequential', 'random', 'curriculum'"):
        EpochConfig(strategy="sparce")


def test_the_report_proves_that_every_sample_is_seen() -> None:
    population = Population.of(candidates([(0.5, 3, (SQUARE,))] * 5 + [(0.5, 3, (WIDE,))] * 4))
    epoch = planner(population, by_count(4), "sparse").epoch(0)
    text = "\n".join(Outlook(population, epoch).lines())
    assert "9 samples, 27 draws an epoch, 7 batches\nSamples a batch: 3 to 4, mean 3.86" in text
    assert "Counted: each of 9 samples is seen 3 times, exactly" in text
    assert "Latent shapes a batch" in text


def test_the_report_says_so_where_a_sample_is_missing() -> None:
    population = Population.of(candidates(plain(9)))
    epoch = planner(population, by_count(4), "random").epoch(0)
    lost = epoch[0][0].entry
    text = "\n".join(Outlook(population, (epoch[0][1:], *epoch[1:])).lines())
    assert f"NOT seen as often as their repeats say: 1 sample, first of all {lost}." in text
    assert "Counted" not in text


def test_tokens_of_a_report_are_those_of_its_samples() -> None:
    kinds = [(1.0, 1, (SQUARE,)), (1.0, 1, (TALL,)), (1.0, 1, (SQUARE,))]
    population = Population.of(candidates(kinds, text_tokens=5))
    outlook = Outlook(population, planner(population, by_count(2), "sequential").epoch(0))
    assert outlook.tokens == [64 + 72 + 10, 64 + 5]
    assert outlook.num_shapes == [2, 1]
    assert "Tokens a batch: 69 to 146, mean 107.50" in "\n".join(outlook.lines())


def test_the_gain_of_a_plan_is_compared_with_chance() -> None:
    """Six groups of eight look-alikes: random batches hold some of one group, sparse ones need not."""
    features = np.repeat(unit(np.random.default_rng(0).normal(size=(6, 8))), 8, axis=0)
    population = Population.of(candidates(plain(48), features, features))
    made = SparsePlanner(population, by_count(4), 0, SparseConfig(), PrecisionByScore())
    gain = Outlook(population, made.epoch(0)).gain(made.space)
    assert gain.planned > gain.by_chance > 0
    assert gain.rounds == 100
    assert f"{gain.planned:.3f}, in random batches of the same draws {gain.by_chance:.3f}" in gain_line(gain)
    by_chance = Outlook(population, planner(population, by_count(4), "random").epoch(0)).gain(made.space)
    assert by_chance.by_chance == gain.by_chance


def test_where_samples_do_not_differ_no_gain_is_claimed() -> None:
    same = np.ones((8, 4), dtype=np.float32) / 2
    population = Population.of(candidates(plain(8), same, same))
    made = SparsePlanner(population, by_count(4), 0, SparseConfig(), PrecisionByScore())
    assert "not measured" in gain_line(Outlook(population, made.epoch(0)).gain(made.space))


def test_batches_by_tokens_cost_no_more_than_the_dearest_batch_by_count() -> None:
    kinds = [(0.2 + 0.02 * index, 1, (SQUARE, (4, 6, 6), (4, 4, 4))) for index in range(40)]
    population = Population.of(candidates(kinds, text_tokens=4))
    budget = budget_of(population, 3)
    for strategy in get_args(PlannedStrategy):
        epoch = planner(population, by_tokens(budget, 3), strategy).epoch(0)
        assert max(Outlook(population, epoch).tokens) <= 3 * int(population.tokens.max())
