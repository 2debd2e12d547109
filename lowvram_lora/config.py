"""Settings as frozen data. The only place where a default is written; nodes read them from here."""

import math
import unicodedata
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from .errors import ConfigError

Targets = Literal["attention", "attention + feed-forward", "all linear", "all linear + conv"]
Precision = Literal["auto", "bf16", "fp16", "fp32"]
Schedule = Literal["constant", "linear", "cosine"]
Strategy = Literal["shuffle", "ordered"]
CaptionExtension = Literal["auto", ".txt", ".caption"]

MAX_SEED = 2**64 - 1


def require(ok: bool, name: str, value: object, expected: str) -> None:
    """Raise ``ConfigError`` unless ``ok``."""
    if not ok:
        raise ConfigError(name, value, expected)


def _require_choice(name: str, value: object, choices: Any) -> None:
    """The host does not check the choice of an optional widget."""
    require(value in get_args(choices), name, value, "one of " + ", ".join(map(repr, get_args(choices))))


def _require_finite(name: str, value: float, minimum: float) -> None:
    require(math.isfinite(value) and value >= minimum, name, value, f"a number of at least {minimum:g}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What Load Dataset reads.

    Attributes:
        folder: as the user typed it.
        resolution: target area in pixels is ``resolution ** 2``.
        trigger_word: put in front of every caption that does not hold it; empty for none.
        caption_extension: ``auto`` prefers ``.txt``, then ``.caption``.
        bucket_step: width and height are multiples of this, in pixels.
        background: the colour under transparent pixels, ``#rrggbb``.
    """

    folder: str
    resolution: int = 512
    trigger_word: str = ""
    caption_extension: CaptionExtension = "auto"
    bucket_step: int = 64
    background: str = "#ffffff"

    def __post_init__(self) -> None:
        require(self.resolution >= 64, "resolution", self.resolution, "64 or more")
        is_text = all(unicodedata.category(letter) not in ("Cc", "Cs") for letter in self.trigger_word)
        require(is_text, "trigger_word", self.trigger_word, "plain text in one line")
        _require_choice("caption_extension", self.caption_extension, CaptionExtension)
        require(self.bucket_step in range(8, 257, 8), "bucket_step", self.bucket_step, "a multiple of 8, 8 to 256")
        colour = self.background.lstrip("#")
        is_colour = len(colour) == 6 and all(c in "0123456789abcdefABCDEF" for c in colour)
        require(is_colour, "background", self.background, "a colour like #ffffff")


@dataclass(frozen=True, kw_only=True)
class ComplexityConfig:
    """How Score Complexity weighs a sample's measures; each measure, and the score, is 0 to 1.

    Attributes:
        image_weight: of the picture's entropy.
        text_weight: of the caption's length.
        frequency_weight: of the picture's high-frequency energy.
        edge_weight: of the picture's edge density.
        colour_weight: of the picture's number of colours.
        percentile: replace each measure by the share of samples below it, before weighing.
        skip: measure nothing and give every sample the same score.
    """

    image_weight: float = 0.7
    text_weight: float = 0.3
    frequency_weight: float = 0.0
    edge_weight: float = 0.0
    colour_weight: float = 0.0
    percentile: bool = False
    skip: bool = False

    def __post_init__(self) -> None:
        names = ("image_weight", "text_weight", "frequency_weight", "edge_weight", "colour_weight")
        for name in names:
            _require_finite(name, getattr(self, name), 0.0)
        total = sum(getattr(self, name) for name in names)
        require(math.isfinite(total) and total > 0, " + ".join(names), total, "above 0 and finite")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How much of the cache Build Tiered Cache may hold in RAM, in MiB."""

    ram_cache_mb: int = 1024

    def __post_init__(self) -> None:
        require(self.ram_cache_mb >= 0, "ram_cache_mb", self.ram_cache_mb, "0 or more")


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How Sparse Batch Sampler draws batches."""

    batch_size: int = 1
    strategy: Strategy = "shuffle"
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, "batch_size", self.batch_size, "1 or more")
        _require_choice("strategy", self.strategy, Strategy)
        require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"0 to {MAX_SEED}")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The adapter. Its strength is ``alpha / rank`` (Hu et al., LoRA, arXiv:2106.09685)."""

    rank: int = 16
    alpha: float = 16.0
    targets: Targets = "attention + feed-forward"

    def __post_init__(self) -> None:
        require(self.rank >= 1, "rank", self.rank, "1 or more")
        require(math.isfinite(self.alpha) and self.alpha > 0, "alpha", self.alpha, "above 0")
        _require_choice("targets", self.targets, Targets)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) and its schedule.

    Attributes:
        accumulation: batches whose gradients make one step.
        max_grad_norm: gradients above this norm are scaled down to it; 0 turns clipping off.
    """

    learning_rate: float = 1e-4
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    weight_decay: float = 0.01
    accumulation: int = 1
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        usable = math.isfinite(self.learning_rate) and self.learning_rate > 0
        require(usable, "learning_rate", self.learning_rate, "above 0")
        _require_choice("schedule", self.schedule, Schedule)
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "0 or more")
        _require_finite("weight_decay", self.weight_decay, 0.0)
        require(self.accumulation >= 1, "gradient_accumulation", self.accumulation, "1 or more")
        _require_finite("max_grad_norm", self.max_grad_norm, 0.0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run.

    Attributes:
        steps: optimizer steps.
        precision: arithmetic of the network; adapters and optimizer are float32 always.
        recompute: blocks may run again in the backward pass instead of keeping their activations.
        vram_budget_gb: GiB of device memory the run may use; 0 takes what is free.
        output_name: file name in ``models/loras``, without its ending.
        overwrite: replace an existing file of that name instead of choosing the next free one.
        allow_lossy: where nothing else fits the budget, change the job: less precise optimizer state, smaller pictures.
    """

    steps: int = 500
    seed: int = 0
    precision: Precision = "auto"
    recompute: bool = True
    vram_budget_gb: float = 0.0
    output_name: str = "my_lora"
    overwrite: bool = False
    allow_lossy: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        require(self.steps >= 1, "steps", self.steps, "1 or more")
        require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"0 to {MAX_SEED}")
        _require_choice("precision", self.precision, Precision)
        _require_finite("vram_budget_gb", self.vram_budget_gb, 0.0)

    def determining(self) -> dict[str, Any]:
        """Return the settings that decide the trained numbers: all but the budget and where the file goes.

        What ``allow_lossy`` has led to is known only when there is a plan; it is added to a run's fingerprint there.
        """
        values = asdict(self)
        for name in ("vram_budget_gb", "output_name", "overwrite", "allow_lossy"):
            del values[name]
        return values
