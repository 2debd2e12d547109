"""Variants of a caption: its comma-separated tags in another order, or some of them left out."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from ..config import DataConfig

_SEPARATOR = re.compile(r"[,，]")


def caption_variants(written: Sequence[str], image_digest: str, config: DataConfig) -> tuple[str, ...]:
    """Return the captions to encode for one image, without the trigger word: first those that were written.

    Where tags are shuffled or dropped, variants of them follow up to ``config.caption_variants``, each drawn from the
    seed, the image's content and its number. Variants that are equal count once.
    """
    wanted = config.caption_variants if config.shuffle_tags or config.tag_dropout else 0
    drawn = (
        _varied(written[number % len(written)], f"{config.variant_seed}/{image_digest}/{number}", config)
        for number in range(len(written), wanted)
    )
    return tuple(dict.fromkeys((*written, *drawn)))


def _varied(caption: str, seed: str, config: DataConfig) -> str:
    # Text seeds are hashed by Python itself, the same on every version and machine.
    source = random.Random(seed)
    tags = [tag for tag in map(str.strip, _SEPARATOR.split(caption)) if tag]
    kept, free = tags[: config.keep_tags], tags[config.keep_tags :]
    left = [tag for tag in free if source.random() >= config.tag_dropout]
    if not kept and not left and free:
        # The empty caption is for caption dropout to choose.
        left = [source.choice(free)]
    if config.shuffle_tags:
        source.shuffle(left)
    return ", ".join((*kept, *left))
