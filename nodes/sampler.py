"""Sparse Batch Sampler."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from comfy_api.latest import io

from ..lowvram_lora.config import MAX_SEED, SamplerConfig, Strategy
from ..lowvram_lora.data.batches import BatchRecipe
from ..lowvram_lora.data.cache import CacheIndex
from ._host import choice, reported, schema

DEFAULTS = {field.name: field.default for field in fields(SamplerConfig)}


class SparseBatchSampler(io.ComfyNode):
    """Chooses which samples make each batch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's inputs and outputs."""
        return schema(
            node_id="LowVRAMSparseBatchSampler",
            display_name="Sparse Batch Sampler",
            description="Chooses which samples make each batch.",
            inputs=[
                io.Custom("LOWVRAM_CACHE").Input("cache", tooltip="From Build Tiered Cache."),
                io.Int.Input(
                    "batch_size",
                    default=DEFAULTS["batch_size"],
                    min=0,
                    max=256,
                    tooltip="Samples in a batch. More needs more VRAM. 0 is the preset for the pictures' resolution: "
                    "8 up to 512, 4 up to 768, 2 up to 1024, else 1.",
                ),
                choice(
                    "strategy",
                    Strategy,
                    DEFAULTS["strategy"],
                    "shuffle and bucketed: batches of one shape in a new order each epoch. ordered: as in the folder. "
                    "sparse: hard samples first, each with unlike ones. curriculum: from simple to hard.",
                ),
                io.Int.Input(
                    "seed",
                    default=DEFAULTS["seed"],
                    min=0,
                    max=MAX_SEED,
                    control_after_generate=False,
                    tooltip="Decides all that is random.",
                ),
                io.Boolean.Input(
                    "adaptive_batch",
                    default=DEFAULTS["adaptive_batch"],
                    optional=True,
                    tooltip="Let LoRA Train make batches larger, up to 4 x batch_size, for each size of picture: as "
                    "many as fit into its VRAM budget at no sample's cost. Without VRAM to plan: by tokens.",
                ),
            ],
            outputs=[
                io.Custom("LOWVRAM_BATCHES").Output("batches", display_name="batches"),
                io.String.Output("report", display_name="report"),
            ],
        )

    @classmethod
    def execute(cls, cache: CacheIndex, **widgets: Any) -> io.NodeOutput:
        """Make the recipe."""
        recipe = BatchRecipe(cache, SamplerConfig(**widgets))
        return reported(recipe, report=recipe.report(), node_id=cls.hidden.unique_id)
