"""A folder of images and captions as a ``Dataset``: every file is opened once here, and every fault named."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock

from ..config import DataConfig
from ..errors import DatasetError, PathError
from .buckets import Buckets, Size, buckets_of
from .captions import CAPTION_SUFFIXES, add_trigger, caption_suffixes, read_caption
from .dataset import Dataset, Sample, Skipped, digest_of
from .folders import Listing, list_files, numbered_folder, resolve_folder
from .formats import is_image, is_named_as_image, is_told_by_name, may_be_image
from .known_facts import KnownFacts, known_facts
from .masks import check_mask, is_mask, mask_of, masks_by_image
from .notes import MAX_REPEATS, Reading, notes_on, report, seen_instead
from .ordered import in_order, usual_threads
from .pixels import PictureFacts, inspect, strict_decoding
from .sidecars import Sidecars, is_sidecar, read_sidecars
from .tags import caption_variants
from .validation import held_out

__all__ = ["Dataset", "Sample", "Skipped", "folder_fingerprint", "report", "scan"]

NO_SUCH_FOLDER = "no such folder"

# No picture within the limit of pixels is larger.
MAX_FILE_BYTES = 1 << 30

OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class _Source:
    """What the reading of each image needs to know of its folder.

    Attributes:
        files: everything that may be opened.
        masks: as ``masks_by_image`` gives them; empty where masks do not come from files.
        large: held while a large picture is decoded, so that there is one at a time.
        known: of pictures that were scanned before; these are read, but not decoded.
    """

    folder: Path
    config: DataConfig
    buckets: Buckets
    files: frozenset[Path]
    suffixes: tuple[str, ...]
    sidecars: Sidecars
    masks: Mapping[tuple[Path, str], Path]
    large: Lock = field(default_factory=Lock)
    known: KnownFacts = field(default_factory=KnownFacts)

    def name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


def scan(
    config: DataConfig,
    roots: Sequence[Path],
    on_progress: OnProgress = lambda done, total, text: None,
    threads: int = 0,
    store_root: Path | None = None,
) -> Dataset:
    """Return the usable images of ``config.folder``. Files that can't be used are in ``skipped``, by name.

    Files are read on several threads; the result does not depend on how many. No decoded picture is kept.

    Args:
        roots: the folders datasets may be read from.
        on_progress: called after each file with files done, all files and a line of text. What it raises ends the scan.
        threads: 0 for as many as suit the machine.
        store_root: where facts of pictures are kept by content, so that none is decoded twice; None keeps nothing.

    Raises:
        PathError: the folder does not exist inside a root.
        DatasetError: there is no usable image in it; the problems say what is there instead.
        ConfigError: no bucket is possible, since ``bucket_step`` or ``min_side`` is too large.
    """
    buckets = buckets_of(config)
    folder = resolve_folder(config.folder, roots)
    listing = list_files(folder, roots)
    source = _source(folder, config, buckets, listing)
    skipped = [Skipped(source.name(path), reason) for path, reason in listing.refused]
    with known_facts(store_root) as known:
        readings = _read_all(replace(source, known=known), listing, skipped, on_progress, threads or usual_threads())
    if not readings:
        raise DatasetError(seen_instead(folder, listing.files, skipped))
    readings = _with_validation(readings, config.validation_share)
    notes = tuple(notes_on(readings, config, _unread(listing, readings, skipped, source), source.sidecars.notes))
    return Dataset(folder, config, tuple(reading.sample for reading in readings), tuple(skipped), notes)


def folder_fingerprint(config: DataConfig, roots: Sequence[Path]) -> str:
    """Return a digest that changes when an image, a caption or a mask is added, removed or written to.

    It reads no file, only names, sizes and times. Never raises: a folder that is not there gives a constant.
    """
    try:
        folder = resolve_folder(config.folder, roots)
    except PathError:
        return NO_SUCH_FOLDER
    files = [path for path in list_files(folder, roots).files if may_be_image(path) or _is_text(path, config)]
    return digest_of(
        asdict(config), str(folder), [(path.relative_to(folder).as_posix(), *_stamp(path)) for path in files]
    )


def _read_all(
    source: _Source, listing: Listing, skipped: list[Skipped], on_progress: OnProgress, threads: int
) -> list[Reading]:
    """Return what is to be known of each image; add to ``skipped`` what can't be used."""
    wanted = [path for path in listing.files if _is_wanted(path, source)]
    readings: list[Reading] = []
    # Here, and not in each thread: it is a setting of the whole process.
    with strict_decoding(), closing(in_order(partial(_read, source), wanted, threads)) as outcomes:
        for done, (path, outcome) in enumerate(zip(wanted, outcomes, strict=True), start=1):
            if isinstance(outcome, Reading):
                readings.append(outcome)
            elif outcome is not None:
                skipped.append(outcome)
            on_progress(done, len(wanted), f"read {source.name(path)}")
    return readings


def _source(folder: Path, config: DataConfig, buckets: Buckets, listing: Listing) -> _Source:
    files = frozenset(listing.files)
    sidecars = read_sidecars(listing.files, folder, files)
    masks = masks_by_image(listing.files, folder) if config.masks == "folder" else {}
    return _Source(folder, config, buckets, files, caption_suffixes(config), sidecars, masks)


