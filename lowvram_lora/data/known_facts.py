"""What scans found in pictures, kept by content, so that the next scan decodes only what is new."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import PIL

from .dataset import digest_of
from .formats import decoders
from .measured import MeasuredStore, Row
from .pixels import MAX_IMAGE_PX, PictureFacts

# Raise it when the same picture would be found otherwise.
FORMAT_VERSION = 1

_FACTS = "facts"
_ANIMATED, _ALPHA = "animated", "alpha"
_WRITTEN = re.compile(rf"([1-9][0-9]{{0,8}})x([1-9][0-9]{{0,8}})( {_ANIMATED})?( {_ALPHA})?")


@dataclass(frozen=True)
class KnownFacts:
    """Facts by the digest of a picture's file. Only those of whole pictures: a damaged one is looked at each time.

    Attributes:
        old: rows that were read from disk.
        new: facts that were found since; threads may add to it.
    """

    old: Mapping[str, Row] = field(default_factory=dict)
    new: dict[str, Row] = field(default_factory=dict)

    def of(self, image_digest: str, inspect: Callable[[], PictureFacts]) -> PictureFacts:
        """Return what is known of a picture; if nothing is, what ``inspect`` finds.

        Raises:
            PathError: from ``inspect``.
        """
        facts = _from_text(self.old.get(image_digest, {}).get(_FACTS))
        if facts is None:
            facts = inspect()
            self.new[image_digest] = {_FACTS: _to_text(facts)}
        return facts


@contextmanager
def known_facts(store_root: Path | None) -> Iterator[KnownFacts]:
    """Give what is kept below ``store_root``, and keep what is new on every way out. None keeps nothing."""
    if store_root is None:
        yield KnownFacts()
        return
    # Another Pillow may refuse what this one takes, and so may this one without a decoder that another pack brought.
    store = MeasuredStore(store_root, digest_of("facts", FORMAT_VERSION, PIL.__version__, *decoders())[:16])
    facts = KnownFacts(store.everything())
    try:
        yield facts
    finally:
        if facts.new:
            store.add(facts.new)


def _to_text(facts: PictureFacts) -> str:
    height, width = facts.size_px
    return f"{height}x{width}" + f" {_ANIMATED}" * facts.is_animated + f" {_ALPHA}" * facts.has_alpha


def _from_text(text: object) -> PictureFacts | None:
    """Return the facts, or None for what is none: anybody may have written to the file."""
    match = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    height, width = int(match[1]), int(match[2])
    if height * width > MAX_IMAGE_PX:
        return None
    return PictureFacts((height, width), match[3] is not None, match[4] is not None)
