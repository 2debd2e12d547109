import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowvram_lora.data.distances import Held, Space
from lowvram_lora.data.features import Features
from lowvram_lora.data.place import PlannedEpoch, PrecisionByScore, times_seen, wrongly_seen
from lowvram_lora.data.population import Candidate, Configuration, Population
from lowvram_lora.data.sparse import SparseConfig, SparsePlanner
from lowvram_lora.data.tokens import by_count, by_tokens
from lowvram_lora.errors import ConfigError
from tests.core.planning_cases import SQUARE, TALL, Kind, candidates, limits, plain, populations, smaller, unit

ROOT = Path(__file__).resolve().parents[2]
FULL = PrecisionByScore()


def planner(made: list[Candidate], batch_size: int = 4, seed: int = 0, **options: object) -> SparsePlanner:
    return SparsePlanner(Population.of(made), by_count(batch_size), seed, SparseConfig(**options), FULL)


def random_features(number: int, width: int = 8, seed: int = 0) -> Features:
    return unit(np.random.default_rng(seed).normal(size=(number, width)))


def indices(epoch: PlannedEpoch) -> list[list[int]]:
    return [[place.entry for place in batch] for batch in epoch]


@settings(deadline=None)
@given(st.data(), populations(), st.integers(0, 5), st.integers(0, 3), st.sampled_from([1, 3, 256]))
def test_every_sample_is_seen_exactly_repeats_times_and_no_batch_is_over_its_limit(
    data: st.DataObject, population: Population, seed: int, number: int, pool_size: int
) -> None:
    limit = data.draw(limits(population))
    made = SparsePlanner(population, limit, seed, SparseConfig(pool_size=pool_size, num_anchors=3), FULL)
    epoch = made.epoch(number)
    assert times_seen(epoch, len(population)).tolist() == population.repeats.tolist()
    assert wrongly_seen(epoch, population.repeats) == []
    weights = limit.weights(population)
    for batch in epoch:
        columns = [population.scales[place.entry].tolist().index(place.scale) for place in batch]
        load = sum(int(weights[place.entry, column]) for place, column in zip(batch, columns, strict=True))
        assert 1 <= len(batch) <= limit.max_count
        assert load <= limit.capacity or len(batch) == 1


@settings(deadline=None)
@given(populations(), st.integers(1, 6))
def test_by_count_the_last_batch_alone_is_short(population: Population, batch_size: int) -> None:
    made = SparsePlanner(population, by_count(batch_size), 1, SparseConfig(pool_size=3), FULL)
    sizes = [len(batch) for batch in made.epoch(0)]
    assert all(size == batch_size for size in sizes[:-1])


@settings(deadline=None)
@given(populations(), st.integers(0, 3))
def test_no_sample_comes_again_before_all_that_are_due_have_come(population: Population, number: int) -> None:
    """With equal repeats: at any place of the epoch, counts differ by one at most."""
    population = Population(**{**vars(population), "repeats": np.full(len(population), 3)})
    made = SparsePlanner(population, by_count(4), 0, SparseConfig(), FULL)
    drawn = [index for batch in indices(made.epoch(number)) for index in batch]
    for end in range(len(drawn) + 1):
        counts = np.bincount(drawn[:end], minlength=len(population))
        assert counts.max() - counts.min() <= 1


def test_a_batch_begins_with_one_of_the_hardest_not_yet_seen() -> None:
    scores = np.random.default_rng(3).permutation(60) / 60
    made = planner(candidates([(float(score), 1, (SQUARE,)) for score in scores]), num_anchors=5)
    unseen = set(range(60))
    for batch in indices(made.epoch(2)):
        assert batch[0] in sorted(unseen, key=lambda index: -scores[index])[:5]
        unseen -= set(batch)


def test_the_anchor_rotates_between_epochs() -> None:
    """In so many epochs as there are anchors, each of the hardest samples begins the epoch once."""
    made = planner(candidates([(index / 40, 1, (SQUARE,)) for index in range(40)]), num_anchors=8)
    first = [made.epoch(number)[0][0].entry for number in range(8)]
    assert sorted(first) == list(range(32, 40))


