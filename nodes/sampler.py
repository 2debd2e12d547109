"""Sparse Batch Sampler."""

from __future__ import annotations

from dataclasses import fields

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
            description="Chooses which samples make each batch; images of one shape go together.",
            inputs=[
                io.Custom("LOWVRAM_CACHE").Input("cache", tooltip="From Build Tiered Cache."),
                io.Int.Input(
                    "batch_size",
                    default=DEFAULTS["batch_size"],
                    min=1,
                    max=256,
                    tooltip="Samples in a batch. More needs more VRAM.",
                ),
                choice(
                    "strategy",
                    Strategy,
                    DEFAULTS["strategy"],
                    "shuffle draws a new order each epoch; ordered keeps that of the folder.",
                ),
                io.Int.Input(
                    "seed",
                    default=DEFAULTS["seed"],
                    min=0,
                    max=MAX_SEED,
                    control_after_generate=False,
                    tooltip="Decides the order of shuffle.",
                ),
            ],
            outputs=[
                io.Custom("LOWVRAM_BATCHES").Output("batches", display_name="batches"),
                io.String.Output("report", display_name="report"),
            ],
        )

    @classmethod
    def execute(cls, cache: CacheIndex, batch_size: int, strategy: Strategy, seed: int) -> io.NodeOutput:
        """Make the recipe."""
        recipe = BatchRecipe(cache, SamplerConfig(batch_size=batch_size, strategy=strategy, seed=seed))
        return reported(recipe, report=recipe.report(), node_id=cls.hidden.unique_id)
