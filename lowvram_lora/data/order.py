"""The order in which an epoch shows its samples. Every sample occurs exactly as often as its repeats say.

An epoch goes in turns, each of which shows a sample at most once, so that the same picture never follows itself where
that can be helped. Randomness comes from a ``random.Random`` that is passed in.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def turns(repeats: Sequence[int]) -> list[list[int]]:
    """Return the samples of each turn: all of them first, then those with more repeats."""
    most = max(repeats, default=0)
    return [[index for index, times in enumerate(repeats) if times > turn] for turn in range(most)]


def spread_turns(repeats: Sequence[int], source: random.Random) -> list[list[int]]:
    """Return the samples of each turn, those of a sample spread evenly over the epoch.

    There are as many turns as the largest of ``repeats``, T. A sample with r repeats and a phase p, drawn from 0 to
    T - 1, is in turn t where ``(t r + p) // T`` grows from t to t + 1: r times in all.
    """
    most = max(repeats, default=0)
    placed: list[list[int]] = [[] for _ in range(most)]
    for index, times in enumerate(repeats):
        phase = int(source.random() * most)
        for number in range(1, times + 1):
            # The turn in which (t + 1) r + p reaches number * T.
            placed[-(-(number * most - phase) // times) - 1].append(index)
    return [turn for turn in placed if turn]


def permuted(items: Iterable[T], source: random.Random) -> list[T]:
    """Return ``items`` in a random order.

    Of all that ``random`` has, only ``Random.random`` is promised to give the same numbers in later versions of Python.
    """
    return sorted(items, key=lambda _: source.random())


def sequential(repeats: Sequence[int]) -> list[int]:
    """Return the samples in their own order, turn after turn."""
    return [index for turn in turns(repeats) for index in turn]


def shuffled(repeats: Sequence[int], source: random.Random) -> list[int]:
    """Return the samples in a random order within each turn."""
    return [index for turn in spread_turns(repeats, source) for index in permuted(turn, source)]


def curriculum(scores: Sequence[float], repeats: Sequence[int], source: random.Random) -> list[int]:
    """Return the samples from simple to hard within each turn; equal scores in a random order."""
    return [
        index
        for turn in spread_turns(repeats, source)
        for index in sorted(permuted(turn, source), key=lambda sample: scores[sample])
    ]


def bucketed(kinds: Sequence[int], repeats: Sequence[int], source: random.Random) -> list[list[int]]:
    """Return a random order for each kind, in the order in which the kinds first occur.

    The numbers drawn are those of the strategy ``shuffle``, which saved workflows rely on.
    """
    orders = []
    for kind in dict.fromkeys(kinds):
        members = [index for index, each in enumerate(kinds) if each == kind]
        of_members = turns([repeats[index] for index in members])
        orders.append([members[i] for turn in of_members for i in source.sample(turn, len(turn))])
    return orders
