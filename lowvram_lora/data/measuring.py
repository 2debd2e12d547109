"""Reads the pictures of a dataset, a few at once, and measures them; what was measured before is not read again."""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import PathError
from .dataset import Dataset, Sample, digest_of, name_some
from .detail import ENTROPY, MEASURES, WORKING_PX, small_copy
from .likeness import Likeness, likeness
from .measured import MeasuredStore, Row, Value
from .pixels import decode, strict_decoding

# Raise it when the same picture would measure otherwise.
FORMAT_VERSION = 2
LIKENESS = "likeness"

# What nearly every workflow asks for sooner or later, and what takes next to nothing once a picture is decoded.
_USUAL = (ENTROPY, LIKENESS)

OnProgress = Callable[[int, int, str], None]

_MAX_THREADS = 4
# Decoded and flattened, these take about 600 MiB. A larger picture is read alone.
_MAX_PX_UNDER_WAY = 100_000_000
_KEEP_EVERY = 500
_KEEP_SHARE = 4
_GONE = "this image is gone; queue again to read the folder anew"
_TOO_LARGE = "there is not enough free memory to read this image; save it smaller"
_CHANGED = "this image has changed since Load Dataset read it; queue again"


def no_progress(done: int, total: int, text: str) -> None:
    """Show nothing."""


def measure(
    dataset: Dataset,
    names: Collection[str],
    store_root: Path | None = None,
    on_progress: OnProgress = no_progress,
    num_threads: int | None = None,
) -> list[Row]:
    """Return the measures ``names`` (of ``MEASURES``, or ``LIKENESS``) of every sample, in order.

    No more pictures are in memory at once than there are threads. What is kept is kept with the usual measures, so that
    Score Complexity as it is by default reads no picture that Load Dataset has looked at.

    Args:
        store_root: where measures are kept; None keeps nothing.
        on_progress: called after each sample with samples done, their number and a line of text. What it raises ends
            the work; what was measured so far is kept.
        num_threads: None takes one for each CPU, up to 4.

    Raises:
        PathError: images are gone, changed or unreadable. It is raised at the end and names all of them.
    """
    store = None if store_root is None else MeasuredStore(store_root, _settings(dataset.config.background))
    rows = _known(dataset.samples, names, store)
    missing = [index for index, row in enumerate(rows) if len(row) < len(set(names))]
    progress = _Progress(len(rows), len(rows) - len(missing), on_progress)
    if progress.done:
        progress.on_progress(progress.done, progress.total, f"{progress.done} measured before")

    usual = () if store is None else _USUAL

    def work(index: int) -> Row | PathError:
        wanted = [name for name in {**dict.fromkeys(names), **dict.fromkeys(usual)} if name not in rows[index]]
        return _measure(dataset.samples[index], dataset.config.background, wanted)

    failed: list[tuple[Sample, PathError]] = []
    sizes_px = {index: math.prod(dataset.samples[index].image_size_px) for index in missing}
    pool = _in_threads(work, sizes_px, num_threads)
    with strict_decoding(), _kept(store) as keep, closing(pool) as results:
        for index, measured in zip(missing, results, strict=True):
            sample = dataset.samples[index]
            if isinstance(measured, PathError):
                failed.append((sample, measured))
            else:
                rows[index].update({name: value for name, value in measured.items() if name in names})
                keep(sample.image_digest, measured)
            progress.step(f"measured {sample.name}")
    if failed:
        raise _all_of(failed)
    return rows


def likenesses(rows: Sequence[Row]) -> list[Likeness]:
    """Return what pictures are compared by, of rows that were measured with ``LIKENESS``."""
    return [Likeness.from_text(str(row[LIKENESS])) for row in rows]


@dataclass
class _Progress:
    total: int
    done: int
    on_progress: OnProgress

    def step(self, text: str) -> None:
        self.done += 1
        self.on_progress(self.done, self.total, text)


@contextmanager
def _kept(store: MeasuredStore | None) -> Iterator[Callable[[str, Row], None]]:
    """Give a function that takes rows by picture digest; write them now and then, and on every way out."""
    new: dict[str, Row] = {}
    num_written = 0

    def flush() -> None:
        nonlocal num_written
        if store is not None and new:
            store.add(new)
        num_written += len(new)
        new.clear()

    def keep(image_digest: str, row: Row) -> None:
        new[image_digest] = row
        # A write takes as long as all that is there: more seldom as there is more, so that all writes together take
        # time in proportion to the pictures.
        if len(new) >= max(_KEEP_EVERY, num_written // _KEEP_SHARE):
            flush()

    try:
        yield keep
    finally:
        flush()


def _known(samples: Sequence[Sample], names: Collection[str], store: MeasuredStore | None) -> list[Row]:
    known = {} if store is None else store.known({sample.image_digest for sample in samples})
    found = [known.get(sample.image_digest, {}) for sample in samples]
    return [{name: row[name] for name in names if _is_usable(name, row.get(name))} for row in found]


def _is_usable(name: str, value: Value | None) -> bool:
    """Return whether ``value``, from a file that anybody may have written to, is one of the measure ``name``."""
    if name != LIKENESS:
        return isinstance(value, float) and 0.0 <= value <= 1.0
    try:
        Likeness.from_text(str(value))
    except ValueError:
        return False
    return True


def _settings(background: str) -> str:
    return digest_of("measures", FORMAT_VERSION, WORKING_PX, background)[:16]


def _measure(sample: Sample, background: str, names: Collection[str]) -> Row | PathError:
    try:
        data = sample.image.read_bytes()
    except OSError:
        return PathError(sample.image, _GONE)
    # What is kept under this digest must be of these bytes.
    if hashlib.sha256(data).hexdigest() != sample.image_digest:
        return PathError(sample.image, _CHANGED)
    try:
        picture = small_copy(decode(data, sample.image, WORKING_PX).image, background)
    except PathError as error:
        return PathError(sample.image, error.reason)  # a raised one keeps the frames that hold the picture
    except MemoryError:
        return PathError(sample.image, _TOO_LARGE)
    row: Row = {name: MEASURES[name](picture) for name in names if name != LIKENESS}
    if LIKENESS in names:
        row[LIKENESS] = likeness(picture).to_text()
    return row


def _in_threads(
    work: Callable[[int], Row | PathError], sizes_px: Mapping[int, int], num_threads: int | None
) -> Generator[Row | PathError, None, None]:
    """Yield what ``work`` gives for each index of ``sizes_px``, in order, with few of them and few pixels under way."""
    num_threads = num_threads or min(_MAX_THREADS, os.cpu_count() or 1)
    under_way: deque[tuple[int, Future[Row | PathError]]] = deque()
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="measure")
    try:
        for index, size_px in sizes_px.items():
            while under_way and (
                len(under_way) >= 2 * num_threads or size_px + sum(px for px, _ in under_way) > _MAX_PX_UNDER_WAY
            ):
                yield under_way.popleft()[1].result()
            under_way.append((size_px, pool.submit(work, index)))
        while under_way:
            yield under_way.popleft()[1].result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _all_of(failed: Sequence[tuple[Sample, PathError]]) -> PathError:
    (_, first), *others = failed
    if not others:
        return first
    names = name_some([sample.name for sample, _ in others], limit=20)
    return PathError(first.path, f"{first.reason}. The same or another fault with {len(others)} more: {names}")
