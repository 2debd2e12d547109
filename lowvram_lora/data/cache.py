"""Encodes a dataset once and keeps it on disk, addressed by content: what has not changed is never redone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..ports import LatentCodec, TextEncoder
from ..units import format_bytes
from .cleaning import Cleaned, clean
from .dataset import Dataset, Sample, name_some
from .encode import Incidents, PictureEncoder, build_mask, cached_shape
from .index import CacheEntry, CacheIndex, EncodedScale
from .lock import Lease, claimed
from .precision import LATENTS
from .profiles import CachePlan
from .store import Kind, generation, invalidate, path_of, peek, touch, write
from .traits import num_text_tokens, textual_of, visual_of
from .wanted import WantedPicture, captions_of, num_steps, text_key, wanted_pictures

__all__ = [
    "LATENTS",
    "STRUCTURE",
    "BuildReport",
    "CacheEntry",
    "CacheIndex",
    "CachePlan",
    "EncodedScale",
    "build",
    "generation",
    "invalidate",
    "num_steps",
]

STRUCTURE = "structure"

OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class BuildReport:
    """What a build did.

    Attributes:
        disk_bytes: of this dataset.
        plan: how it was built.
        incidents: names of pictures that took another way.
        cleaned: what became of the whole cache.
        is_scored: whether any picture has a complexity score.
    """

    texts_built: int
    texts_read: int
    latents_built: int
    latents_read: int
    disk_bytes: int
    plan: CachePlan
    incidents: Incidents
    cleaned: Cleaned
    is_scored: bool = True

    def __str__(self) -> str:
        plan = self.plan
        ram = f"up to {format_bytes(plan.ram_cache_bytes)} in RAM" if plan.ram_cache_bytes else "disk only"
        sizes = "" if plan.scales == (1.0,) else f", at {', '.join(f'{scale:g}' for scale in plan.scales)} of its size"
        lines = [
            f"Latents: {self.latents_built} encoded, {self.latents_read} already on disk"
            f" (kept as {plan.encoding}{sizes})",
            f"Captions: {self.texts_built} encoded, {self.texts_read} already on disk",
            f"Cache of this dataset: {format_bytes(self.disk_bytes)} on disk, {ram}",
            *self._reading_lines(),
            *self._incident_lines(),
            *self._disk_lines(),
        ]
        return "\n".join(lines)

    def _reading_lines(self) -> Iterator[str]:
        if self.plan.predictive:
            yield "The next batch is read from disk while a step runs"
        if not self.plan.uses_scores:
            yield "Complexity scores are left out, as this profile does"
        schedule = self.plan.schedule
        if schedule is None:
            return
        if not self.is_scored:
            yield "Dynamic precision does nothing: no picture has a score. Put Score Complexity before this node"
            return
        half, bands = schedule.middle_half_below, schedule.middle_bands_below
        as_bands = f" and below {bands:g} as bands" if half < bands else ""
        yield (
            f"Dynamic precision: scores below {schedule.early_half_below:g} at half precision at first, then below "
            f"{half:g} at half precision{as_bands}, all as kept at the end"
        )

    def _incident_lines(self) -> Iterator[str]:
        if self.incidents.retried:
            yield (
                "The VAE overflowed at half precision, so these were encoded in float32: "
                f"{name_some(self.incidents.retried)}"
            )
        if self.incidents.in_tiles:
            yield f"Too large for the device, so encoded in tiles: {name_some(self.incidents.in_tiles)}"

    def _disk_lines(self) -> Iterator[str]:
        cleaned, limit = self.cleaned, self.plan.disk_limit_bytes
        removed = (
            f"; {cleaned.num_removed} encodings of other datasets removed ({format_bytes(cleaned.freed_bytes)})"
            if cleaned.num_removed
            else ""
        )
        yield f"Whole cache: {format_bytes(cleaned.total_bytes)} on disk{removed}"
        if limit and cleaned.total_bytes > limit:
            yield (
                f"That is above the limit of {format_bytes(limit)}: what this dataset or a running training needs is "
                "never removed. Raise disk_limit_gb, or choose a higher compression or fewer scales."
            )


@dataclass
class _Steps:
    """Counts a build's steps and what they found."""

    total: int
    root: Path
    on_progress: OnProgress
    done: int = 0
    built: dict[str, int] = field(default_factory=lambda: {"text": 0, "latents": 0, "mask": 0})
    counted: dict[str, int] = field(default_factory=lambda: {"text": 0, "latents": 0, "mask": 0})
    files: set[Path] = field(default_factory=set)

    def finish(self, text: str, kind: Kind, key: str, is_new: bool) -> None:
        path = path_of(self.root, kind, key)
        self.done += 1
        # What several samples share counts once.
        self.counted[kind] += path not in self.files
        self.files.add(path)
        if is_new:
            self.built[kind] += 1
        else:
            touch(path)
        self.on_progress(self.done, self.total, text)

    def waiting(self) -> None:
        self.on_progress(self.done, self.total, "another ComfyUI is encoding this; waiting for it")

    def looking_at(self, name: str) -> None:
        self.on_progress(self.done, self.total, f"looking at {name}, which an older version encoded")

    def disk_bytes(self) -> int:
        return sum(_size(path) for path in self.files)


