"""What Load Dataset says: about the images it read, the files it left alone, and a folder with nothing to use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import DataConfig
from ..units import counted
from .augment import variants_of
from .buckets import is_upscaled, kept_fraction
from .dataset import Dataset, Sample, Skipped, name_some
from .formats import NAMED_SUFFIXES
from .masks import MASK_FOLDERS

MAX_REPEATS = 1000
CROP_WORTH_TELLING = 0.8
_MAX_LINES = 5
_MAX_SKIPPED = 100


@dataclass(frozen=True)
class Reading:
    """One image as it was read, with what the report says about it.

    Attributes:
        written: its captions as they were written; none if there are none.
        warning: what is odd about the bytes of its caption file.
        has_both: whether it has a caption file and rows of a sidecar.
        folder_number: name and number of its folder.
    """

    sample: Sample
    written: tuple[str, ...]
    warning: str
    has_both: bool
    is_animated: bool
    folder_number: tuple[str, int]


def report(dataset: Dataset) -> str:
    """Return what Load Dataset found, in words."""
    samples = dataset.samples
    seen = sum(sample.repeats for sample in samples if not sample.is_validation)
    buckets = Counter(sample.bucket_px for sample in samples)
    skipped = [f"  {skip.name}: {skip.reason}" for skip in dataset.skipped]
    return "\n".join(
        (
            f"{counted(len(samples), 'image')}, {seen} an epoch with repeats; {counted(len(skipped), 'file')} skipped",
            f"Folder: {dataset.folder}",
            *dataset.notes,
            f"Buckets at resolution {dataset.config.resolution} (width x height):",
            *(f"  {width}x{height}: {counted(count, 'image')}" for (height, width), count in sorted(buckets.items())),
            *(["Skipped:"] if skipped else []),
            *_first(skipped, _MAX_SKIPPED, "  and {} more"),
        )
    )


def seen_instead(folder: Path, files: Sequence[Path], skipped: Sequence[Skipped]) -> list[str]:
    """Return why a folder has no usable image: what it holds instead, and what was wrong with each file."""
    usable = ", ".join(suffix[1:] for suffix in NAMED_SUFFIXES)
    problems = [f"{skip.name}: {skip.reason}" for skip in skipped]
    first = f"{folder} holds {_kinds(files) or 'no files'}; images are {usable}"
    return [first, *_first(problems, _MAX_SKIPPED, "and {} more files with such faults")]


def notes_on(
    readings: Sequence[Reading], config: DataConfig, unread: Sequence[Path], sidecar_notes: Iterable[str]
) -> Iterator[str]:
    """Yield what the user should know, one sentence each; where many files share a fault, some of their names."""
    samples = [reading.sample for reading in readings]
    yield from _caption_notes(readings, config)
    yield from sidecar_notes
    yield from _folder_notes(readings, config)
    yield from _variant_notes(samples, config)
    yield from _mask_notes(samples, config)
    yield from _size_notes(samples, config)
    animated = [reading.sample.name for reading in readings if reading.is_animated]
    if animated:
        yield f"animated or with more pages, only the first frame is used: {name_some(animated)}"
    held = [sample.name for sample in samples if sample.is_validation]
    if held:
        yield f"held out for validation: {len(held)} ({name_some(held)})"
    elif config.validation_share:
        yield "nothing is held out for validation: there is only one image"
    if unread:
        yield f"not read: {_kinds(unread)}"


def _caption_notes(readings: Sequence[Reading], config: DataConfig) -> Iterator[str]:
    names = [reading.sample.name for reading in readings]
    blank = [reading.sample.name for reading in readings if reading.written and not any(reading.written)]
    missing = [reading.sample.name for reading in readings if not reading.written]
    both = [reading.sample.name for reading in readings if reading.has_both]
    yield f"captions found {len(names) - len(missing)} of {len(names)}"
    trigger = f"'{config.trigger_word}' alone" if config.trigger_word.strip() else "the empty prompt"
    if blank:
        yield f"blank captions: {len(blank)} ({name_some(blank)})"
    if missing:
        yield f"no caption: {len(missing)} ({name_some(missing)})"
    if blank or (missing and config.missing_captions == "trigger word"):
        yield f"images without words train on {trigger}"
    if missing and config.missing_captions != "trigger word":
        instead = {"empty": "the empty prompt", "folder name": "the name of their folder"}
        yield f"images without a caption train on {instead[config.missing_captions]}"
    if both:
        yield f"captions in a file of their own and in a sidecar, the former is used: {len(both)} ({name_some(both)})"
    warnings = [f"the caption of {each.sample.name} {each.warning}" for each in readings if each.warning]
    yield from _first(warnings, _MAX_LINES, "and the captions of {} more")


def _folder_notes(readings: Sequence[Reading], config: DataConfig) -> Iterator[str]:
    for (name, number), count in Counter(reading.folder_number for reading in readings).items():
        if number > MAX_REPEATS:
            yield f"folder '{name}': {number} is over {MAX_REPEATS}, so it is no number of repeats"
        elif number > 1:
            yield f"folder '{name}': {counted(count, 'image')}, {number} repeats each"
    if config.repeats > 1:
        yield f"repeats: every image {config.repeats} times as often"


def _variant_notes(samples: Sequence[Sample], config: DataConfig) -> Iterator[str]:
    captions = sum(len(sample.captions) for sample in samples)
    if config.caption_dropout:
        yield f"caption_dropout: in {config.caption_dropout:.3g} of all draws images train on the empty prompt"
    if captions > len(samples):
        yield f"captions with their variants: {captions}"
    elif config.caption_variants > 1:
        yield "caption_variants has no effect: turn shuffle_tags on, or set tag_dropout above 0"
    variants = len(variants_of("", config))
    if variants > 1:
        yield f"variants of each image: {variants}"
    is_changed = config.flip or config.random_crop or config.colour_jitter > 0.0
    if config.image_variants > 1 and not is_changed:
        yield "image_variants has no effect: turn flip or random_crop on, or set colour_jitter above 0"
    if config.image_variants == 1 and is_changed:
        yield "flip, random_crop and colour_jitter have no effect: set image_variants to 2 or more"
    if config.caption_variants == 1 and (config.shuffle_tags or config.tag_dropout):
        yield "shuffle_tags and tag_dropout have no effect: set caption_variants to 2 or more"


def _mask_notes(samples: Sequence[Sample], config: DataConfig) -> Iterator[str]:
    if config.masks != "folder":
        folders = {Path(sample.name).parent for sample in samples}
        like_masks = sorted(folder.as_posix() for folder in folders if folder.name.casefold() in MASK_FOLDERS)
        if like_masks:
            yield f"trained on as images: {name_some(like_masks)}; if these are masks, set masks to folder"
    if config.masks == "none":
        return
    without = [sample.name for sample in samples if sample.mask is None]
    yield f"masks found {len(samples) - len(without)} of {len(samples)}"
    if without:
        yield f"no mask, all of it counts: {len(without)} ({name_some(without)})"


def _size_notes(samples: Sequence[Sample], config: DataConfig) -> Iterator[str]:
    small = [sample.name for sample in samples if is_upscaled(sample.image_size_px, sample.bucket_px)]
    if small:
        yield f"smaller than their bucket, scaled up: {len(small)} ({name_some(small)})"
    lossy = [
        (sample, kept)
        for sample in samples
        if (kept := kept_fraction(sample.image_size_px, sample.bucket_px)) < CROP_WORTH_TELLING
    ]
    lines = [_crop_line(sample, kept, config.max_aspect) for sample, kept in lossy]
    yield from _first(lines, _MAX_LINES, "{} more images lose as much")


def _crop_line(sample: Sample, kept: float, max_aspect: float) -> str:
    (height, width), (bucket_height, bucket_width) = sample.image_size_px, sample.bucket_px
    is_too_long = max(height, width) > max_aspect * min(height, width)
    why = f" (buckets go up to {max_aspect:g}:1)" if is_too_long else ""
    return (
        f"{sample.name} ({width}x{height}) goes into {bucket_width}x{bucket_height}: "
        f"{1 - kept:.0%} of it is cropped away{why}"
    )


def _first(lines: Sequence[str], limit: int, more: str) -> Iterator[str]:
    """Yield at most ``limit`` of ``lines``, then how many are left."""
    yield from lines[:limit]
    if len(lines) > limit:
        yield more.format(len(lines) - limit)


def _kinds(files: Sequence[Path]) -> str:
    counts = Counter(path.suffix.lower() or "no ending" for path in files)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
