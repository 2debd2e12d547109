"""What a training run tells its caller, as frozen data: events while it lasts, and what remains of it."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """What a run used: byte counts by name, over its steps.

    Attributes:
        run: the output name the user gave.
        steps: steps measured.
        history: one sample a step, thinned to a bounded number.
        peak: the largest of each count over the whole run.
        average: the mean of each count.
        phases: the largest of each count in each phase of a step.
    """

    run: str
    steps: int
    history: tuple[dict[str, int], ...]
    peak: dict[str, int]
    average: dict[str, int]
    phases: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished run: the LoRA and what the nodes show about it.

    Attributes:
        seconds: spent in steps.
        validation: the loss on held-out pictures, by steps done; empty where none are held out.
        held_out: digest of these; empty where there are none.
    """

    fingerprint: str
    steps: int
    losses: tuple[float, ...]
    seconds: float
    precision: str
    num_layers: int
    num_parameters: int
    metadata: dict[str, str]
    memory: MemoryRecord
    lora: dict[str, Tensor] = field(repr=False)
    validation: tuple[tuple[int, float], ...] = ()
    held_out: str = ""


@dataclass(frozen=True)
class Planning:
    """Everything was checked; a plan is being made, which takes seconds. Not sent where nothing is to be planned."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """Step 1 comes next.

    Attributes:
        plan: how the run goes, in lines of text; empty on a host that needs none.
    """

    steps: int
    num_layers: int
    num_parameters: int
    precision: str
    plan: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Noted:
    """A sentence about the run that is known only while it lasts."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """Device memory ran out; ``step`` (1-based) is repeated with a plan that takes less.

    Attributes:
        cause: what the device said.
        plan: the new one, in lines of text.
    """

    step: int
    cause: str
    plan: str


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """One optimizer step is done.

    Attributes:
        alarm: a sentence if the step shows that the device's memory spills into RAM.
    """

    step: int
    steps: int
    loss: float
    learning_rate: float
    seconds_per_step: float
    remaining_s: float
    alarm: str = ""


@dataclass(frozen=True, kw_only=True)
class Validated:
    """Held-out pictures were looked at after ``done`` of ``steps`` steps."""

    done: int
    steps: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A LoRA file is on disk."""

    path: Path
    steps: int


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The run is complete; ``reused`` when its record was found and nothing was trained.

    Attributes:
        reading: what the tiers of the cache did, in lines of text.
    """

    record: Record
    path: Path
    reused: bool
    reading: tuple[str, ...] = ()


Event = Planning | Started | Noted | Validated | Stepped | Lowered | Saved | Finished
