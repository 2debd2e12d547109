"""The dataset doctor on batches and steps: thin buckets, batches that can't be full, images seen too often or never."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Protocol

from ..units import counted
from .dataset import Sample
from .findings import Finding, Group

# 20 images for 50 epochs, a usual first try that copies its pictures.
MANY_VIEWS = 50


class Shown(Protocol):
    """What a run shows: a sample, or its entry in the cache."""

    @property
    def name(self) -> str:
        """The image's file."""
        ...

    @property
    def repeats(self) -> int:
        """Draws of it in an epoch."""
        ...


def thin_buckets(samples: Sequence[Sample]) -> Iterator[Finding]:
    """Find buckets with a single image, where there are others."""
    buckets = _by_bucket(samples)
    alone = [(bucket, members) for bucket, members in buckets.items() if len(members) == 1]
    if len(buckets) > 1 and alone:
        yield Finding(
            "thin buckets",
            f"{counted(len(alone), 'bucket holds', 'buckets hold')} one image, which never shares a shape with "
            "another. Crop it to one of the other shapes, or raise bucket_step.",
            tuple(_group(bucket, members) for bucket, members in alone),
        )


def large_batch(samples: Sequence[Sample], batch_size: int | None) -> Iterator[Finding]:
    """Find buckets that can't fill one batch in an epoch."""
    if batch_size is None or not samples:
        return
    num_draws = sum(sample.repeats for sample in samples)
    short = [(bucket, own) for bucket, own in _by_bucket(samples).items() if _draws(own) < batch_size]
    if num_draws < batch_size:
        yield Finding(
            "batch larger than a bucket",
            f"batch_size {batch_size} is more than the {counted(num_draws, 'draw')} of a whole epoch: no batch can be "
            f"full. Set batch_size to {num_draws} or less, add images, or give them repeats.",
            tuple(_group(bucket, members) for bucket, members in short),
        )
    elif short:
        yield Finding(
            "batch larger than a bucket",
            f"{counted(len(short), 'bucket has', 'buckets have')} fewer draws an epoch than batch_size {batch_size}: "
            "batches of one shape are smaller there. Lower batch_size, crop to fewer shapes, raise bucket_step, or "
            "give these images repeats.",
            tuple(_group(bucket, members) for bucket, members in short),
        )


def mean_draws(samples: Sequence[Sample], batch_size: int | None) -> float:
    """Return the draws that a step has on average, in batches of one bucket: a thin bucket's are smaller."""
    size = batch_size or 1
    buckets = _by_bucket(samples).values()
    draws = [sum(sample.repeats for sample in bucket) for bucket in buckets]
    return sum(draws) / max(sum(math.ceil(each / size) for each in draws), 1)


def exposure(samples: Sequence[Shown], steps: int | None, draws_a_step: float) -> Iterator[Finding]:
    """Find images that the steps asked for show too often, or not once.

    Args:
        draws_a_step: the mean.
    """
    if steps is None or not samples:
        return
    size = draws_a_step
    num_draws = sum(sample.repeats for sample in samples)
    epochs = steps * size / num_draws
    asked = f"{counted(steps, 'step')} of {size:.3g} draws each"
    often = [sample for sample in samples if epochs * sample.repeats >= MANY_VIEWS]
    if often:
        most = max(sample.repeats for sample in often)
        fewer = max(1, math.ceil(MANY_VIEWS * num_draws / (most * size)) - 1)
        yield Finding(
            "too few images for the steps",
            f"{asked} show {counted(len(often), 'image')} of {len(samples)} up to {epochs * most:.0f} times each. "
            f"Overfitting begins somewhere there (20 images for 50 epochs are {MANY_VIEWS} times each): previews "
            "repeat the poses and backgrounds of the dataset whatever the prompt says, and the loss goes on falling "
            f"while that of held-out images rises. Use {fewer} steps or fewer, or more images.",
            (Group("", tuple(sample.name for sample in often)),),
        )
    if epochs < 1:
        enough = math.ceil(num_draws / size)
        yield Finding(
            "too many images for the steps",
            f"{asked} show {steps * size:.0f} of the {num_draws} draws of one epoch: the other images are never "
            f"trained on. Use {enough} steps or more, or fewer images.",
        )


def _by_bucket(samples: Sequence[Sample]) -> dict[tuple[int, int], list[Sample]]:
    buckets: dict[tuple[int, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        buckets[sample.bucket_px].append(sample)
    return dict(sorted(buckets.items()))


def _draws(samples: Sequence[Shown]) -> int:
    return sum(sample.repeats for sample in samples)


def _group(bucket_px: tuple[int, int], samples: Sequence[Sample]) -> Group:
    height, width = bucket_px
    label = f"{width}x{height}, {counted(_draws(samples), 'draw')} an epoch"
    return Group(label, tuple(sample.name for sample in samples))
