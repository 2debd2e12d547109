"""The dataset doctor: what would make a poor LoRA, found before anything is encoded, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import batch_faults, caption_faults, picture_faults
from .dataset import Dataset, Sample
from .findings import Finding, describe
from .likeness import Likeness
from .text_window import TextWindow

__all__ = ["Finding", "Intent", "describe", "examine", "exposed", "foreseen"]


@dataclass(frozen=True, kw_only=True)
class Intent:
    """What is known of the training to come; what is None is not checked.

    Attributes:
        steps: optimizer steps.
        batch_size: samples in a step; taken as 1 where only the steps are known.
        text_window: of the text encoder.
    """

    steps: int | None = None
    batch_size: int | None = None
    text_window: TextWindow | None = None


def examine(
    dataset: Dataset, intent: Intent | None = None, pictures: Sequence[Likeness] | None = None
) -> tuple[Finding, ...]:
    """Return every problem of ``dataset``. Reads no file.

    Args:
        pictures: what each sample's picture is compared by, in the dataset's order (``measuring.likenesses``). None
            finds only copies that are the same to the byte.
    """
    intent = intent or Intent()
    trained = [sample for sample in dataset.samples if not sample.is_validation]
    return (
        *picture_faults.unusable(dataset.skipped),
        *picture_faults.too_small(dataset),
        *picture_faults.duplicates(dataset.samples, pictures),
        *caption_faults.missing(dataset),
        *caption_faults.identical(dataset),
        *batch_faults.thin_buckets(trained),
        *foreseen(dataset.samples, intent),
    )


def foreseen(samples: Sequence[Sample], intent: Intent) -> tuple[Finding, ...]:
    """Return what ``intent`` alone brings up, for a node that knows more of the training than Load Dataset did."""
    trained = [sample for sample in samples if not sample.is_validation]
    return (
        *caption_faults.too_long(samples, intent.text_window),
        *batch_faults.large_batch(trained, intent.batch_size),
        *batch_faults.exposure(trained, intent.steps, batch_faults.mean_draws(trained, intent.batch_size)),
    )


def exposed(shown: Sequence[batch_faults.Shown], steps: int, draws_a_step: float) -> tuple[Finding, ...]:
    """Return whether ``steps`` show images too often or not at all, for LoRA Train, which knows both numbers.

    Args:
        shown: what is trained on: samples, or entries of a cache.
        draws_a_step: the mean, those of all accumulated batches.
    """
    return tuple(batch_faults.exposure(shown, steps, draws_a_step))
