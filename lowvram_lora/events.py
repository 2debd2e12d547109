"""What a training run tells its caller, one frozen record at a time."""

from dataclasses import dataclass
from pathlib import Path

from .training.record import Record


@dataclass(frozen=True, kw_only=True)
class Started:
    """Everything was checked; step 1 comes next."""

    steps: int
    num_layers: int
    num_parameters: int
    precision: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """One optimizer step is done."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    seconds_per_step: float
    remaining_s: float


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A LoRA file is on disk."""

    path: Path
    steps: int


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The run is complete; ``reused`` when its record was found and nothing was trained."""

    record: Record
    path: Path
    reused: bool


Event = Started | Stepped | Saved | Finished
