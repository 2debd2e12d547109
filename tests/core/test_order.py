import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from lowvram_lora.data import order
from lowvram_lora.data.epochs import EpochConfig, EpochPlanner
from lowvram_lora.data.population import Population
from lowvram_lora.data.tokens import by_count
from tests.core.planning_cases import SQUARE, TALL, candidates

REPEATS = st.lists(st.integers(1, 7), min_size=1, max_size=20)


@settings(deadline=None)
@given(REPEATS, st.integers(0, 9))
def test_every_order_shows_each_sample_exactly_repeats_times(repeats: list[int], seed: int) -> None:
    source = random.Random(seed)
    scores = [source.random() for _ in repeats]
    kinds = [index % 3 for index in range(len(repeats))]
    wanted = Counter(dict(enumerate(repeats)))
    assert Counter(order.sequential(repeats)) == wanted
    assert Counter(order.shuffled(repeats, source)) == wanted
    assert Counter(order.curriculum(scores, repeats, source)) == wanted
    assert Counter(i for members in order.bucketed(kinds, repeats, source) for i in members) == wanted


@settings(deadline=None)
@given(REPEATS, st.integers(0, 9))
def test_repeats_are_spread_evenly_over_the_epoch(repeats: list[int], seed: int) -> None:
    most = max(repeats)
    turns: list[list[int]] = order.spread_turns(repeats, random.Random(seed))
    assert all(len(set(turn)) == len(turn) for turn in turns)
    assert len(turns) == most
    for index, times in enumerate(repeats):
        so_far = 0
        for number, turn in enumerate(turns, start=1):
            so_far += index in turn
            assert abs(so_far - number * times / most) < 1


def test_curriculum_goes_from_simple_to_hard_in_each_turn() -> None:
    scores = [0.5, 0.1, 0.9, 0.3]
    shown = order.curriculum(scores, [2, 2, 2, 2], random.Random(0))
    assert shown == [1, 3, 0, 2, 1, 3, 0, 2]


def test_equal_scores_are_shown_in_another_order_each_time() -> None:
    source = random.Random(0)
    assert order.curriculum([0.5] * 30, [1] * 30, source) != order.curriculum([0.5] * 30, [1] * 30, source)


def test_sequential_keeps_the_samples_order() -> None:
    assert order.sequential([1, 3, 2]) == [0, 1, 2, 1, 2, 1]


def test_bucketed_by_count_gives_the_batches_of_shuffle() -> None:
    """Saved workflows rely on them; the same samples and batches stand in ``test_batches``."""
    population = Population.of(candidates([(0.5, 1, (SQUARE,))] * 3 + [(0.5, 2, (TALL,))] * 2))
    planner = EpochPlanner(population, by_count(2), EpochConfig(strategy="bucketed", seed=7))
    batches = [tuple(place.entry for place in batch) for batch in planner.epoch(0)]
    assert batches == [(2, 1), (3, 4), (0,), (4, 3)]