def _is_text(path: Path, config: DataConfig) -> bool:
    suffixes = {*CAPTION_SUFFIXES, *(suffix.lower() for suffix in caption_suffixes(config))}
    return path.suffix.lower() in suffixes or is_sidecar(path)


def _is_wanted(path: Path, source: _Source) -> bool:
    is_weight = source.config.masks == "folder" and is_mask(path, source.folder)
    return may_be_image(path) and not _is_text(path, source.config) and not is_weight


def _read(source: _Source, path: Path) -> Reading | Skipped | None:
    """Return what is to be known of one file: an image, a fault, or None if it is no image and does not claim to be."""
    try:
        return _reading(source, path)
    except PathError as error:
        return Skipped(source.name(path), error.reason)


def _reading(source: _Source, path: Path) -> Reading | None:
    config = source.config
    data = _bytes_of_image(path)
    if data is None:
        return None
    folder_name, number = numbered_folder(path, source.folder)
    if number == 0:
        raise PathError(path, f"its folder '{folder_name}' asks for 0 repeats")
    digest = hashlib.sha256(data).hexdigest()
    known = KnownFacts() if is_told_by_name(path) else source.known
    facts = known.of(digest, lambda: inspect(data, path, source.large))
    caption = read_caption(path, source.suffixes, source.files)
    rows = source.sidecars.captions.get(path, ())
    written = (caption.text,) if caption.source is not None else rows
    bucket_px = _bucket(source.buckets, facts.size_px, path)
    mask, mask_digest = _mask(source, path, data, facts, bucket_px)
    sample = Sample(
        image=path,
        name=source.name(path),
        captions=_captions(written, digest, folder_name, number, path, config),
        repeats=(number if number <= MAX_REPEATS else 1) * config.repeats,
        image_size_px=facts.size_px,
        bucket_px=bucket_px,
        image_digest=digest,
        mask=mask,
        mask_digest=mask_digest,
    )
    has_both = caption.source is not None and bool(rows)
    return Reading(sample, written, caption.warning, has_both, facts.is_animated, (folder_name, number))


def _bytes_of_image(path: Path) -> bytes | None:
    """Return the file's bytes, or None if neither its name nor its content is that of an image."""
    try:
        with path.open("rb") as stream:
            if not is_named_as_image(path) and not is_image(stream, path):
                return None
            size = os.fstat(stream.fileno()).st_size
            if size > MAX_FILE_BYTES:
                raise PathError(path, f"{size / (1 << 30):.1f} GiB is too large for a picture; save a smaller one")
            stream.seek(0)
            return stream.read()
    except OSError as error:
        raise PathError(path, f"can't be read ({error.strerror or error})") from error


def _bucket(buckets: Buckets, image_size_px: Size, path: Path) -> Size:
    bucket = buckets.for_image(image_size_px)
    if bucket is None:
        height, width = image_size_px
        smallest = max(buckets.min_side, buckets.step)
        raise PathError(
            path, f"{width}x{height} is smaller than the smallest side, {smallest}; turn upscale on to use it"
        )
    return bucket


def _captions(
    written: tuple[str, ...], digest: str, folder_name: str, number: int, path: Path, config: DataConfig
) -> tuple[str, ...]:
    if not written and config.missing_captions == "skip":
        raise PathError(path, "no caption, and missing_captions is skip")
    if not written and config.missing_captions == "empty":
        return ("",)
    if not written and config.missing_captions == "folder name":
        is_numbered = number <= MAX_REPEATS and folder_name.startswith(f"{number}_")
        written = (folder_name.removeprefix(f"{number}_") if is_numbered else folder_name,)
    variants = caption_variants(written or ("",), digest, config)
    return tuple(dict.fromkeys(add_trigger(text, config.trigger_word) for text in variants))


def _mask(source: _Source, path: Path, data: bytes, facts: PictureFacts, bucket_px: Size) -> tuple[Path | None, str]:
    """Return the image's mask, checked, and the digest of its file; None and an empty text without one."""
    from_alpha = source.config.masks == "alpha" and facts.has_alpha
    mask = path if from_alpha else mask_of(path, source.masks)
    if mask is None:
        return None, ""
    try:
        data = data if from_alpha else mask.read_bytes()
        check_mask(data, mask, facts.size_px, bucket_px, from_alpha)
    except OSError as error:
        raise PathError(path, f"its mask {source.name(mask)} can't be read ({error.strerror or error})") from error
    except PathError as error:
        raise PathError(path, f"its mask {source.name(mask)}: {error.reason}") from error
    return mask, hashlib.sha256(data).hexdigest()


def _with_validation(readings: Sequence[Reading], share: float) -> list[Reading]:
    held = held_out((reading.sample.image_digest for reading in readings), share)
    return [
        replace(reading, sample=replace(reading.sample, is_validation=True))
        if reading.sample.image_digest in held
        else reading
        for reading in readings
    ]


def _unread(listing: Listing, readings: Sequence[Reading], skipped: Sequence[Skipped], source: _Source) -> list[Path]:
    """Return the files that are neither images, nor captions, nor named as skipped."""
    used = {reading.sample.image for reading in readings} | set(source.masks.values())
    named = {skip.name for skip in skipped}
    return [
        path
        for path in listing.files
        if path not in used and not _is_text(path, source.config) and source.name(path) not in named
    ]


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (-1, -1)  # gone since it was listed
    return status.st_size, status.st_mtime_ns
