"""Every error the pack raises on purpose.

    LowVramLoraError
    ├── ConfigError            field, value, expected
    ├── PathError              path, reason: a file or folder that can't be used
    ├── ListedProblemsError    problems: all of them, not only the first
    │   ├── DatasetError       what was found in the folder instead of usable images
    │   └── PreflightError     everything found wrong before step 1
    ├── CacheMissError         name: a cached encoding that is gone from disk
    ├── BudgetError            budget, needed, refusals: the job does not fit into the device memory it may use
    ├── UnsupportedModelError  what, remedy: a part of MODEL, CLIP or VAE that can't be trained with
    ├── NothingToTrainError    targets: a preset that matched no layer
    ├── OutOfMemoryError       step, cause, kept: device memory ran out where nothing takes less
    └── DivergedError          step, cause, kept: the loss or the gradients are no usable numbers any more

A message says what happened, the value, what was expected and what to do; the fields carry the same as data.
"""

from collections.abc import Sequence


class LowVramLoraError(Exception):
    """Base of every error raised on purpose by this pack."""


class ConfigError(LowVramLoraError, ValueError):
    """A setting outside its range."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field} is {value!r}; it must be {expected}. Change it on the node and queue again.")
        self.field = field
        self.value = value
        self.expected = expected


class PathError(LowVramLoraError):
    """A file or folder that can't be read or written, or lies outside the allowed folders."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason


class ListedProblemsError(LowVramLoraError):
    """An error that carries every problem found, not only the first."""

    heading = "Problems found:"

    def __init__(self, problems: Sequence[str]) -> None:
        listed = "\n".join(f"- {problem}" for problem in problems)
        super().__init__(f"{self.heading}\n{listed}")
        self.problems = tuple(problems)


class DatasetError(ListedProblemsError):
    """A folder without a single usable image."""

    heading = "No usable image was found."


class PreflightError(ListedProblemsError):
    """Everything that would make a training run fail, found before step 1."""

    heading = "Training did not start:"


class CacheMissError(LowVramLoraError):
    """A cached encoding that is no longer on disk."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The cached encoding of {name} is gone from disk. Queue again: Build Tiered Cache will rebuild it."
        )
        self.name = name


class BudgetError(LowVramLoraError):
    """A job that does not fit into the device memory it may use.

    Attributes:
        budget: bytes.
        needed: the smallest budget in which it fits, in bytes; None where that is not the question.
        refusals: techniques that would take less, each with the reason why it is not used.
    """

    def __init__(
        self,
        problem: str,
        remedy: str,
        *,
        budget: int,
        needed: int | None,
        refusals: Sequence[tuple[str, str]] = (),
    ) -> None:
        reasons = "; ".join(f"{technique} ({reason})" for technique, reason in refusals)
        super().__init__(f"{problem} {remedy}" + (f" Not used: {reasons}." if reasons else ""))
        self.budget = budget
        self.needed = needed
        self.refusals = tuple(refusals)
        self.remedy = remedy


class UnsupportedModelError(LowVramLoraError):
    """A part of MODEL, CLIP or VAE that training can't honour."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what} {remedy}")
        self.what = what
        self.remedy = remedy


class NothingToTrainError(LowVramLoraError):
    """A target preset that matched no layer of the model."""

    def __init__(self, targets: str, num_layers: int) -> None:
        super().__init__(
            f"The targets '{targets}' matched none of the model's {num_layers} trainable layers. "
            "Choose 'all linear' on LoRA Train (low-VRAM)."
        )
        self.targets = targets


class DivergedError(LowVramLoraError):
    """Training stopped because the loss or the gradients are no longer numbers."""

    def __init__(self, step: int, cause: str, kept: str) -> None:
        super().__init__(
            f"Training stopped at step {step}: {cause}. {kept} "
            "Lower learning_rate, or choose precision bf16 or fp32 if this was fp16."
        )
        self.step = step
        self.cause = cause
        self.kept = kept


class OutOfMemoryError(LowVramLoraError):
    """Device memory ran out, and no plan takes less."""

    def __init__(self, step: int, cause: str, kept: str) -> None:
        super().__init__(
            f"Device memory ran out at step {step}, on the plan that takes least ({cause}). {kept} Lower resolution on "
            "Load Dataset, or rank on LoRA Train (low-VRAM), or close what else uses the card."
        )
        self.step = step
        self.cause = cause
        self.kept = kept
