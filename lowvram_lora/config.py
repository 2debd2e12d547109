"""Settings as frozen data. The only place where a default is written; nodes read them from here."""

import math
import unicodedata
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from .errors import ConfigError

Targets = Literal["attention", "attention + feed-forward", "all linear", "all linear + conv"]
Precision = Literal["auto", "bf16", "fp16", "fp32"]
Schedule = Literal["constant", "linear", "cosine"]
Strategy = Literal["shuffle", "ordered", "sparse", "bucketed", "sequential", "random", "curriculum"]
CaptionExtension = Literal["auto", ".txt", ".caption"]
MissingCaptions = Literal["trigger word", "empty", "folder name", "skip"]
Masks = Literal["none", "alpha", "folder"]
CacheProfile = Literal["balanced", "disk only", "aggressive", "minimal"]
CompressionChoice = Literal["auto", "none", "moderate", "high"]
ScalesChoice = Literal["auto", "full", "full, 3/4", "full, 3/4, 1/2"]
SwitchChoice = Literal["auto", "on", "off"]

# Endings that are never those of captions.
_IMAGES = ("png", "jpg", "jpeg", "jfif", "webp", "bmp", "gif", "avif", "tif", "tiff", "heic", "heif", "jxl")

AUTO = "auto"
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


def _require_between(name: str, value: float, low: float, high: float) -> None:
    require(low <= value <= high, name, value, f"{low:g} to {high:g}")


