"""What a dataset's cache holds: every encoding by its address, before anything is encoded.

An address is a digest of everything the encoding depends on. What changes gets another one, so nothing old is ever
taken for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from .augment import PLAIN, Variant, variants_of
from .dataset import Dataset, Sample, digest_of
from .profiles import CachePlan

__all__ = ["FORMAT_VERSION", "WantedPicture", "captions_of", "num_steps", "sizes_of", "text_key", "wanted_pictures"]

FORMAT_VERSION = 1
# 2: a caption says how many of its rows are padding.
TEXT_FORMAT_VERSION = 2

Size = tuple[int, int]


@dataclass(frozen=True)
class WantedPicture:
    """One picture at one size in one variant.

    Attributes:
        key: the address of its latents.
        full_key: the address of the same latents kept in full; ``key`` where that is how they are kept.
        mask_key: the address of the weights of its loss; None without a mask.
    """

    sample: Sample
    scale: float
    size_px: Size
    variant: Variant
    key: str
    full_key: str
    mask_key: str | None


def text_key(caption: str, fingerprint: str) -> str:
    """Return the address of a caption's conditioning from the text encoder of that fingerprint."""
    return digest_of("text", TEXT_FORMAT_VERSION, caption, fingerprint)


def sizes_of(bucket_px: Size, scales: Sequence[float], step: int) -> dict[float, Size]:
    """Return the size in pixels for each scale, the largest first; sides are multiples of ``step``.

    The bucket itself is always there. Scales that come to the size of a larger one, or to less than a step, are not.
    """
    sizes = {1.0: bucket_px}
    for scale in sorted({*scales} - {1.0}, reverse=True):
        height, width = (int(side * scale / step + 0.5) * step for side in bucket_px)
        if min(height, width) > 0 and (height, width) not in sizes.values():
            sizes[scale] = (height, width)
    return sizes


def num_steps(dataset: Dataset, plan: CachePlan) -> int:
    """Return the number of steps a build reports: each caption, picture and mask, and the empty caption."""
    return 1 + sum(
        len(captions_of(sample)) + sum(1 + (sample.mask is not None) for _ in _configurations(sample, dataset, plan))
        for sample in dataset.samples
    )


def captions_of(sample: Sample) -> tuple[str, ...]:
    """Return the captions to encode: all of them, or the plain one of a sample that is never trained on."""
    return sample.captions[:1] if sample.is_validation else sample.captions


def wanted_pictures(sample: Sample, dataset: Dataset, plan: CachePlan, fingerprint: str) -> list[WantedPicture]:
    """Return what is to be encoded of a sample's picture with the codec of that fingerprint, full size first."""
    return [_wanted(sample, dataset, plan, fingerprint, *each) for each in _configurations(sample, dataset, plan)]


def _configurations(sample: Sample, dataset: Dataset, plan: CachePlan) -> Iterator[tuple[float, Size, Variant]]:
    held_out = sample.is_validation
    variants = (PLAIN,) if held_out else variants_of(sample.image_digest, dataset.config)
    scales = (1.0,) if held_out else plan.scales
    for scale, size_px in sizes_of(sample.bucket_px, scales, dataset.config.bucket_step).items():
        yield from ((scale, size_px, variant) for variant in variants)


def _wanted(
    sample: Sample,
    dataset: Dataset,
    plan: CachePlan,
    fingerprint: str,
    scale: float,
    size_px: Size,
    variant: Variant,
) -> WantedPicture:
    config = dataset.config
    # What is the usual is left out, so that caches of older versions stay good.
    changes = [] if variant == PLAIN else [["variant", *astuple(variant)]]
    parts = ("latents", FORMAT_VERSION, sample.image_digest, size_px, config.background, fingerprint, *changes)
    full_key = digest_of(*parts)
    key = full_key if plan.encoding == "full" else digest_of(*parts, ["encoding", plan.encoding])
    mask_key = None
    if sample.mask is not None:
        places = (sample.mask_digest, sample.image_size_px, size_px, astuple(variant), config.masks)
        # The latents' size depends on the codec.
        mask_key = digest_of("mask", FORMAT_VERSION, *places, fingerprint)
    return WantedPicture(sample, scale, size_px, variant, key, full_key, mask_key)
