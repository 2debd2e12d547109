"""A built cache as frozen data: where each encoding is, and in which shape. Holds no tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .dataset import digest_of
from .draw import EMPTY_CAPTION, Draw
from .schedule import PrecisionSchedule
from .store import Kind, path_of

__all__ = ["CacheEntry", "CacheIndex", "EncodedScale"]


@dataclass(frozen=True)
class EncodedScale:
    """One sample's picture at one size.

    Attributes:
        scale: of the sample's bucket, above 0 and at most 1.
        latent_shape: without a batch axis.
        image_keys: one for each variant of the picture.
        mask_keys: where each variant's weights of the loss are; empty without a mask.
    """

    scale: float
    latent_shape: tuple[int, ...]
    image_keys: tuple[str, ...]
    mask_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class CacheEntry:
    """Where one sample's encodings are.

    Attributes:
        scales: the sizes that are encoded, the full one first.
        text_keys: one for each variant of the caption.
        bucket_px: height and width the image was fitted to, for reports; None if unknown.
        text_tokens: of the longest caption, padding included.
        visual, textual: what planning compares samples by; see ``traits``. Empty if unknown.
    """

    name: str
    scales: tuple[EncodedScale, ...]
    text_keys: tuple[str, ...]
    repeats: int
    complexity_score: float | None = None
    bucket_px: tuple[int, int] | None = None
    text_tokens: int = 0
    visual: bytes = field(default=b"", repr=False)
    textual: bytes = field(default=b"", repr=False)

    @classmethod
    def single(
        cls, name: str, latents_key: str, text_key: str, latent_shape: tuple[int, ...], repeats: int
    ) -> CacheEntry:
        """Return the entry of a sample with one size, one variant of its picture and one of its caption."""
        return cls(name, (EncodedScale(1.0, latent_shape, (latents_key,)),), (text_key,), repeats)

    @property
    def latents_key(self) -> str:
        """The first variant of the picture at full size."""
        return self.scales[0].image_keys[0]

    @property
    def text_key(self) -> str:
        """The first variant of the caption."""
        return self.text_keys[0]

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """At full size, without a batch axis."""
        return self.scales[0].latent_shape

    @property
    def num_images(self) -> int:
        """Number of variants of the picture, the same at every size."""
        return len(self.scales[0].image_keys)

    @property
    def is_single(self) -> bool:
        """Whether there is one way only to draw this sample, and no mask."""
        return len(self.scales) == self.num_images == len(self.text_keys) == 1 and not self.scales[0].mask_keys

    def at(self, scale: float) -> EncodedScale:
        """Return the encodings at ``scale``.

        Raises:
            KeyError: this sample is not encoded at that scale.
        """
        found = next((encoded for encoded in self.scales if encoded.scale == scale), None)
        if found is None:
            raise KeyError(scale)
        return found

    def files(self) -> Iterator[tuple[Kind, str]]:
        """Yield kind and key of everything that was encoded for this sample."""
        for encoded in self.scales:
            yield from (("latents", key) for key in encoded.image_keys)
            yield from (("mask", key) for key in encoded.mask_keys)
        yield from (("text", key) for key in self.text_keys)

    def _determining(self) -> tuple[Any, ...]:
        if self.is_single:
            # As it was before there was more than one way, so that finished runs are found again.
            return self.latents_key, self.text_key, self.latent_shape, self.repeats
        rows = [(s.scale, s.latent_shape, s.image_keys, s.mask_keys) for s in self.scales]
        return rows, self.text_keys, self.repeats


@dataclass(frozen=True)
class CacheIndex:
    """A built cache: a handle that holds no tensor.

    Attributes:
        entries: one per sample, in the dataset's order.
        ram_cache_bytes: how much of it ``TieredCache`` may keep in RAM.
        empty_text_key: the empty caption's encoding.
        caption_dropout: share of draws, 0 to 1, that are read with the empty caption.
        predictive: whether the next batch is read from disk while a step runs.
        schedule: dynamic precision; None reads everything as it is on disk.
        held_out: samples for validation, never drawn in training; ``validation`` is the cache of these.
    """

    root: Path
    entries: tuple[CacheEntry, ...]
    ram_cache_bytes: int
    empty_text_key: str
    caption_dropout: float = 0.0
    predictive: bool = False
    schedule: PrecisionSchedule | None = None
    held_out: tuple[CacheEntry, ...] = ()

    @property
    def validation(self) -> CacheIndex:
        """The cache of the samples that are held out, read as they are on disk."""
        return replace(self, entries=self.held_out, held_out=(), caption_dropout=0.0, predictive=False, schedule=None)

    @property
    def fingerprint(self) -> str:
        """Hex digest of what decides training: contents, order and repeats; not names, scores or places."""
        rows = [entry._determining() for entry in self.entries]
        more: dict[str, Any] = {"caption_dropout": self.caption_dropout} if self.caption_dropout else {}
        if self.schedule is not None:
            more["schedule"] = asdict(self.schedule), [entry.complexity_score for entry in self.entries]
        return digest_of(self.empty_text_key, rows, *([more] if more else []))

    @property
    def scales(self) -> tuple[float, ...]:
        """The scales that any sample is encoded at, the full one first."""
        return tuple(sorted({encoded.scale for entry in self.entries for encoded in entry.scales}, reverse=True))

    def file_names(self) -> frozenset[str]:
        """Return the names of all files that may be read."""
        files = {file for entry in (*self.entries, *self.held_out) for file in entry.files()}
        return frozenset(path_of(self.root, *file).name for file in {*files, ("text", self.empty_text_key)})

    def image_of(self, draw: Draw) -> EncodedScale:
        """Return the size that ``draw`` takes."""
        return self.entries[draw.entry].at(draw.scale)

    def latents_key(self, draw: Draw) -> str:
        """Return the key of the latents that ``draw`` takes."""
        return self.image_of(draw).image_keys[draw.image]

    def mask_key(self, draw: Draw) -> str | None:
        """Return the key of the weights of the loss that ``draw`` takes, if it has any."""
        keys = self.image_of(draw).mask_keys
        return keys[draw.image] if keys else None

    def text_key(self, draw: Draw) -> str:
        """Return the key of the conditioning that ``draw`` takes."""
        if draw.caption == EMPTY_CAPTION:
            return self.empty_text_key
        return self.entries[draw.entry].text_keys[draw.caption]
