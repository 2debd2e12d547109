"""Image size to bucket size. Pure integers; sizes are (height, width) in pixels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import DataConfig, require

Size = tuple[int, int]

MAX_ASPECT = 3


@dataclass(frozen=True)
class Buckets:
    """The sizes images may be brought to: worked out once, asked for every image.

    Attributes:
        sizes: areas never exceed the square of the resolution, sides are multiples of ``step`` and within the limits.
        max_aspect: the long side is at most so many times the short one.
        min_side: of every bucket.
        upscale: whether an image may be scaled up to its bucket.
    """

    sizes: tuple[Size, ...]
    step: int
    max_aspect: float
    min_side: int
    upscale: bool = True

    def for_image(self, image_size_px: Size) -> Size | None:
        """Return the bucket whose shape is nearest to the image's; of two equally near ones the larger.

        Without ``upscale`` an image that is smaller gets the largest bucket that fits into it, of its own shape but for
        the step; None where there is none, since the image is smaller than one step or than ``min_side``.
        """

        def badness(bucket: Size) -> tuple[float, int, int]:
            return _distortion(bucket, image_size_px), -bucket[0] * bucket[1], max(bucket)

        nearest = min(self.sizes, key=badness)
        if self.upscale or not is_upscaled(image_size_px, nearest):
            return nearest
        return self._inside(image_size_px, nearest)

    def _inside(self, image_size_px: Size, nearest: Size) -> Size | None:
        # No larger than the nearest bucket, which keeps the limits of area and sides.
        height, width = (min(pair) // self.step * self.step for pair in zip(image_size_px, nearest, strict=True))
        longest = int(min(height, width) * self.max_aspect) // self.step * self.step
        height, width = min(height, longest), min(width, longest)
        return (height, width) if min(height, width) >= max(self.min_side, self.step) else None


def buckets_of(config: DataConfig) -> Buckets:
    """Return the buckets that ``config`` allows.

    Raises:
        ConfigError: there are none: the step is larger than the resolution, or the limits of the sides leave nothing.
    """
    resolution, step = config.resolution, config.bucket_step
    require(step <= resolution, "bucket_step", step, f"at most the resolution, {resolution}")
    sizes = tuple(
        size
        for size in _sizes(resolution, step, config.max_aspect)
        if min(size) >= config.min_side and max(size) <= (config.max_side or max(size))
    )
    square = resolution // step * step
    limits = (config.min_side, config.max_side)
    require(bool(sizes), "min_side, max_side", limits, f"limits that allow a bucket, such as {square} x {square}")
    return Buckets(sizes, step, config.max_aspect, config.min_side, config.upscale)


def bucket_for(image_size_px: Size, resolution: int, step: int, max_aspect: float = MAX_ASPECT) -> Size:
    """Return the bucket whose shape is nearest to the image's, as ``Buckets.for_image`` does with upscaling.

    Raises:
        ConfigError: ``step`` is larger than ``resolution``, so that no bucket exists.
    """
    config = DataConfig(folder="", resolution=resolution, bucket_step=step, max_aspect=max_aspect)
    bucket = buckets_of(config).for_image(image_size_px)
    assert bucket is not None  # only without upscaling
    return bucket


def kept_fraction(image_size_px: Size, bucket_px: Size) -> float:
    """Return the share of the image's area, 0 to 1, that is left after the crop to the bucket's shape."""
    return 1 / _distortion(bucket_px, image_size_px)


def is_upscaled(image_size_px: Size, bucket_px: Size) -> bool:
    """Return whether the image is smaller than its bucket in either direction."""
    return image_size_px[0] < bucket_px[0] or image_size_px[1] < bucket_px[1]


def _sizes(resolution: int, step: int, max_aspect: float) -> Iterator[Size]:
    square = resolution // step * step
    yield square, square
    for short in range(step, square + 1, step):
        long = min(resolution**2 // short, int(short * max_aspect)) // step * step
        yield short, long
        yield long, short


def _distortion(bucket: Size, image: Size) -> float:
    """Return how far the two shapes are apart: 1 for the same aspect, 2 for twice as wide or high.

    A quotient of two integers is rounded once, so a turned image is exactly as far from a turned bucket.
    """
    one, other = bucket[0] * image[1], bucket[1] * image[0]
    return max(one, other) / min(one, other)
