"""The dataset doctor on captions: missing, the same again, or longer than the text encoder reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ..units import counted
from .dataset import Dataset, Sample
from .findings import Finding, Group, quoted
from .text_window import TextWindow


def missing(dataset: Dataset) -> Iterator[Finding]:
    """Find images that train on nothing but the trigger word, or on no word."""
    trigger = dataset.config.trigger_word.strip()
    names = [sample.name for sample in dataset.samples if _is_bare(sample, trigger)]
    if names:
        trained_on = f"'{trigger}' alone" if trigger else "the empty prompt"
        yield Finding(
            "captions missing",
            f"{len(names)} of {counted(len(dataset.samples), 'image has', 'images have')} no words and train on "
            f"{trained_on}: whatever they show is learned as part of it. Write what should stay free to change.",
            (Group("", tuple(names)),),
        )


def identical(dataset: Dataset) -> Iterator[Finding]:
    """Find images that share all their words with another."""
    trigger = dataset.config.trigger_word.strip()
    by_words: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for sample in dataset.samples:
        if not _is_bare(sample, trigger):
            by_words[sample.captions].append(sample.name)
    groups = [Group(quoted(words[0]), tuple(names)) for words, names in by_words.items() if len(names) > 1]
    if groups:
        num_images = sum(len(group.names) for group in groups)
        yield Finding(
            "captions identical",
            f"{num_images} images share their caption with another, so the words can't tell them apart. Say in each "
            "what is different; for a style or one subject, one caption for all can be meant.",
            tuple(groups),
        )


def too_long(samples: Sequence[Sample], window: TextWindow | None) -> Iterator[Finding]:
    """Find captions that don't fit into the text encoder's window, and what is beyond it."""
    if window is None:
        return
    groups = [group for sample in samples for group in _beyond(sample, window)]
    if not groups:
        return
    longer = (
        f"{counted(len(groups), 'caption is', 'captions are')} longer than the {window.num_tokens} tokens that the "
    )
    sentence = longer + (_in_parts(window) if window.is_chunked else "text encoder reads: the rest is cut. ")
    sentence += "Put what matters first, or shorten."
    yield Finding("captions too long", sentence, tuple(groups))


def _in_parts(window: TextWindow) -> str:
    unlimited = f" ({', '.join(window.unlimited)} at once)" if window.unlimited else ""
    return (
        f"text encoder reads at once. All is read here{unlimited}, in several parts, but the summary of a caption that "
        "models such as SDXL and Flux use beside its words is made of the first part alone, and another program may "
        "leave the rest out. "
    )


def _beyond(sample: Sample, window: TextWindow) -> Iterator[Group]:
    for caption in sample.captions:
        num_tokens, rest = window.left_over(caption)
        if num_tokens > window.num_tokens:
            about = "" if window.is_exact else "about "
            yield Group(f"{about}{num_tokens} tokens, beyond the window is {quoted(rest)}", (sample.name,))


def _is_bare(sample: Sample, trigger: str) -> bool:
    return all(caption.strip() in ("", trigger) for caption in sample.captions)
