"""A scanned dataset as frozen data. Sizes are (height, width) in pixels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import DataConfig


@dataclass(frozen=True)
class Complexity:
    """One sample's scores.

    Attributes:
        entropy: of the grey histogram, 0 (one flat colour) to 1 (all 256 greys equally often).
        caption_length: words of the caption over words of the dataset's longest, 0 to 1.
        score: the weighted mean of the measures, 0 to 1; 0.5 where nothing was measured (``skip``).
    """

    entropy: float
    caption_length: float
    score: float


@dataclass(frozen=True)
class Sample:
    """One image and its captions.

    Attributes:
        image: absolute path.
        name: path relative to the dataset's folder, with forward slashes.
        captions: one or more variants with the trigger word, as written first; a caption may be empty.
        repeats: times the sample is seen in an epoch, 1 or more.
        image_size_px: after the EXIF turn.
        image_digest: sha256 of the file's bytes, hex.
        complexity: set by Score Complexity.
        mask: the file whose brightness weighs the loss; the image itself where its alpha does; None for no mask.
        mask_digest: sha256 of that file's bytes, hex; empty without a mask.
        is_validation: held out: never trained on.
    """

    image: Path
    name: str
    captions: tuple[str, ...]
    repeats: int
    image_size_px: tuple[int, int]
    bucket_px: tuple[int, int]
    image_digest: str
    complexity: Complexity | None = None
    mask: Path | None = None
    mask_digest: str = ""
    is_validation: bool = False

    @property
    def caption(self) -> str:
        """The caption as it was written, with the trigger word."""
        return self.captions[0]


@dataclass(frozen=True)
class Skipped:
    """A file that is not trained on, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Dataset:
    """The usable images of a folder, in natural order of their names.

    Attributes:
        notes: what the user should know, one sentence each.
    """

    folder: Path
    config: DataConfig
    samples: tuple[Sample, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything here that decides training; the folder's place on disk does not."""
        rows = [
            (s.name, s.image_digest, s.captions, s.repeats, s.bucket_px, s.mask_digest, s.is_validation)
            for s in self.samples
        ]
        config = self.config
        variants = (config.image_variants, config.flip, config.random_crop, config.colour_jitter, config.variant_seed)
        return digest_of(config.background, variants, config.masks, config.caption_dropout, rows)


def digest_of(*parts: object) -> str:
    """Return the sha256 of ``parts`` as hex. They must be plain data: text, numbers, lists, tuples, dicts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8")).hexdigest()


def name_some(names: Sequence[str], limit: int = 5) -> str:
    """Return the first ``limit`` of ``names`` and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
