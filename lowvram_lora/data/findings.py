"""What the dataset doctor finds, as data and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .dataset import name_some

Kind = Literal[
    "unusable files",
    "tiny images",
    "resolution above the images",
    "near-duplicates",
    "captions missing",
    "captions identical",
    "captions too long",
    "thin buckets",
    "batch larger than a bucket",
    "too few images for the steps",
    "too many images for the steps",
]

_MAX_GROUPS = 10


@dataclass(frozen=True)
class Group:
    """Files with the same fault.

    Attributes:
        label: what they have in common; empty where there is no more to say.
    """

    label: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """One kind of fault.

    Attributes:
        sentence: what is wrong and what to do.
        groups: the files that have it; empty where no file is to blame.
    """

    kind: Kind
    sentence: str
    groups: tuple[Group, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The files of all groups."""
        return tuple(name for group in self.groups for name in group.names)


def describe(findings: Sequence[Finding]) -> str:
    """Return the doctor's report: every finding, with its first files by name."""
    if not findings:
        return "Dataset doctor: nothing to put right."
    return "\n".join((f"Dataset doctor, {len(findings)} to look at:", *_lines(findings)))


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"- {finding.kind}: {finding.sentence}"
        for group in finding.groups[:_MAX_GROUPS]:
            yield "    " + ": ".join(part for part in (group.label, name_some(group.names)) if part)
        if len(finding.groups) > _MAX_GROUPS:
            yield f"    and {len(finding.groups) - _MAX_GROUPS} more groups"


def quoted(text: str, limit: int = 120) -> str:
    """Return the beginning of ``text`` in quotes, in one line."""
    line = " ".join(text.split())
    return f"'{line}'" if len(line) <= limit else f"'{line[:limit]}...'"