def build(
    dataset: Dataset,
    codec: LatentCodec,
    encoder: TextEncoder,
    root: Path,
    on_progress: OnProgress,
    plan: CachePlan | None = None,
) -> tuple[CacheIndex, BuildReport]:
    """Encode what is not in the cache yet: all captions first, then all images, then their masks.

    Several processes may build in one folder: each encoding is made by one of them, as a rule.

    Args:
        root: the cache's folder; made if needed.
        on_progress: called after each step with steps done, ``num_steps(dataset, plan)`` and a line of text, and while
            another process is waited for. What it raises ends the build; everything encoded so far is kept.
        plan: how; None keeps everything in full, at full size, and nothing in RAM.

    Raises:
        DatasetError: an image has changed since the dataset was scanned.
        PathError: an image is gone, or the cache can't be written.
        UnsupportedModelError: an encoding can't be kept, or is not a number.
    """
    plan = plan or CachePlan()
    generation(root)
    wanted = [wanted_pictures(sample, dataset, plan, codec.fingerprint) for sample in dataset.samples]
    # Or another process might clean away what this one has just made.
    lease = Lease(root, _names(dataset, wanted, encoder))
    try:
        return _build(dataset, codec, encoder, root, _Steps(num_steps(dataset, plan), root, on_progress), plan, wanted)
    finally:
        lease.release()


def _names(dataset: Dataset, wanted: Sequence[Sequence[WantedPicture]], encoder: TextEncoder) -> set[str]:
    """Return the names of the files that a build makes or finds."""
    captions = {"", *(caption for sample in dataset.samples for caption in captions_of(sample))}
    keys = {text_key(caption, encoder.fingerprint) for caption in captions}
    for picture in (picture for several in wanted for picture in several):
        keys |= {picture.key, *([picture.mask_key] if picture.mask_key else [])}
    return {path_of(Path(), "text", key).name for key in keys}


def _build(
    dataset: Dataset,
    codec: LatentCodec,
    encoder: TextEncoder,
    root: Path,
    steps: _Steps,
    plan: CachePlan,
    wanted: Sequence[Sequence[WantedPicture]],
) -> tuple[CacheIndex, BuildReport]:
    keys = _build_texts(dataset, encoder, root, steps)
    incidents = Incidents()
    pictures = PictureEncoder(
        codec=codec,
        root=root,
        background=dataset.config.background,
        encoding=plan.encoding,
        waiting=steps.waiting,
        incidents=incidents,
    )
    shapes = _build_pictures(wanted, pictures, steps)
    _build_masks(wanted, shapes, dataset.config.masks == "alpha", steps)
    parts: dict[bool, list[CacheEntry]] = {False: [], True: []}
    for sample, several in zip(dataset.samples, wanted, strict=True):
        parts[sample.is_validation].append(_entry(sample, several, keys, shapes, plan, steps))
    index = CacheIndex(
        root=root,
        entries=tuple(parts[False]),
        ram_cache_bytes=plan.ram_cache_bytes,
        empty_text_key=keys[""],
        caption_dropout=dataset.config.caption_dropout,
        predictive=plan.predictive,
        schedule=plan.schedule,
        held_out=tuple(parts[True]),
    )
    disk_bytes = steps.disk_bytes()
    cleaned = clean(root, plan.disk_limit_bytes, {path.name for path in steps.files})
    is_scored = any(entry.complexity_score is not None for entry in index.entries)
    return index, replace(_report(steps, disk_bytes, plan, incidents, cleaned), is_scored=is_scored)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # another process cleans up
        return 0


def _build_texts(dataset: Dataset, encoder: TextEncoder, root: Path, steps: _Steps) -> dict[str, str]:
    """Encode all captions and the empty one; return the key of each."""
    keys: dict[str, str] = {}
    busy = []
    for caption in ("", *(caption for sample in dataset.samples for caption in captions_of(sample))):
        keys[caption] = text_key(caption, encoder.fingerprint)
        if not _build_text(caption, keys[caption], encoder, root, steps, None):
            busy.append(caption)
    for caption in busy:
        _build_text(caption, keys[caption], encoder, root, steps, steps.waiting)
    return keys


