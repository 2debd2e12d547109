"""What Load Dataset shows of a dataset before anything is encoded: the doctor's findings and a contact sheet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import PathError
from .contact import contact_sheet, legend
from .dataset import Dataset
from .doctor import Intent, describe, examine
from .likeness import Likeness
from .measuring import LIKENESS, OnProgress, likenesses, measure, no_progress

MAX_SHOWN = 12


@dataclass(frozen=True, eq=False)
class Examination:
    """The doctor's report and its contact sheet.

    Attributes:
        picture: RGB ``[H, W, 3]``: the first samples, with number, bucket and score.
    """

    text: str
    picture: npt.NDArray[np.uint8]


def examination(
    dataset: Dataset,
    store_root: Path | None = None,
    on_progress: OnProgress = no_progress,
    intent: Intent | None = None,
) -> Examination:
    """Look at every picture of ``dataset``, and return what there is to put right.

    A picture that can't be read any more only leaves near-duplicates unfound; who needs it will say so.

    Args:
        store_root: where measures are kept by content; None keeps nothing.
        on_progress: as for ``measuring.measure``.
        intent: what is known of the training to come.
    """
    pictures: list[Likeness] | None = None
    note = ""
    try:
        pictures = likenesses(measure(dataset, [LIKENESS], store_root, on_progress))
    except PathError as error:
        note = f"\nNear-duplicates were not looked for: {error}"
    shown = dataset.samples[:MAX_SHOWN]
    lines = [describe(examine(dataset, intent, pictures)) + note, "On the picture:", *legend(shown)]
    return Examination("\n".join(lines), contact_sheet(shown, dataset.config.background))
