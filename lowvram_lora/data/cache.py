"""Encodes a dataset once and keeps it on disk, addressed by content: what has not changed is never redone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DatasetError, PathError, UnsupportedModelError
from ..ports import LatentCodec, TextEncoder
from ..units import format_bytes
from .dataset import Dataset, Sample, digest_of
from .index import CacheEntry, CacheIndex, EncodedScale
from .pixels import to_pixels
from .store import generation, invalidate, path_of, peek, write

__all__ = ["BuildReport", "CacheEntry", "CacheIndex", "build", "generation", "invalidate", "num_steps"]

FORMAT_VERSION = 1
LATENTS = "latents"
STRUCTURE = "structure"

OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class BuildReport:
    """What a build did."""

    texts_built: int
    texts_read: int
    latents_built: int
    latents_read: int
    disk_bytes: int
    ram_cache_bytes: int

    def __str__(self) -> str:
        ram = f"up to {format_bytes(self.ram_cache_bytes)} in RAM" if self.ram_cache_bytes else "disk only"
        return "\n".join(
            (
                f"Latents: {self.latents_built} encoded, {self.latents_read} already on disk",
                f"Captions: {self.texts_built} encoded, {self.texts_read} already on disk",
                f"Cache of this dataset: {format_bytes(self.disk_bytes)} on disk, {ram}",
            )
        )


@dataclass
class _Steps:
    """Counts a build's steps and what they found."""

    total: int
    on_progress: OnProgress
    done: int = 0
    built: dict[str, int] = field(default_factory=lambda: {"text": 0, "latents": 0})
    files: set[Path] = field(default_factory=set)

    def finish(self, text: str, path: Path, built: str = "") -> None:
        self.done += 1
        self.files.add(path)
        if built:
            self.built[built] += 1
        self.on_progress(self.done, self.total, text)


def num_steps(dataset: Dataset) -> int:
    """Return the number of steps ``build`` reports: each sample's captions and image, and the empty caption."""
    return sum(len(_captions(sample)) + 1 for sample in dataset.samples) + 1


def build(
    dataset: Dataset,
    codec: LatentCodec,
    encoder: TextEncoder,
    root: Path,
    on_progress: OnProgress,
    ram_cache_bytes: int = 0,
) -> tuple[CacheIndex, BuildReport]:
    """Encode what is not in the cache yet: all captions first, then all images, one at a time.

    Args:
        root: the cache's folder; made if needed.
        on_progress: called after each step with steps done, ``num_steps(dataset)`` and a line of text. What
            it raises ends the build; everything encoded so far is kept.
        ram_cache_bytes: passed on in the index; 0 keeps nothing in RAM.

    Raises:
        DatasetError: an image has changed since the dataset was scanned.
        PathError: an image is gone, or the cache can't be written.
        UnsupportedModelError: an encoding can't be kept, or is not a number.
    """
    generation(root)
    steps = _Steps(num_steps(dataset), on_progress)
    empty_key = _build_text("", encoder, root, steps)
    text_keys = [
        tuple(_build_text(caption, encoder, root, steps) for caption in _captions(sample)) for sample in dataset.samples
    ]
    built = [_build_latents(sample, dataset.config.background, codec, root, steps) for sample in dataset.samples]
    entries = tuple(
        _entry(sample, keys, *latents) for sample, keys, latents in zip(dataset.samples, text_keys, built, strict=True)
    )
    dropout = float(getattr(dataset.config, "caption_dropout", 0.0))
    index = CacheIndex(root, entries, ram_cache_bytes, empty_key, dropout)
    return index, _report(steps, len(entries), ram_cache_bytes)


def _captions(sample: Sample) -> tuple[str, ...]:
    return tuple(getattr(sample, "captions", (sample.caption,)))


def _build_text(caption: str, encoder: TextEncoder, root: Path, steps: _Steps) -> str:
    key = digest_of("text", FORMAT_VERSION, caption, encoder.fingerprint)
    path = path_of(root, "text", key)
    header = peek(path)
    if header is not None and STRUCTURE in header.metadata:
        steps.finish("caption already cached", path)
        return key
    encoding = encoder.encode(caption)
    write(path, encoding.tensors, {STRUCTURE: encoding.structure})
    steps.finish(f"encoded caption: {caption[:60] or '(empty)'}", path, "text")
    return key


def _build_latents(
    sample: Sample, background: str, codec: LatentCodec, root: Path, steps: _Steps
) -> tuple[str, tuple[int, ...]]:
    parts = (sample.image_digest, sample.bucket_px, background, codec.fingerprint)
    key = digest_of("latents", FORMAT_VERSION, *parts)
    path = path_of(root, "latents", key)
    header = peek(path)
    if header is not None and LATENTS in header.shapes:
        steps.finish(f"{sample.name} already cached", path)
        return key, header.shapes[LATENTS]
    latents = _encode(sample, background, codec)
    write(path, {LATENTS: latents}, {})
    steps.finish(f"encoded {sample.name}", path, "latents")
    return key, tuple(latents.shape)


def _encode(sample: Sample, background: str, codec: LatentCodec) -> Tensor:
    data = _read_unchanged(sample)
    latents = codec.encode(to_pixels(data, sample.image, sample.bucket_px, background))
    latents = latents.detach().to("cpu", torch.float32).clone(memory_format=torch.contiguous_format)
    if not bool(latents.isfinite().all()):
        raise UnsupportedModelError(
            f"The VAE's output for {sample.name} is not a number.",
            "Start ComfyUI with --fp32-vae, or load another VAE.",
        )
    return latents


def _read_unchanged(sample: Sample) -> bytes:
    try:
        data = sample.image.read_bytes()
    except OSError as error:
        raise PathError(sample.image, "this image is gone; queue again to read the folder anew") from error
    # The address promises these bytes: others under it would be taken for them in every later run.
    if hashlib.sha256(data).hexdigest() != sample.image_digest:
        raise DatasetError([f"{sample.name} has changed since Load Dataset read it; queue again"])
    return data


def _entry(sample: Sample, text_keys: tuple[str, ...], latents_key: str, latent_shape: tuple[int, ...]) -> CacheEntry:
    return CacheEntry(
        name=sample.name,
        scales=(EncodedScale(1.0, latent_shape, (latents_key,)),),
        text_keys=text_keys,
        repeats=sample.repeats,
        complexity_score=None if sample.complexity is None else sample.complexity.score,
        bucket_px=sample.bucket_px,
    )


def _report(steps: _Steps, num_samples: int, ram_cache_bytes: int) -> BuildReport:
    return BuildReport(
        texts_built=steps.built["text"],
        texts_read=num_samples + 1 - steps.built["text"],
        latents_built=steps.built["latents"],
        latents_read=num_samples - steps.built["latents"],
        disk_bytes=sum(path.stat().st_size for path in steps.files),
        ram_cache_bytes=ram_cache_bytes,
    )
