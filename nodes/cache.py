"""Build Tiered Cache."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from comfy_api.latest import io

from ..lowvram_lora.config import CacheConfig
from ..lowvram_lora.data.cache import build, generation, num_steps
from ..lowvram_lora.data.scan import Dataset
from ..lowvram_lora.errors import LowVramLoraError, UnsupportedModelError
from ..lowvram_lora.units import MIB
from ._host import Progress, cache_root, reported, schema
from ._models import HostClip, HostVae

DEFAULTS = {field.name: field.default for field in fields(CacheConfig)}
BALANCED = "balanced"
DISK_ONLY = "disk only"


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
                    min=0,
                    max=1 << 20,
                    tooltip="How much of the cache training may hold in RAM; the rest is read from disk.",
                ),
                io.Combo.Input(
                    "profile",
                    options=[BALANCED, DISK_ONLY],
                    default=BALANCED,
                    tooltip="disk only holds nothing in RAM.",
                ),
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
    def execute(cls, dataset: Dataset, vae: Any, clip: Any, ram_cache_mb: int, profile: str) -> io.NodeOutput:
        """Encode what is not on disk yet."""
        config = CacheConfig(ram_cache_mb=0 if profile == DISK_ONLY else ram_cache_mb)
        codec, encoder = HostVae(_required(vae, "VAE")), HostClip(_required(clip, "CLIP"))
        progress = Progress(num_steps(dataset), cls.hidden.unique_id)
        index, built = build(
            dataset,
            codec,
            encoder,
            cache_root(),
            lambda done, _total, text: progress.update(done, text),
            config.ram_cache_mb * MIB,
        )
        return reported(index, report=str(built), node_id=cls.hidden.unique_id)


def _required(part: Any, name: str) -> Any:
    # Where a checkpoint holds no VAE, the host hands on an empty one.
    if part is None or getattr(part, "first_stage_model", part) is None:
        raise UnsupportedModelError(f"This checkpoint has no {name}.", f"Load one with Load {name} and connect it.")
    return part
