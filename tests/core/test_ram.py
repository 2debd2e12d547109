"""The rules of the RAM tier."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowvram_lora.data.ram import RamPolicy
from lowvram_lora.errors import ConfigError


def use(policy: RamPolicy, keys: Iterable[str], num_bytes: int = 1, score: float | None = None) -> list[str]:
    """Read the keys, offer what is missing, and return all that was evicted."""
    evicted: list[str] = []
    for key in keys:
        if not policy.read(key):
            evicted += policy.offer(key, num_bytes, score).evicted
    return evicted


def epochs(num_keys: int, num_epochs: int, seed: int | None) -> list[str]:
    """Each key once an epoch; shuffled, or in order if there is no seed."""
    rng = random.Random(seed)
    order: list[str] = []
    for _ in range(num_epochs):
        epoch = [f"k{number}" for number in range(num_keys)]
        if seed is not None:
            rng.shuffle(epoch)
        order += epoch
    return order


def hit_rate(policy: RamPolicy) -> float:
    return policy.counters.hits / (policy.counters.hits + policy.counters.misses)


def test_everything_is_taken_while_there_is_room() -> None:
    policy = RamPolicy(10, seed=0)
    use(policy, "abcdefghij", score=0.0)
    assert len(policy) == 10
    use(policy, "abcdefghij")
    assert (policy.counters.hits, policy.counters.misses) == (10, 10)
    assert (policy.counters.admissions, policy.counters.evictions, policy.counters.ram_bytes) == (10, 0, 10)


@pytest.mark.parametrize(
    ("reads", "first_to_leave"),
    [
        # z is taken at its second read, the last of all. Ages: a 5, b 4, c 2; uses: 3, 1, 2; so 5/4, 4/2 and 2/3.
        ("aaabcczz", "b"),
        # 7/5 for the a, 3/2 for the b, 2/5 for the c.
        ("aaaacccbczz", "b"),
        # 6/5 for the a, 2/2 for the b, 3/4 for the c.
        ("aaaacccbzz", "a"),
    ],
)
def test_the_first_to_leave_has_the_highest_age_over_uses_plus_one(reads: str, first_to_leave: str) -> None:
    policy = RamPolicy(3, seed=0, admission=1.0)
    assert use(policy, reads) == [first_to_leave]
    assert "z" in policy


class Slow:
    """The rule for who leaves, word for word: the whole of what is held is looked through."""

    def __init__(self) -> None:
        self.now = 0
        self.last: dict[str, int] = {}
        self.uses: dict[str, int] = {}

    def read(self, key: str) -> None:
        self.now += 1
        self.last[key] = self.now
        self.uses[key] = self.uses.get(key, 0) + 1

    def staleness(self, key: str) -> float:
        return (self.now - self.last[key]) / (self.uses[key] + 1)


@given(
    reads=st.lists(st.integers(0, 12), max_size=300),
    sizes=st.lists(st.integers(1, 5), min_size=13, max_size=13),
    cap=st.integers(0, 20),
    admission=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 100),
)
@settings(max_examples=200, deadline=None)
def test_the_cap_holds_and_only_the_stalest_leave(
    reads: Sequence[int], sizes: Sequence[int], cap: int, admission: float, seed: int
) -> None:
    policy, slow = RamPolicy(cap, seed, admission), Slow()
    held: dict[str, int] = {}
    for number in reads:
        key, size = f"k{number}", sizes[number]
        slow.read(key)
        assert policy.read(key) == (key in held)
        if key not in held:
            got = policy.offer(key, size, score=0.5)
            assert got.kept or not got.evicted
            for victim in got.evicted:
                gone = held.pop(victim)
                assert all(slow.staleness(victim) >= slow.staleness(left) or left in got.evicted for left in held)
                # The last to leave was needed for the room.
                last_freed = gone
            if got.evicted:
                assert sum(held.values()) + size + last_freed > cap
            if got.kept:
                held[key] = size
        assert sum(held.values()) <= cap
        assert policy.counters.ram_bytes == sum(held.values())
        assert {f"k{n}" for n in range(13) if f"k{n}" in policy} == set(held)
    assert policy.counters.hits + policy.counters.misses == len(reads)
    assert policy.counters.admissions - policy.counters.evictions == len(policy)


@given(reads=st.lists(st.integers(0, 9), max_size=200), seed=st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_a_seed_repeats_every_decision(reads: Sequence[int], seed: int) -> None:
    runs = [RamPolicy(4, seed, admission=0.5) for _ in range(2)]
    evicted = [use(policy, map(str, reads), score=0.5) for policy in runs]
    assert evicted[0] == evicted[1]
    assert runs[0].counters == runs[1].counters


def test_another_seed_decides_otherwise() -> None:
    reads = epochs(40, 30, seed=1)
    assert len({tuple(use(RamPolicy(10, seed), reads)) for seed in range(5)}) > 1


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_epochs_larger_than_ram_are_still_answered_in_good_part(share: float, seed: int | None) -> None:
    """A cache that takes every newcomer answers none of them in order, and few of them shuffled."""
    policy = RamPolicy(int(200 * share), seed=0)
    use(policy, epochs(200, 1, seed))
    policy.counters.hits = policy.counters.misses = 0
    use(policy, epochs(200, 10, seed), score=0.5)
    best = share
    assert hit_rate(policy) >= 0.8 * best
    assert hit_rate(policy) <= best + 0.01


def test_what_is_needed_no_more_often_than_what_is_held_moves_nothing() -> None:
    policy = RamPolicy(50, seed=0, admission=1.0)
    assert use(policy, epochs(200, 10, seed=None)) == []
    assert policy.counters.hits == 9 * 50


def test_what_is_read_often_gets_in() -> None:
    policy = RamPolicy(20, seed=0)
    use(policy, epochs(200, 3, seed=1))
    hot = [f"hot{number}" for number in range(10)]
    rng = random.Random(2)
    use(policy, rng.choices([*hot, *(f"k{n}" for n in range(200))], weights=[*[20] * 10, *[1] * 200], k=4000))
    assert sum(key in policy for key in hot) >= 9


def test_samples_of_high_score_get_in_sooner() -> None:
    """Ten keys of high score and ten of none are read alike; RAM is full of what nobody reads any more."""
    admitted = {"high": 0, "none": 0}
    for seed in range(200):
        policy = RamPolicy(20, seed)
        use(policy, (f"old{number}" for number in range(20)))
        for _ in range(3):
            for number in range(10):
                use(policy, [f"high{number}"], score=1.0)
                use(policy, [f"none{number}"], score=0.0)
        for kind in admitted:
            admitted[kind] += sum(f"{kind}{number}" in policy for number in range(10))
    assert 1.5 < admitted["high"] / admitted["none"] < 2.5


def test_nothing_is_replaced_by_what_is_read_for_the_first_time() -> None:
    policy = RamPolicy(5, seed=0, admission=1.0)
    use(policy, "abcde")
    assert use(policy, (f"new{number}" for number in range(1000))) == []
    assert all(key in policy for key in "abcde")


def test_what_is_larger_than_the_cap_is_not_held_and_moves_nothing() -> None:
    policy = RamPolicy(5, seed=0, admission=1.0)
    use(policy, "abcde")
    assert use(policy, ["huge"] * 5, num_bytes=6) == []
    assert "huge" not in policy and len(policy) == 5


def test_no_cap_holds_nothing() -> None:
    policy = RamPolicy(0, seed=0)
    assert use(policy, "abab") == []
    assert (policy.counters.misses, len(policy), policy.counters.ram_bytes) == (4, 0, 0)


def test_a_held_entry_may_change_its_size() -> None:
    policy = RamPolicy(10, seed=0)
    use(policy, "ab", num_bytes=4)
    assert policy.offer("a", 2).kept
    assert policy.counters.ram_bytes == 6
    got = policy.offer("a", 11)
    assert (got.kept, got.evicted) == (False, ("a",))
    assert (policy.counters.ram_bytes, len(policy)) == (4, 1)
    assert policy.counters.admissions - policy.counters.evictions == len(policy)


def test_an_entry_can_be_let_go() -> None:
    policy = RamPolicy(10, seed=0)
    use(policy, "ab", num_bytes=4)
    assert policy.drop("a") and not policy.drop("a")
    assert (policy.counters.ram_bytes, policy.counters.evictions) == (4, 0)
    assert not policy.read("a") and policy.read("b")


def test_entries_that_arrive_later_and_in_another_order_keep_the_rules() -> None:
    """A batch is read as a whole, then its files arrive as they may; what is read ahead was not asked for yet."""
    policy = RamPolicy(4, seed=0, admission=1.0)
    for key in "abc":
        policy.read(key)
    for key in "cab":
        assert policy.offer(key, 1).kept
    assert policy.offer("ahead", 1).kept
    assert policy.read("ahead")
    use(policy, "zzzzzz")
    assert "z" in policy and len(policy) == 4


def test_the_other_tiers_are_counted_too() -> None:
    counters = RamPolicy(1, seed=0).counters
    counters.count_disk_read(100)
    counters.count_disk_read(50)
    counters.count_device_transfer(30)
    assert (counters.disk_reads, counters.disk_bytes) == (2, 150)
    assert (counters.device_transfers, counters.device_bytes) == (1, 30)


def test_ten_thousand_entries_keep_the_cap_through_shuffled_epochs() -> None:
    policy = RamPolicy(5_000 * 100, seed=0)
    rng = random.Random(0)
    for key in epochs(10_000, 6, seed=4):
        if not policy.read(key):
            policy.offer(key, rng.randrange(50, 150), rng.random())
        assert policy.counters.ram_bytes <= policy.cap_bytes
    assert policy.counters.evictions > 0
    assert policy.counters.admissions - policy.counters.evictions == len(policy)


@pytest.mark.parametrize("wrong", [{"cap_bytes": -1}, {"admission": 1.5}, {"admission": float("nan")}])
def test_nonsense_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        RamPolicy(**{"cap_bytes": 1, "seed": 0, **wrong})
    assert caught.value.field in wrong
