"""A folder of images and captions as a ``Dataset``: every file is opened once here, and every fault named."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..config import DataConfig
from ..errors import DatasetError, PathError
from .buckets import MAX_ASPECT, bucket_for, is_upscaled, kept_fraction
from .captions import CAPTION_SUFFIXES, Caption, add_trigger, read_caption
from .dataset import Dataset, Sample, Skipped, digest_of, name_some
from .folders import Listing, list_files, numbered_folder, resolve_folder
from .pixels import decode

__all__ = ["Dataset", "Sample", "Skipped", "folder_fingerprint", "report", "scan"]

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")
MAX_REPEATS = 1000
CROP_WORTH_TELLING = 0.8
NO_SUCH_FOLDER = "no such folder"


@dataclass(frozen=True)
class _Reading:
    """One image as it was read, with what the report says about it."""

    sample: Sample
    caption: Caption
    is_animated: bool
    folder_number: tuple[str, int]


def scan(config: DataConfig, roots: Sequence[Path]) -> Dataset:
    """Return the usable images of ``config.folder``. Files that can't be used are in ``skipped``, by name.

    Args:
        roots: the folders datasets may be read from.

    Raises:
        PathError: the folder does not exist inside a root.
        DatasetError: there is no usable image in it; the problems say what is there instead.
        ConfigError: ``bucket_step`` is larger than ``resolution``.
    """
    folder = resolve_folder(config.folder, roots)
    listing = list_files(folder, roots)
    readings: list[_Reading] = []
    skipped = [Skipped(_name(path, folder), reason) for path, reason in listing.refused]
    files = frozenset(listing.files)
    for path in listing.files:
        if not _is_image(path):
            continue
        try:
            readings.append(_read(path, folder, config, files))
        except PathError as error:
            skipped.append(Skipped(_name(path, folder), error.reason))
    if not readings:
        raise DatasetError(_seen_instead(folder, listing, skipped))
    samples = tuple(reading.sample for reading in readings)
    return Dataset(folder, config, samples, tuple(skipped), tuple(_notes(readings, config, listing)))


def folder_fingerprint(config: DataConfig, roots: Sequence[Path]) -> str:
    """Return a digest that changes when an image or a caption is added, removed or written to.

    It reads no file, only names, sizes and times. Never raises: a folder that is not there gives a constant.
    """
    try:
        folder = resolve_folder(config.folder, roots)
    except PathError:
        return NO_SUCH_FOLDER
    wanted = (*IMAGE_SUFFIXES, *CAPTION_SUFFIXES)
    files = [path for path in list_files(folder, roots).files if path.suffix.lower() in wanted]
    return digest_of(asdict(config), str(folder), [(_name(path, folder), *_stamp(path)) for path in files])


def report(dataset: Dataset) -> str:
    """Return what Load Dataset found, in words."""
    samples = dataset.samples
    seen = sum(sample.repeats for sample in samples)
    buckets = Counter(sample.bucket_px for sample in samples)
    lines = [
        f"{len(samples)} images, {seen} an epoch with repeats; {len(dataset.skipped)} files skipped",
        f"Folder: {dataset.folder}",
        *dataset.notes,
        f"Buckets at resolution {dataset.config.resolution} (width x height):",
        *(f"  {width}x{height}: {count} images" for (height, width), count in sorted(buckets.items())),
    ]
    if dataset.skipped:
        lines += ["Skipped:", *(f"  {skip.name}: {skip.reason}" for skip in dataset.skipped)]
    return "\n".join(lines)


def _read(path: Path, folder: Path, config: DataConfig, files: Collection[Path]) -> _Reading:
    name, number = numbered_folder(path, folder)
    if number == 0:
        raise PathError(path, f"its folder '{name}' asks for 0 repeats")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PathError(path, f"can't be read ({error.strerror or error})") from error
    picture = decode(data, path)
    caption = read_caption(path, config.caption_extension, files)
    sample = Sample(
        image=path,
        name=_name(path, folder),
        caption=add_trigger(caption.text, config.trigger_word),
        repeats=number if number <= MAX_REPEATS else 1,
        image_size_px=picture.size_px,
        bucket_px=bucket_for(picture.size_px, config.resolution, config.bucket_step),
        image_digest=hashlib.sha256(data).hexdigest(),
    )
    return _Reading(sample, caption, picture.is_animated, (name, number))


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (-1, -1)  # gone since it was listed
    return status.st_size, status.st_mtime_ns


def _seen_instead(folder: Path, listing: Listing, skipped: Sequence[Skipped]) -> list[str]:
    kinds = _kinds(listing.files)
    usable = ", ".join(suffix[1:] for suffix in IMAGE_SUFFIXES)
    problems = [f"{folder} holds {kinds or 'no files'}; images are {usable}"]
    return problems + [f"{skip.name}: {skip.reason}" for skip in skipped]


def _kinds(files: Sequence[Path]) -> str:
    counts = Counter(path.suffix.lower() or "no ending" for path in files)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def _notes(readings: Sequence[_Reading], config: DataConfig, listing: Listing) -> Iterator[str]:
    yield from _caption_notes(readings, config)
    yield from _folder_notes(readings)
    yield from _size_notes([reading.sample for reading in readings])
    animated = [reading.sample.name for reading in readings if reading.is_animated]
    if animated:
        yield f"animated or with more pages, only the first frame is used: {name_some(animated)}"
    other = [path for path in listing.files if not _is_image(path) and path.suffix.lower() not in CAPTION_SUFFIXES]
    if other:
        yield f"not read: {_kinds(other)}"


def _caption_notes(readings: Sequence[_Reading], config: DataConfig) -> Iterator[str]:
    found = [reading for reading in readings if reading.caption.source is not None]
    blank = [reading.sample.name for reading in found if not reading.caption.text]
    missing = [reading.sample.name for reading in readings if reading.caption.source is None]
    yield f"captions found {len(found)} of {len(readings)}"
    if blank:
        yield f"blank captions: {len(blank)} ({name_some(blank)})"
    if missing:
        yield f"no caption: {len(missing)} ({name_some(missing)})"
    if blank or missing:
        trained_on = f"'{config.trigger_word}' alone" if config.trigger_word.strip() else "the empty prompt"
        yield f"images without words train on {trained_on}"
    for reading in readings:
        if reading.caption.warning:
            yield f"the caption of {reading.sample.name} {reading.caption.warning}"


def _folder_notes(readings: Sequence[_Reading]) -> Iterator[str]:
    for (name, number), count in Counter(reading.folder_number for reading in readings).items():
        if number > MAX_REPEATS:
            yield f"folder '{name}': {number} is over {MAX_REPEATS}, so it is no number of repeats"
        elif number > 1:
            yield f"folder '{name}': {count} images, {number} repeats each"


def _size_notes(samples: Sequence[Sample]) -> Iterator[str]:
    small = [sample.name for sample in samples if is_upscaled(sample.image_size_px, sample.bucket_px)]
    if small:
        yield f"smaller than their bucket, scaled up: {len(small)} ({name_some(small)})"
    for sample in samples:
        kept = kept_fraction(sample.image_size_px, sample.bucket_px)
        if kept < CROP_WORTH_TELLING:
            (height, width), (bucket_height, bucket_width) = sample.image_size_px, sample.bucket_px
            is_too_long = max(height, width) > MAX_ASPECT * min(height, width)
            why = f" (buckets go up to {MAX_ASPECT}:1)" if is_too_long else ""
            yield (
                f"{sample.name} ({width}x{height}) goes into {bucket_width}x{bucket_height}: "
                f"{1 - kept:.0%} of it is cropped away{why}"
            )
