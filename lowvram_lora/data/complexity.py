"""How much there is to learn in each sample: the image's entropy and the caption's length, weighed."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from PIL import Image

from ..config import ComplexityConfig
from ..errors import PathError
from .dataset import Complexity, Dataset, Sample
from .pixels import decode, flatten

# Han, kana and their extensions: written without spaces, so each character counts as a word.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
_WORD = re.compile(rf"[{_CJK}]|(?:(?![{_CJK}])[\w'’-])+")
_BINS = 8
_BAR_WIDTH = 30


def score(dataset: Dataset, config: ComplexityConfig) -> Dataset:
    """Return ``dataset`` with every sample's ``complexity`` set.

    Raises:
        PathError: an image can no longer be read.
    """
    words = [count_words(sample.caption) for sample in dataset.samples]
    longest = max(words, default=0) or 1
    scored = (
        replace(sample, complexity=_weigh(_entropy(sample, dataset.config.background), count / longest, config))
        for sample, count in zip(dataset.samples, words, strict=True)
    )
    return replace(dataset, samples=tuple(scored))


def count_words(caption: str) -> int:
    """Return the number of words; a Chinese or Japanese character counts as one."""
    return len(_WORD.findall(caption))


def report(dataset: Dataset) -> str:
    """Return how the scores of a scored dataset are spread, in words."""
    scored = [(s.name, s.complexity.score) for s in dataset.samples if s.complexity is not None]
    if not scored:
        return "No sample has a score."
    scores = [value for _, value in scored]
    simplest = min(scored, key=lambda pair: pair[1])
    richest = max(scored, key=lambda pair: pair[1])
    return "\n".join(
        (
            f"Complexity of {len(scores)} samples: min {min(scores):.3f}, median {statistics.median(scores):.3f}, "
            f"mean {statistics.fmean(scores):.3f}, max {max(scores):.3f}",
            *_histogram(scores),
            f"Simplest: {simplest[0]} ({simplest[1]:.3f}). Richest: {richest[0]} ({richest[1]:.3f}).",
        )
    )


def grey_entropy(image: Image.Image) -> float:
    """Return the Shannon entropy of the 256-bin grey histogram of ``image`` over its maximum of 8 bits."""
    counts = np.asarray(_grey(image).histogram(), dtype=np.float64)
    shares = counts[counts > 0] / counts.sum()
    return float(max(0.0, -(shares * np.log2(shares)).sum() / 8.0))


def _weigh(entropy: float, caption_length: float, config: ComplexityConfig) -> Complexity:
    return Complexity(entropy, caption_length, config.image_weight * entropy + config.text_weight * caption_length)


def _entropy(sample: Sample, background: str) -> float:
    try:
        data = sample.image.read_bytes()
    except OSError as error:
        raise PathError(sample.image, "this image is gone; queue again to read the folder anew") from error
    return grey_entropy(flatten(decode(data, sample.image).image, background))


def _grey(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        return Image.fromarray((np.clip(np.asarray(image), 0.0, 1.0) * 255.0).round().astype(np.uint8))
    return image.convert("L")


def _histogram(scores: Sequence[float]) -> Iterator[str]:
    low, high = min(scores), max(scores)
    if low == high:
        yield f"  {low:.3f}: all of them"
        return
    counts, edges = np.histogram(scores, bins=_BINS, range=(low, high))
    for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True):
        bar = "#" * round(_BAR_WIDTH * int(count) / int(counts.max()))
        yield f"  {left:.3f} to {right:.3f} {bar:<{_BAR_WIDTH}} {count}"
