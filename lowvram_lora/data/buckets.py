"""Image size to bucket size. Pure integers; sizes are (height, width) in pixels."""

from collections.abc import Iterator
from fractions import Fraction

from ..config import require

MAX_ASPECT = 3


def bucket_for(
    image_size_px: tuple[int, int], resolution: int, step: int, max_aspect: int = MAX_ASPECT
) -> tuple[int, int]:
    """Return the bucket whose shape is nearest to the image's.

    The area never exceeds ``resolution ** 2`` (no tolerance), both sides are multiples of ``step``, and the
    long side is at most ``max_aspect`` times the short one. Of two equally near buckets the larger wins.

    Raises:
        ConfigError: ``step`` is larger than ``resolution``, so that no bucket exists.
    """
    require(step <= resolution, "bucket_step", step, f"at most the resolution, {resolution}")
    height, width = image_size_px

    def badness(bucket: tuple[int, int]) -> tuple[Fraction, int, int]:
        return _distortion(bucket, (height, width)), -bucket[0] * bucket[1], max(bucket)

    return min(_buckets(resolution, step, max_aspect), key=badness)


def kept_fraction(image_size_px: tuple[int, int], bucket_px: tuple[int, int]) -> float:
    """Return the share of the image's area, 0 to 1, that is left after the crop to the bucket's shape."""
    return float(1 / _distortion(bucket_px, image_size_px))


def is_upscaled(image_size_px: tuple[int, int], bucket_px: tuple[int, int]) -> bool:
    """Return whether the image is smaller than its bucket in either direction."""
    return image_size_px[0] < bucket_px[0] or image_size_px[1] < bucket_px[1]


def _buckets(resolution: int, step: int, max_aspect: int) -> Iterator[tuple[int, int]]:
    square = resolution // step * step
    yield square, square
    for short in range(step, square + 1, step):
        long = min(resolution**2 // short, short * max_aspect) // step * step
        yield short, long
        yield long, short


def _distortion(bucket: tuple[int, int], image: tuple[int, int]) -> Fraction:
    """Return how far the two shapes are apart: 1 for the same aspect, 2 for twice as wide or high."""
    ratio = Fraction(bucket[0] * image[1], bucket[1] * image[0])
    return max(ratio, 1 / ratio)
