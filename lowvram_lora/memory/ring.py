"""What is where in a ring of device memory that weights pass through, and what comes next: no tensor, no device.

The order in which a pass uses its layers is learned from the pass before. So it is known when each layer in the ring is
needed again, and which come next. These are loaded ahead, each in the place of those that are needed last (Belady, A
study of replacement algorithms for a virtual-storage computer, 1966), never of one that is needed sooner than itself.
Only what is in use at the moment is pinned, so that any order is served.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from .facts import ALIGNMENT, aligned

# Later than any use that is foreseen.
_NEVER = 1 << 60
_start_of = attrgetter("start")


@dataclass(eq=False, slots=True)
class Segment:
    """A stretch of the ring.

    Attributes:
        key: whose weights are in it, or None.
        next_use: when they are needed again, in uses of any layer.
        users: how many use them now.
        fences: to pass before anything else is written here: those of the last use.
        content: what ``load`` gave; None if it failed.
    """

    start: int
    end: int
    key: Hashable | None = None
    next_use: int = _NEVER
    users: int = 0
    fences: tuple[Any, ...] = ()
    content: Any = None


class _Places:
    """A ring's segments; they cover it without gaps, in the order of their addresses.

    A search for a place that was in vain is remembered. Until something changes, one for more bytes that are needed
    later is in vain too, and after a change there can only be places that touch what has changed.
    """

    def __init__(self, num_bytes: int) -> None:
        end = num_bytes // ALIGNMENT * ALIGNMENT
        self.segments = [Segment(0, end)] if end else []
        self.by_key: dict[Hashable, Segment] = {}
        self._in_vain: tuple[int, int] | None = None
        self._changed: tuple[int, int] | None = None

    def place(self, key: Hashable, num_bytes: int, floor: int) -> Segment | None:
        """Give ``key`` the place of those that are needed last, and all after ``floor``.

        Returns:
            The new segment, with the fences of all that was there; None without such a place.
        """
        known = self._in_vain
        if known is None or num_bytes < known[0] or floor < known[1]:
            window = self._best_window(num_bytes, floor, 0, len(self.segments))
            is_new = known is None or floor >= known[1]
        else:
            window = self._changed and self._best_window(num_bytes, floor, *self._touching(num_bytes, floor))
            is_new = True
        if window is None:
            if is_new:
                self._in_vain, self._changed = (num_bytes, floor), None
            return None
        start, first, last = window
        old = self.segments[first : last + 1]
        self.change(old[0].start, old[-1].end)
        fences = tuple(fence for segment in old for fence in segment.fences)
        placed = Segment(start, start + num_bytes, key, fences=fences)
        parts = [placed]
        # What is left of those at the ends is free once their last use is over.
        if old[0].start < placed.start:
            parts.insert(0, Segment(old[0].start, placed.start, fences=old[0].fences))
        if placed.end < old[-1].end:
            parts.append(Segment(placed.end, old[-1].end, fences=old[-1].fences))
        self.segments[first : last + 1] = parts
        for segment in old:
            self.by_key.pop(segment.key, None)
        self.by_key[key] = placed
        return placed

    def free(self, segment: Segment) -> None:
        """Forget what is in ``segment``."""
        self.by_key.pop(segment.key, None)
        segment.key, segment.next_use, segment.content = None, _NEVER, None
        self.change(segment.start, segment.end)

    def change(self, start: int, end: int) -> None:
        """Learn that what lies there may be needed later than it was, or is not in use any more."""
        if self._in_vain is not None:
            before = self._changed
            self._changed = (start, end) if before is None else (min(start, before[0]), max(end, before[1]))

    def change_all(self) -> None:
        """Learn that anything may have changed."""
        self._in_vain = self._changed = None

    def _touching(self, num_bytes: int, floor: int) -> tuple[int, int]:
        """Return the range of segments that a place which touches what has changed can begin with."""
        assert self._changed is not None
        segments, (start, end) = self.segments, self._changed
        first = bisect_right(segments, start, key=_start_of) - 1
        following = bisect_left(segments, end, lo=first, key=_start_of)
        before = 0
        while first and before < num_bytes:
            segment = segments[first - 1]
            if segment.users or segment.next_use <= floor:
                break
            before += segment.end - segment.start
            first -= 1
        return first, following

    def _best_window(self, num_bytes: int, floor: int, begin: int, end: int) -> tuple[int, int, int] | None:
        """Return start, first and last segment of the best place that begins with one of these segments."""
        segments = self.segments
        num, best, least, best_left = len(segments), None, floor + 1, 0
        for first in range(begin, end):
            segment = segments[first]
            if segment.users or segment.next_use < least:
                continue
            soonest, left, last = segment.next_use, segment.end - segment.start - num_bytes, first
            while left < 0 and last + 1 < num:
                last += 1
                segment = segments[last]
                if segment.users or segment.next_use < least:
                    break
                if segment.next_use < soonest:
                    soonest = segment.next_use
                left += segment.end - segment.start
            # Of equals the one that leaves the least over.
            if left >= 0 and (best is None or soonest > least or left < best_left):
                best, least, best_left = (first, last), soonest, left
        return best and (self._start(*best, num_bytes), *best)

    def _start(self, first: int, last: int, num_bytes: int) -> int:
        """Return where to begin, so that what is left over joins the neighbour that is needed later."""
        left = self.segments[first - 1].next_use if first else -1
        right = self.segments[last + 1].next_use if last + 1 < len(self.segments) else -1
        start = self.segments[last].end - num_bytes
        if left > right and start < self.segments[first].end:
            return start
        return self.segments[first].start


class _Order:
    """Which layer is used when, from what the last pass did.

    Attributes:
        known: the order of a whole pass; empty until one has been seen.
        now: the number of the next use. Uses are numbered as if passes followed each other forever.
        in_step: this pass has done so far what the last did.
    """

    def __init__(self) -> None:
        self.known: list[Hashable] = []
        self.now = 0
        self.in_step = False
        self._uses: dict[Hashable, list[int]] = {}
        self._recorded: list[Hashable] = []
        self._num_uses = 0

    def begin(self) -> bool:
        """Start a pass; return whether it is where it was expected to start."""
        expected = self.in_step and len(self._recorded) == len(self.known)
        # A pass that was broken off tells nothing new.
        if not expected and self._recorded != self.known[: len(self._recorded)]:
            self._learn()
        self.in_step = bool(self.known)
        if not expected:
            self.now = 0
        self._recorded = []
        return expected

    def _learn(self) -> None:
        self.known, self._uses = self._recorded, {}
        for index, key in enumerate(self.known):
            self._uses.setdefault(key, []).append(index)

    def use(self, key: Hashable) -> bool:
        """Count a use of ``key``; return whether the pass has just left the known order."""
        index = len(self._recorded)
        self._recorded.append(key)
        self._num_uses += 1
        if not self.in_step:
            return False
        self.in_step = index < len(self.known) and self.known[index] == key
        self.now += self.in_step
        return not self.in_step

    def next_use(self, key: Hashable) -> int:
        """Return when ``key`` is needed next; out of step, the later the longer it has not been used."""
        if not self.in_step:
            return _NEVER - 1 - self._num_uses
        uses = self._uses.get(key)
        if not uses:
            return _NEVER - 1
        passes, index = divmod(self.now, len(self.known))
        following = bisect_left(uses, index)
        if following == len(uses):
            passes, following = passes + 1, 0
        return passes * len(self.known) + uses[following]


class Conveyor:
    """A ring that layers pass through, each loaded before it is needed if there is room.

    Args:
        num_bytes: of the ring.
        size: the bytes that a layer takes up in it now; 0 for one that needs no place.
        load: fills a segment with the weights of its key once its fences have passed; what it returns becomes the
            segment's content.
    """

    def __init__(self, num_bytes: int, size: Callable[[Any], int], load: Callable[[Segment], Any]) -> None:
        self._places = _Places(num_bytes)
        self._order = _Order()
        self._size = size
        self._load = load
        # Uses up to this one are in the ring or need no place; and the bytes of what waits for one, if known.
        self._ahead = 0
        self._waiting: int | None = None

    def begin(self) -> None:
        """Start a pass: it is expected to do what the last one did."""
        if not self._order.begin():
            self._foresee()
        self.load_ahead()

    def held(self, key: Hashable) -> Segment | None:
        """Return the segment that holds ``key``, if one does."""
        segment = self._places.by_key.get(key)
        return None if segment is None or segment.content is None else segment

    def use(self, segment: Segment) -> None:
        """Begin one use of a segment that ``held`` gave."""
        self.skip(segment.key)
        segment.users += 1

    def take(self, key: Hashable, again: bool = False) -> Segment | None:
        """Return the segment of ``key`` for one use, or None if there is no room beside what is in use now.

        Args:
            again: load it again if it is there.
        """
        self.skip(key)
        segment = self._places.by_key.get(key)
        if segment is not None and (again or segment.content is None):
            self._places.free(segment)
            segment = None
        segment = segment or self._place(key, self._size(key), floor=-1)
        if segment is not None:
            segment.users += 1
        return segment

    def skip(self, key: Hashable) -> None:
        """Count a use of ``key`` that needs no place."""
        if self._order.use(key):
            self._foresee()

    def give_back(self, segment: Segment, fence: Any) -> None:
        """End one use of ``segment``; ``fence`` passes when the device is done with it."""
        segment.users -= 1
        segment.fences = (fence,)
        segment.next_use = self._order.next_use(segment.key)
        self._places.change(segment.start, segment.end)

    def give_up(self, segment: Segment) -> None:
        """End one use of ``segment`` whose content is none."""
        segment.users -= 1
        segment.content = None
        self._places.change(segment.start, segment.end)

    def load_ahead(self) -> None:
        """Load what is needed next, as far as there is room."""
        order = self._order
        if not order.in_step:
            return
        num = len(order.known)
        if self._ahead < order.now:
            self._ahead, self._waiting = order.now, None
        while self._ahead < order.now + num:
            key = order.known[self._ahead % num]
            if key not in self._places.by_key:
                if self._waiting is None:
                    self._waiting = self._size(key)
                if self._waiting and self._place(key, self._waiting, self._ahead) is None:
                    return
            self._ahead, self._waiting = self._ahead + 1, None

    def _foresee(self) -> None:
        """Look anew at when everything is needed."""
        for key, segment in self._places.by_key.items():
            segment.next_use = self._order.next_use(key)
        self._places.change_all()
        self._ahead, self._waiting = 0, None

    def _place(self, key: Hashable, num_bytes: int, floor: int) -> Segment | None:
        segment = self._places.place(key, num_bytes, floor)
        if segment is not None:
            # A load ahead is for the use that it may not push others out of.
            segment.next_use = max(floor, 0)
            segment.content = self._load(segment)
        return segment


def copies_of_a_pass(order: Sequence[Hashable], sizes: Mapping[Any, int], num_bytes: int) -> list[Hashable]:
    """Return what a ring of ``num_bytes`` loads in one of many passes that all use layers in ``order``.

    Args:
        sizes: bytes that each layer takes up.
    """
    return copies_of_passes(order, sizes, num_bytes)[-1]


def copies_of_passes(
    order: Sequence[Hashable], sizes: Mapping[Any, int], num_bytes: int, num: int = 4
) -> list[list[Hashable]]:
    """Return what a ring of ``num_bytes`` loads in each of the first ``num`` passes.

    Nothing is foreseen in the first. Later ones still differ a little: where layers lie depends on the pass before.
    """
    loaded: list[Hashable] = []

    def load(segment: Segment) -> bool:
        loaded.append(segment.key)
        return True

    conveyor = Conveyor(num_bytes, lambda key: aligned(sizes[key]), load)
    found = []
    for _ in range(num):
        conveyor.begin()
        for key in order:
            segment = conveyor.take(key)
            assert segment is not None, "the ring is smaller than a layer"
            conveyor.give_back(segment, None)
            conveyor.load_ahead()
        found.append(loaded.copy())
        loaded.clear()
    return found
