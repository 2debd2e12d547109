"""The dataset doctor on pictures: unusable, too small, or the same one again."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ..units import counted
from .dataset import Dataset, Sample, Skipped
from .findings import Finding, Group
from .likeness import Likeness, near_duplicates

# Shares of the pixels asked for. A quarter: enlarged to twice the width and height.
_TINY_SHARE = 1 / 4
_SMALL_SHARE = 1 / 2

# What differs from file to file in the reason why it is left out.
_DETAIL = re.compile(r"\s*\(.*\)", re.DOTALL)


def unusable(skipped: Sequence[Skipped]) -> Iterator[Finding]:
    """Find files that are left out, by reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for skip in skipped:
        by_reason[_DETAIL.sub("", skip.reason)].append(skip.name)
    if by_reason:
        groups = tuple(Group(reason, tuple(names)) for reason, names in by_reason.items())
        yield Finding("unusable files", f"{counted(len(skipped), 'file is', 'files are')} left out.", groups)


def too_small(dataset: Dataset) -> Iterator[Finding]:
    """Find pictures with far fewer pixels than they are trained at, and a resolution that most don't have."""
    asked = dataset.config.resolution**2
    areas = [math.prod(sample.image_size_px) for sample in dataset.samples]
    tiny = [sample for sample, area in zip(dataset.samples, areas, strict=True) if area < _TINY_SHARE * asked]
    is_enlarged = dataset.config.upscale
    if tiny:
        harm = "enlarged they teach blur" if is_enlarged else "at their own size they teach little detail"
        yield Finding(
            "tiny images",
            f"{counted(len(tiny), 'image has', 'images have')} less than a quarter of the pixels of "
            f"resolution {dataset.config.resolution}: {harm}. Use larger copies or leave them out.",
            tuple(Group(_size(sample), (sample.name,)) for sample in tiny),
        )
    median = statistics.median(areas) if areas else asked
    if median < _SMALL_SHARE * asked:
        step = dataset.config.bucket_step
        fitting = max(64, step, int(math.sqrt(median)) // step * step)
        small = [
            sample.name for sample, area in zip(dataset.samples, areas, strict=True) if area < _SMALL_SHARE * asked
        ]
        harm = "which costs memory and time and shows nothing more" if is_enlarged else "and train at their own size"
        yield Finding(
            "resolution above the images",
            f"{len(small)} of {len(areas)} images have less than half the pixels of resolution "
            f"{dataset.config.resolution}, {harm}. "
            f"Set resolution to about {fitting}.",
            (Group("", tuple(small)),),
        )


def duplicates(samples: Sequence[Sample], pictures: Sequence[Likeness] | None) -> Iterator[Finding]:
    """Find pictures that show nearly the same; without ``pictures``, those that are the same to the byte."""
    groups = _same_bytes(samples) if pictures is None else near_duplicates(pictures)
    if not groups:
        return
    num_images = sum(map(len, groups))
    yield Finding(
        "near-duplicates",
        f"{num_images} images in {counted(len(groups), 'group')} show nearly the same, so it is learned that much more "
        "often than the rest. Keep the best of each group; to stress it on purpose, use repeats.",
        tuple(_group([samples[index] for index in group]) for group in groups),
    )


def _group(samples: Sequence[Sample]) -> Group:
    # A picture that was trained on tells nothing about those that were not.
    held_out = {sample.is_validation for sample in samples}
    label = "some held out for validation, some trained on" if len(held_out) > 1 else ""
    return Group(label, tuple(sample.name for sample in samples))


def _same_bytes(samples: Sequence[Sample]) -> list[list[int]]:
    by_content: dict[str, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        by_content[sample.image_digest].append(index)
    return [group for group in by_content.values() if len(group) > 1]


def _size(sample: Sample) -> str:
    height, width = sample.image_size_px
    return f"{width}x{height}"