def _is_one_line(text: str) -> bool:
    return all(unicodedata.category(letter) not in ("Cc", "Cs") for letter in text)


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
        custom_extension: an ending that is looked for before ``caption_extension``, with or without its dot.
        missing_captions: what an image without a caption trains on; ``folder name`` gets the trigger word too.
        caption_variants: captions encoded for each image; the first is the caption as written. More only where tags are
            shuffled or dropped. All captions that were given are kept, also beyond this number.
        shuffle_tags, tag_dropout: what makes the variants of a caption: its comma-separated tags in another order, each
            left out with this probability.
        keep_tags: so many leading tags stay where they are and are never left out.
        caption_dropout: share of draws in training, 0 to 1, that see the empty caption; never baked into the cache.
        max_aspect: the long side of a bucket is at most so many times the short one.
        min_side, max_side: limits of a bucket's sides in pixels; 0 for none.
        upscale: whether an image smaller than its bucket is scaled up; if not, it gets a bucket of its own size.
        repeats: times each image is seen in an epoch, on top of the numbers in folder names.
        image_variants: encoded variants of each image; the first is the plain one. More only with ``flip``,
            ``random_crop`` or ``colour_jitter``.
        colour_jitter: brightness, contrast and saturation of a variant are off by at most this share.
        variant_seed: decides the variants of images and captions.
        masks: where the weights of the loss come from: nowhere, the image's alpha, or a folder ``masks`` beside it.
        validation_share: share of the images that is held out, chosen by content.
    """

    folder: str
    resolution: int = 512
    trigger_word: str = ""
    caption_extension: CaptionExtension = "auto"
    bucket_step: int = 64
    background: str = "#ffffff"
    custom_extension: str = ""
    missing_captions: MissingCaptions = "trigger word"
    caption_variants: int = 1
    shuffle_tags: bool = False
    tag_dropout: float = 0.0
    keep_tags: int = 0
    caption_dropout: float = 0.0
    max_aspect: float = 3.0
    min_side: int = 0
    max_side: int = 0
    upscale: bool = True
    repeats: int = 1
    image_variants: int = 1
    flip: bool = False
    random_crop: bool = False
    colour_jitter: float = 0.0
    variant_seed: int = 0
    masks: Masks = "none"
    validation_share: float = 0.0

    def __post_init__(self) -> None:
        require(self.resolution >= 64, "resolution", self.resolution, "64 or more")
        require(_is_one_line(self.trigger_word), "trigger_word", self.trigger_word, "plain text in one line")
        require(self.bucket_step in range(8, 257, 8), "bucket_step", self.bucket_step, "a multiple of 8, 8 to 256")
        colour = self.background.lstrip("#")
        is_colour = len(colour) == 6 and all(c in "0123456789abcdefABCDEF" for c in colour)
        require(is_colour, "background", self.background, "a colour like #ffffff")
        self._check_captions()
        self._check_buckets()
        self._check_variants()
        _require_choice("masks", self.masks, Masks)
        _require_between("validation_share", self.validation_share, 0.0, 0.5)

    def _check_captions(self) -> None:
        _require_choice("caption_extension", self.caption_extension, CaptionExtension)
        ending = self.custom_extension
        is_ending = _is_one_line(ending) and len(ending) <= 32 and not set(ending) & set('/\\:*?"<>|')
        require(is_ending, "custom_extension", ending, "the ending of a file name, like .tags")
        is_image = ending.strip().lower().lstrip(".") in _IMAGES
        require(not is_image, "custom_extension", ending, "an ending of text files")
        _require_choice("missing_captions", self.missing_captions, MissingCaptions)
        _require_between("caption_variants", self.caption_variants, 1, 32)
        _require_between("tag_dropout", self.tag_dropout, 0.0, 0.9)
        _require_between("keep_tags", self.keep_tags, 0, 1000)
        _require_between("caption_dropout", self.caption_dropout, 0.0, 1.0)

    def _check_buckets(self) -> None:
        _require_between("max_aspect", self.max_aspect, 1.0, 16.0)
        for name, side in (("min_side", self.min_side), ("max_side", self.max_side)):
            require(side >= 0, name, side, "0 or more")
        allowed = not self.max_side or self.max_side >= self.min_side
        require(allowed, "max_side", self.max_side, f"0 or at least min_side, {self.min_side}")
        _require_between("repeats", self.repeats, 1, 1000)

    def _check_variants(self) -> None:
        _require_between("image_variants", self.image_variants, 1, 16)
        _require_between("colour_jitter", self.colour_jitter, 0.0, 0.5)
        require(0 <= self.variant_seed <= MAX_SEED, "variant_seed", self.variant_seed, f"0 to {MAX_SEED}")


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
        usable = self.skip or (math.isfinite(total) and total > 0)
        require(usable, " + ".join(names), total, "above 0 and finite")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What Build Tiered Cache does. ``auto`` and -1 leave it to the profile; anything else wins over it.

    Attributes:
        ram_cache_mb: MiB that encodings may take in RAM while training; -1 is the profile's.
        profile: a set of defaults; ``disk only`` holds nothing in RAM whatever ``ram_cache_mb`` says.
        compression: how latents are kept on disk: in full, at half precision, or in 8 bits.
        scales: the sizes that are encoded of each picture, in parts of its bucket.
        dynamic_precision: read simple samples at less precision while the run is young.
        half_below, full_above: thresholds of dynamic precision, scores of 0 to 1; -1 is the usual one.
        predictive: read the next batch from disk into RAM while a step runs.
        disk_limit_gb: GiB that the whole cache may take on disk; 0 is no limit. Encodings that were not used for the
            longest time are removed first, those of this dataset never.
    """

    ram_cache_mb: int = -1
    profile: CacheProfile = "balanced"
    compression: CompressionChoice = "auto"
    scales: ScalesChoice = "auto"
    dynamic_precision: SwitchChoice = "auto"
    half_below: float = -1.0
    full_above: float = -1.0
    predictive: SwitchChoice = "auto"
    disk_limit_gb: float = 0.0

    def __post_init__(self) -> None:
        require(self.ram_cache_mb >= -1, "ram_cache_mb", self.ram_cache_mb, "0 or more, or -1 for the profile's")
        _require_choice("profile", self.profile, CacheProfile)
        _require_choice("compression", self.compression, CompressionChoice)
        _require_choice("scales", self.scales, ScalesChoice)
        _require_choice("dynamic_precision", self.dynamic_precision, SwitchChoice)
        _require_choice("predictive", self.predictive, SwitchChoice)
        for name in ("half_below", "full_above"):
            value = getattr(self, name)
            require(value == -1.0 or 0.0 <= value <= 1.0, name, value, "0 to 1, or -1 for the usual")
        above = self.full_above
        allowed = above < 0 or self.half_below <= above
        require(allowed, "half_below", self.half_below, f"at most full_above, {above:g}")
        _require_finite("disk_limit_gb", self.disk_limit_gb, 0.0)


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How Sparse Batch Sampler draws batches.

    Attributes:
        batch_size: samples in a batch; with ``adaptive_batch`` the least that a full batch holds. 0 is the preset for
            the pictures' resolution, see ``data.tokens.PRESETS``.
        strategy: ``shuffle`` and ``ordered`` keep to batches of one latent shape; for the others see ``data.epochs``.
        adaptive_batch: a batch holds 1 to 4 x ``batch_size`` samples: as many of their size as fit into device memory,
            or where there is none, as have the tokens of ``batch_size`` of the dearest.
    """

    batch_size: int = 1
    strategy: Strategy = "shuffle"
    seed: int = 0
    adaptive_batch: bool = False

    def __post_init__(self) -> None:
        require(self.batch_size >= 0, "batch_size", self.batch_size, "1 or more, or 0 for the preset")
        _require_choice("strategy", self.strategy, Strategy)
        require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"0 to {MAX_SEED}")
        counts = self.adaptive_batch and self.strategy == "ordered"
        require(not counts, "adaptive_batch", True, "off with the strategy 'ordered'; 'sequential' can do it")


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
class AttentionLimit:
    """Where self-attention sees a window of the picture instead of all of it.

    Attributes:
        tokens: a picture of so many tokens is still seen whole.
        window: tokens a side.
    """

    tokens: int
    window: int


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
        local_attention_tokens: above so many tokens of the picture, self-attention is limited to windows; 0 never.
        local_attention_window: tokens a side of a window.
        dynamic_text: leave out the padding behind a caption also where the network takes no mask and sees the padding.
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
    local_attention_tokens: int = 0
    local_attention_window: int = 32
    dynamic_text: bool = False

    def __post_init__(self) -> None:
        require(self.steps >= 1, "steps", self.steps, "1 or more")
        require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"0 to {MAX_SEED}")
        _require_choice("precision", self.precision, Precision)
        _require_finite("vram_budget_gb", self.vram_budget_gb, 0.0)
        tokens, window = self.local_attention_tokens, self.local_attention_window
        require(tokens >= 0, "local_attention_tokens", tokens, "0 or more")
        require(window >= 1, "local_attention_window", window, "1 or more")

    @property
    def attention_limit(self) -> AttentionLimit | None:
        """Where self-attention is limited, or None where it never is."""
        if not self.local_attention_tokens:
            return None
        return AttentionLimit(tokens=self.local_attention_tokens, window=self.local_attention_window)

    def determining(self) -> dict[str, Any]:
        """Return the settings that decide the trained numbers: all but the budget and where the file goes.

        What ``allow_lossy`` has led to is known only when there is a plan; it is added to a run's fingerprint there.
        """
        values = asdict(self)
        for name in ("vram_budget_gb", "output_name", "overwrite", "allow_lossy"):
            del values[name]
        # What is off leaves a run what it was before there was such a choice.
        if self.attention_limit is None:
            del values["local_attention_tokens"], values["local_attention_window"]
        if not self.dynamic_text:
            del values["dynamic_text"]
        return values