def test_each_member_is_the_one_least_like_the_batch() -> None:
    """Against distances worked out from the features in float64."""
    visual, textual = random_features(48), random_features(48, seed=1)
    made = planner(candidates(plain(48), visual, textual), visual_weight=0.7, text_weight=0.3, cost_discount=0.0)
    distances = []
    for features, weight in ((visual, 0.7), (textual, 0.3)):
        apart = np.linalg.norm(features[:, None].astype(np.float64) - features[None], axis=2)
        distances.append(weight * apart / apart[np.triu_indices(48, 1)].mean())
    apart = sum(distances)
    unseen = set(range(48))
    for batch in indices(made.epoch(0)):
        for place, index in enumerate(batch):
            if place:
                gains = {other: apart[other, batch[:place]].min() for other in unseen}
                assert gains[index] >= max(gains.values()) - 0.01
            unseen.remove(index)


def test_look_alikes_do_not_share_a_batch() -> None:
    """Twelve groups of four that are the same in picture and caption."""
    features = np.repeat(random_features(12), 4, axis=0)
    made = planner(candidates(plain(48), features, features))
    assert all(len({index // 4 for index in batch}) == 4 for batch in indices(made.epoch(0))[:6])
    batches = indices(made.epoch(0))
    shuffled = np.random.default_rng(0).permutation(48).reshape(-1, 4).tolist()
    assert made.space.mean_gain(batches) > made.space.mean_gain(shuffled)


@pytest.mark.parametrize(("weights", "differ"), [((1.0, 0.0), "visual"), ((0.0, 1.0), "textual")])
def test_weights_say_which_likeness_counts(weights: tuple[float, float], differ: str) -> None:
    by_group, by_number = np.repeat(random_features(8), 4, axis=0), np.tile(random_features(4, seed=1), (8, 1))
    made = planner(
        candidates(plain(32), by_group, by_number), visual_weight=weights[0], text_weight=weights[1], cost_discount=0.0
    )
    first = indices(made.epoch(0))[0]
    assert len({index // 4 if differ == "visual" else index % 4 for index in first}) == 4


def test_samples_that_differ_in_nothing_share_a_batch_of_one_shape() -> None:
    same = np.ones((24, 4), dtype=np.float32) / 2
    kinds = [(0.5, 1, (SQUARE if index % 2 else TALL,)) for index in range(24)]
    made = planner(candidates(kinds, same, same))
    shapes = [{index % 2 for index in batch} for batch in indices(made.epoch(0))]
    assert all(len(found) == 1 for found in shapes)


def test_a_new_shape_is_taken_where_it_gains_more_than_it_costs() -> None:
    kinds = [(0.5, 1, (SQUARE if index % 2 else TALL,)) for index in range(64)]

    def mean_shapes(new_shape_cost: float) -> float:
        made = planner(candidates(kinds), new_shape_cost=new_shape_cost)
        return float(np.mean([len({index % 2 for index in batch}) for batch in indices(made.epoch(0))]))

    assert mean_shapes(100.0) < mean_shapes(1.0) < mean_shapes(0.0)


def with_scales(score: float) -> Kind:
    return score, 1, tuple(smaller(SQUARE, scale) for scale in (1.0, 0.75, 0.5))


def scales_of(made: SparsePlanner) -> dict[int, float]:
    return {place.entry: place.scale for batch in made.epoch(0) for place in batch}


def test_without_a_discount_every_sample_is_seen_at_its_largest_scale() -> None:
    kinds = [with_scales(index / 24) for index in range(24)] + plain(4, shape=TALL)
    assert set(scales_of(planner(candidates(kinds), cost_discount=0.0)).values()) == {1.0}


def test_simple_samples_are_seen_small_and_hard_ones_large() -> None:
    made = planner(candidates([with_scales(index / 23) for index in range(24)]), 1, cost_discount=0.5)
    scales = scales_of(made)
    in_order = [scales[index] for index in range(24)]
    assert in_order == sorted(in_order)
    assert in_order[0] == 0.5
    assert in_order[-1] == 1.0


def test_only_scales_that_the_cache_holds_are_used() -> None:
    kinds = [(0.0, 1, with_scales(0.0)[2][: 1 + index % 3]) for index in range(30)]
    scales = scales_of(planner(candidates(kinds), 1, cost_discount=5.0))
    assert [scales[index] for index in range(6)] == [1.0, 0.75, 0.5, 1.0, 0.75, 0.5]


def test_a_sample_too_dear_for_any_batch_is_alone_at_its_cheapest() -> None:
    dear = Candidate(
        1.0,
        1,
        (Configuration(1.0, (4, 99, 99), 9801), Configuration(0.5, (4, 49, 49), 2401)),
        random_features(1)[0],
        random_features(1)[0],
    )
    made = SparsePlanner(Population.of([dear, *candidates(plain(8))]), by_tokens(200, 4), 0, SparseConfig(), FULL)
    (alone,) = [batch for batch in made.epoch(0) if any(place.entry == 0 for place in batch)]
    assert [(place.entry, place.scale) for place in alone] == [(0, 0.5)]


def test_precision_follows_the_score() -> None:
    precision = PrecisionByScore(((0.2, "half"), (0.6, "bands")))
    scores = [0.0, 0.2, 0.59, 0.6, 1.0]
    population = Population.of(candidates([(score, 1, (SQUARE,)) for score in scores]))
    made = SparsePlanner(population, by_count(2), 0, SparseConfig(), precision)
    found = {place.entry: place.precision for batch in made.epoch(0) for place in batch}
    assert [found[index] for index in range(5)] == ["half", "bands", "bands", "full", "full"]


def test_epochs_and_seeds_differ_and_repeat() -> None:
    made = candidates(plain(60))
    first = planner(made, seed=1).epoch(3)
    assert first == planner(made, seed=1).epoch(3)
    assert first != planner(made, seed=1).epoch(4)
    assert first != planner(made, seed=2).epoch(3)


def test_planning_an_epoch_does_not_change_another() -> None:
    made = planner(candidates(plain(30)))
    straight = [made.epoch(number) for number in range(3)]
    assert [made.epoch(number) for number in (2, 0, 1)] == [straight[2], straight[0], straight[1]]


def test_sums_in_another_order_give_the_same_plan() -> None:
    """Numbers of the features in another order: every sum rounds differently unless it is exact."""
    visual, textual = random_features(300, 64), random_features(300, 256, seed=1)
    turned = np.random.default_rng(0).permutation(64)
    straight = planner(candidates(plain(300), visual, textual))
    other = planner(candidates(plain(300), visual[:, turned], np.ascontiguousarray(textual[:, ::-1])))
    assert straight.epoch(1) == other.epoch(1)


PROGRAM = """
import json, sys
from tests.core.test_sparse import made_elsewhere
json.dump(made_elsewhere(), sys.stdout)
"""


def made_elsewhere() -> list[list[list[object]]]:
    """Return the plan that all machines must agree on."""
    kinds = [with_scales(index / 200) for index in range(200)]
    made = planner(candidates(kinds, random_features(200, 64), random_features(200, 256, seed=1)), seed=11)
    return [[list(place) for place in batch] for batch in made.epoch(5)]


def test_another_process_with_other_kernels_makes_the_same_plan() -> None:
    """An old processor's kernels where numpy has OpenBLAS, another hash seed, another number of threads."""
    other = {"OPENBLAS_CORETYPE": "Prescott", "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=os.environ | other, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == made_elsewhere()


def test_the_plan_of_a_seed_never_changes() -> None:
    """A finished run's fingerprint stands for this plan; other numbers would need a new fingerprint."""
    visual = np.eye(8, dtype=np.float32)[[0, 0, 1, 1, 2, 2, 3]]
    kinds = [with_scales(score) for score in (0.9, 0.0, 0.7, 0.1, 0.5, 0.2)] + [(1.0, 2, (TALL,))]
    made = planner(candidates(kinds, visual, visual), 3, seed=7)
    assert [[(place.entry, place.scale) for place in batch] for batch in made.epoch(0)] == [
        [(2, 1.0), (0, 1.0), (4, 1.0)],
        [(1, 0.5), (6, 1.0), (3, 0.5)],
        [(6, 1.0), (5, 0.5)],
    ]


def test_the_work_of_an_epoch_grows_with_the_samples_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    apart = Space.apart

    def counting(self: Space, held: Held, row: int) -> Features:
        compared.append(len(held.visual.rows))
        return apart(self, held, row)

    monkeypatch.setattr(Space, "apart", counting)
    planner(candidates(plain(400)), pool_size=32).epoch(0)
    assert sum(compared) <= 400 * 2 * 32


def test_no_samples_give_no_batches() -> None:
    assert SparsePlanner(Population.of([]), by_count(2), 0, SparseConfig(), FULL).epoch(0) == ()


def test_every_candidate_that_is_no_sample_is_named() -> None:
    good, bad = candidates([(0.5, 1, (SQUARE,)), (float("nan"), 0, ())])
    with pytest.raises(ValueError, match=r"sample 1: score is nan.*sample 1: repeats is 0.*sample 1: has no config"):
        Population.of([good, bad])


@pytest.mark.parametrize(
    "options",
    [{"cost_discount": -1.0}, {"visual_weight": 0.0, "text_weight": 0.0}, {"num_anchors": 0}, {"pool_size": 0}],
)
def test_settings_outside_their_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        SparseConfig(**options)
