"""What the RAM tier keeps: the rules, without the data."""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from ..config import require


@dataclass
class TierCounters:
    """What the tiers have done so far.

    Attributes:
        hits: reads that RAM answered.
        misses: reads that it did not.
        admissions: entries taken into RAM.
        evictions: entries that had to leave it for others.
        ram_bytes: held in RAM now.
        disk_reads: files read; more than the misses where some are read ahead.
        disk_bytes: read from disk so far.
        device_transfers: batches moved to the device.
        device_bytes: moved to the device so far.
    """

    hits: int = 0
    misses: int = 0
    admissions: int = 0
    evictions: int = 0
    ram_bytes: int = 0
    disk_reads: int = 0
    disk_bytes: int = 0
    device_transfers: int = 0
    device_bytes: int = 0

    def count_disk_read(self, num_bytes: int) -> None:
        """Count one file read."""
        self.disk_reads += 1
        self.disk_bytes += num_bytes

    def count_device_transfer(self, num_bytes: int) -> None:
        """Count one batch moved to the device."""
        self.device_transfers += 1
        self.device_bytes += num_bytes


@dataclass(frozen=True)
class Admission:
    """What became of an offer.

    Attributes:
        kept: whether the entry is to be held.
        evicted: entries to be let go.
    """

    kept: bool
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Use:
    """What is known of a key, held or not, by the count of reads: its last two reads and how many there were."""

    before: int | None = None
    last: int = 0
    num_reads: int = 0


@dataclass(frozen=True)
class _Held:
    num_bytes: int
    num_reads: int


class RamPolicy:
    """Decides which entries are held in at most ``cap_bytes``. The caller holds the data.

    **Eviction.** First to leave is the entry with the highest ``age / (uses + 1)``: age is the number of reads, of any
    key, since its own last one (or since its data came), uses how often it was read in all. Ties fall the same way
    each time.

    **Admission.** While there is room, everything is taken. After that an entry is taken only if

    - it was read before, and each entry that must leave for it has a higher ``age / (uses + 1)`` than it had itself
      just before this read: it is needed more often than they are; and
    - a draw says so: with probability ``admission * (1 + score) / 2``, so that samples of high complexity, which
      batches are built around, get in twice as fast as those of none.

    The draw is there because an epoch reads each sample once: what was read longest ago is what comes next, and a cache
    that takes every newcomer throws that away and answers nothing. (Rare admission against such reads is an old remedy:
    Qureshi et al., Adaptive Insertion Policies for High Performance Caching, 2007.)

    The same calls with the same seed give the same decisions. A hit costs constant time, a decision grows with the
    number of different counts of uses among what is held, which epochs keep small. What is known of a key is kept when
    it leaves: some hundred bytes a key. Calls from several threads need the caller's lock.
    """

    def __init__(self, cap_bytes: int, seed: int, admission: float = 1 / 16) -> None:
        """Start empty.

        Args:
            cap_bytes: 0 holds nothing.
            seed: of the draws.
            admission: 0 never replaces an entry; 1 replaces as often as the first rule allows.
        """
        require(cap_bytes >= 0, "cap_bytes", cap_bytes, "0 or more")
        require(0.0 <= admission <= 1.0, "admission", admission, "0 to 1")
        self.counters = TierCounters()
        self.cap_bytes = cap_bytes
        self._admission = admission
        self._random = random.Random(seed)
        self._num_reads = 0
        self._uses: dict[str, _Use] = {}
        self._held: dict[str, _Held] = {}
        # Held keys by their count of uses, each in the order of their last read, which is its value.
        self._levels: dict[int, OrderedDict[str, int]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def read(self, key: str) -> bool:
        """Count a read of ``key`` and return whether it is held. If not, ``offer`` it once its data is there."""
        self._num_reads += 1
        use = self._uses.get(key, _Use())
        self._uses[key] = _Use(use.last if use.num_reads else None, self._num_reads, use.num_reads + 1)
        held = self._held.get(key)
        if held is None:
            self.counters.misses += 1
            return False
        self.counters.hits += 1
        self._leave_level(key, held.num_reads)
        self._enter(key, held.num_bytes)
        return True

    def offer(self, key: str, num_bytes: int, score: float | None = None) -> Admission:
        """Decide whether ``key`` is to be held in ``num_bytes`` from now on.

        A held key may be offered anew, say in another encoding: then it is judged as if it had not been held, and is
        among ``evicted`` if it is not kept.

        Args:
            num_bytes: what it takes in RAM.
            score: complexity, 0 to 1; None counts as 1.
        """
        require(num_bytes >= 0, "num_bytes", num_bytes, "0 or more")
        was_held = self.drop(key)
        victims = self._victims(key, num_bytes, 1.0 if score is None else score)
        if victims is None:
            self.counters.evictions += was_held
            return Admission(False, (key,) if was_held else ())
        for victim in victims:
            self.drop(victim)
        self.counters.evictions += len(victims)
        self.counters.admissions += not was_held
        self.counters.ram_bytes += num_bytes
        self._enter(key, num_bytes)
        return Admission(True, victims)

    def drop(self, key: str) -> bool:
        """Let go of ``key`` and return whether it was held. It counts as no eviction."""
        held = self._held.pop(key, None)
        if held is None:
            return False
        self.counters.ram_bytes -= held.num_bytes
        self._leave_level(key, held.num_reads)
        return True

    def _enter(self, key: str, num_bytes: int) -> None:
        num_reads = self._uses.get(key, _Use()).num_reads
        self._held[key] = _Held(num_bytes, num_reads)
        # The time of entry, not of the read: a level stays in order also where data comes later and in another order.
        self._levels.setdefault(num_reads, OrderedDict())[key] = self._num_reads

    def _leave_level(self, key: str, num_reads: int) -> None:
        level = self._levels[num_reads]
        del level[key]
        if not level:
            del self._levels[num_reads]

    def _victims(self, key: str, num_bytes: int, score: float) -> tuple[str, ...] | None:
        """Return what must leave for ``key``; None if it is not to be held."""
        free = self.cap_bytes - self.counters.ram_bytes
        if num_bytes <= free:
            return ()
        use = self._uses.get(key, _Use())
        if num_bytes > self.cap_bytes or use.before is None:
            return None
        if not self._random.random() < self._admission * (1.0 + score) / 2.0:
            return None
        own = (use.last - use.before) / use.num_reads
        victims: list[str] = []
        for negative, victim in self._stalest():
            if num_bytes <= free:
                break
            if -negative <= own:
                return None
            victims.append(victim)
            free += self._held[victim].num_bytes
        return tuple(victims)

    def _stalest(self) -> Iterator[tuple[float, str]]:
        """Yield the held keys, those first to leave first, each after its negative ``age / (uses + 1)``."""
        return heapq.merge(*(self._level(num_reads) for num_reads in self._levels))

    def _level(self, num_reads: int) -> Iterator[tuple[float, str]]:
        for key, last in self._levels[num_reads].items():
            yield -(self._num_reads - last) / (num_reads + 1), key
