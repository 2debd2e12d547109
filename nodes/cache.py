"""Build Tiered Cache."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from comfy_api.latest import io

from ..lowvram_lora.config import CacheConfig, CacheProfile, CompressionChoice, ScalesChoice, SwitchChoice
from ..lowvram_lora.data.cache import build, generation, num_steps
from ..lowvram_lora.data.doctor import Intent, describe, foreseen
from ..lowvram_lora.data.profiles import plan_of
from ..lowvram_lora.data.scan import Dataset
from ..lowvram_lora.errors import LowVramLoraError, UnsupportedModelError
from ._encoders import HostClip, HostVae
from ._host import Progress, cache_root, choice, reported, schema
from ._text import window_of

DEFAULTS = {field.name: field.default for field in fields(CacheConfig)}


class BuildTieredCache(io.ComfyNode):
    """Encodes images and captions once and keeps them on disk, and in RAM while training."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's inputs and outputs."""
        return schema(
            node_id="LowVRAMBuildTieredCache",
            display_name="Build Tiered Cache",
            description="Encodes images with the VAE and captions with CLIP, once; only what changed is redone.",
            inputs=[
                io.Custom("LOWVRAM_DATASET").Input("dataset", tooltip="From Load Dataset or Score Complexity."),
                io.Vae.Input("vae", tooltip="Encodes the images: the VAE that belongs to the MODEL."),
                io.Clip.Input("clip", tooltip="Encodes the captions: the CLIP that belongs to the MODEL."),
                io.Int.Input(
                    "ram_cache_mb",
                    default=DEFAULTS["ram_cache_mb"],
                    min=-1,
                    max=1 << 20,
                    tooltip="How much of the cache training may hold in RAM; the rest is read from disk. "
                    "-1 leaves it to the profile.",
                ),
                choice(
                    "profile",
                    CacheProfile,
                    DEFAULTS["profile"],
                    "Defaults for what is left on auto or -1. balanced: long runs. disk only holds nothing in RAM. "
                    "aggressive: several sizes and dynamic precision. minimal: fast prototyping.",
                ),
                *_more_inputs(),
            ],
            outputs=[
                io.Custom("LOWVRAM_CACHE").Output("cache", display_name="cache"),
                io.String.Output("report", display_name="report"),
            ],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **widgets: Any) -> str:
        """Return text that changes when the cache was cleaned away."""
        try:
            return f"{generation(cache_root())} {sorted(widgets.items())}"
        except LowVramLoraError as error:
            return str(error)  # execute raises it, where the user sees it

    @classmethod
    def execute(cls, dataset: Dataset, vae: Any, clip: Any, **widgets: Any) -> io.NodeOutput:
        """Encode what is not on disk yet."""
        plan = plan_of(CacheConfig(**widgets))
        longer = foreseen(dataset.samples, Intent(text_window=window_of(_required(clip, "CLIP"))))
        codec, encoder = HostVae(_required(vae, "VAE")), HostClip(_required(clip, "CLIP"))
        progress = Progress(num_steps(dataset, plan), cls.hidden.unique_id)
        index, built = build(
            dataset, codec, encoder, cache_root(), lambda done, _total, text: progress.update(done, text), plan
        )
        report = "\n".join((str(built), *([describe(longer)] if longer else [])))
        return reported(index, report=report, node_id=cls.hidden.unique_id)


def _more_inputs() -> list[Any]:
    return [
        choice(
            "compression",
            CompressionChoice,
            DEFAULTS["compression"],
            "How images are kept: none in full, moderate at half precision, high in 8 bits.",
            optional=True,
        ),
        choice(
            "scales",
            ScalesChoice,
            DEFAULTS["scales"],
            "The sizes each image is encoded at, for a strategy that chooses among them.",
            optional=True,
        ),
        choice(
            "dynamic_precision",
            SwitchChoice,
            DEFAULTS["dynamic_precision"],
            "Read simple images at less precision while the run is young. Needs Score Complexity.",
            optional=True,
        ),
        _score("half_below", "Dynamic precision: images that score below this are read at half precision."),
        _score("full_above", "Dynamic precision: images that score this or more are always read in full."),
        choice(
            "predictive",
            SwitchChoice,
            DEFAULTS["predictive"],
            "Read the next batch from disk while a step runs.",
            optional=True,
        ),
        io.Float.Input(
            "disk_limit_gb",
            default=DEFAULTS["disk_limit_gb"],
            min=0.0,
            max=1e6,
            step=1.0,
            round=0.001,
            optional=True,
            tooltip="GiB that the cache of all datasets may take on disk; 0 is no limit. What was not used for the "
            "longest time is removed, never what this dataset needs.",
        ),
    ]


def _score(name: str, tooltip: str) -> Any:
    return io.Float.Input(
        name,
        default=DEFAULTS[name],
        min=-1.0,
        max=1.0,
        step=0.05,
        round=0.001,
        optional=True,
        tooltip=f"{tooltip} -1 is the usual.",
    )


def _required(part: Any, name: str) -> Any:
    # Where a checkpoint holds no VAE, the host hands on an empty one.
    if part is None or getattr(part, "first_stage_model", part) is None:
        raise UnsupportedModelError(f"This checkpoint has no {name}.", f"Load one with Load {name} and connect it.")
    return part