def _build_text(
    caption: str, key: str, encoder: TextEncoder, root: Path, steps: _Steps, waiting: Callable[[], None] | None
) -> bool:
    """Return whether the caption is on disk now; if not, another process is at it."""
    if _has_text(root, key):
        steps.finish("caption already cached", "text", key, is_new=False)
        return True
    with claimed(root, key, waiting) as is_ours:
        if not is_ours:
            return False
        if _has_text(root, key):
            steps.finish("caption already cached", "text", key, is_new=False)
            return True
        encoding = encoder.encode(caption)
        write(path_of(root, "text", key), encoding.tensors, {STRUCTURE: encoding.structure})
        steps.finish(f"encoded caption: {caption[:60] or '(empty)'}", "text", key, is_new=True)
        return True


def _has_text(root: Path, key: str) -> bool:
    header = peek(path_of(root, "text", key))
    return header is not None and STRUCTURE in header.metadata


def _build_pictures(
    wanted: Sequence[Sequence[WantedPicture]], pictures: PictureEncoder, steps: _Steps
) -> dict[str, tuple[int, ...]]:
    """Encode all pictures; return the shape of the latents at each key."""
    shapes: dict[str, tuple[int, ...]] = {}
    missing: dict[str, list[WantedPicture]] = {}
    for each in (each for several in wanted for each in several):
        shape = shapes.get(each.key) or cached_shape(pictures.root, each)
        if shape is None:
            missing.setdefault(each.key, []).append(each)
        else:
            shapes[each.key] = shape
            steps.finish(f"{each.sample.name} already cached", "latents", each.key, is_new=False)

    def on_done(done: WantedPicture, shape: tuple[int, ...], what: str) -> None:
        shapes[done.key] = shape
        steps.finish(f"{done.sample.name} {what}", "latents", done.key, is_new=what == "encoded")
        for same in missing[done.key][1:]:
            steps.finish(f"{same.sample.name} already cached", "latents", done.key, is_new=False)

    pictures.run([several[0] for several in missing.values()], on_done)
    return shapes


def _build_masks(
    wanted: Sequence[Sequence[WantedPicture]], shapes: dict[str, tuple[int, ...]], from_alpha: bool, steps: _Steps
) -> None:
    for each in (each for several in wanted for each in several):
        if each.mask_key is not None:
            is_new = build_mask(steps.root, each, shapes[each.key], from_alpha)
            steps.finish(f"mask of {each.sample.name}", "mask", each.mask_key, is_new=is_new)


def _entry(
    sample: Sample,
    wanted: Sequence[WantedPicture],
    keys: dict[str, str],
    shapes: dict[str, tuple[int, ...]],
    plan: CachePlan,
    steps: _Steps,
) -> CacheEntry:
    by_scale: dict[float, list[WantedPicture]] = {}
    for each in wanted:
        by_scale.setdefault(each.scale, []).append(each)
    scales = tuple(
        EncodedScale(
            scale=scale,
            latent_shape=shapes[several[0].key],
            image_keys=tuple(each.key for each in several),
            mask_keys=tuple(each.mask_key for each in several if each.mask_key is not None),
        )
        for scale, several in by_scale.items()
    )
    complexity = sample.complexity if plan.uses_scores else None
    text_keys = tuple(keys[caption] for caption in captions_of(sample))
    return CacheEntry(
        name=sample.name,
        scales=scales,
        text_keys=text_keys,
        repeats=sample.repeats,
        complexity_score=None if complexity is None else complexity.score,
        bucket_px=sample.bucket_px,
        text_tokens=max(num_text_tokens(steps.root, key) for key in text_keys),
        visual=visual_of(steps.root, scales[0].image_keys[0], lambda: steps.looking_at(sample.name)),
        textual=textual_of(sample.captions),
    )


def _report(steps: _Steps, disk_bytes: int, plan: CachePlan, incidents: Incidents, cleaned: Cleaned) -> BuildReport:
    built, counted = steps.built, steps.counted
    return BuildReport(
        texts_built=built["text"],
        texts_read=counted["text"] - built["text"],
        latents_built=built["latents"],
        latents_read=counted["latents"] - built["latents"],
        disk_bytes=disk_bytes,
        plan=plan,
        incidents=incidents,
        cleaned=cleaned,
    )
