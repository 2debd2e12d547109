"""A function over many items on several threads, with the results in order and few of them waiting."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

MAX_THREADS = 8
_AHEAD = 4


def usual_threads() -> int:
    """Return how many threads suit work that leaves Python most of the time."""
    return min(os.cpu_count() or 1, MAX_THREADS)


def in_order(function: Callable[[T], R], items: Iterable[T], threads: int) -> Generator[R, None, None]:
    """Yield ``function(item)`` for each item, in the order of ``items``, computed on ``threads`` threads.

    At most a few items a thread are taken ahead of what was yielded. What ``function`` raises is raised here, in order.
    Closing the generator waits for the calls that are under way and starts no more.
    """
    if threads <= 1:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(threads)
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= threads * _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
