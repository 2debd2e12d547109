"""Score Complexity."""

from __future__ import annotations

from dataclasses import fields

from comfy_api.latest import io

from ..lowvram_lora.config import ComplexityConfig
from ..lowvram_lora.data.complexity import report, score
from ..lowvram_lora.data.scan import Dataset
from ._host import reported, schema

DEFAULTS = {field.name: field.default for field in fields(ComplexityConfig)}
DatasetType = io.Custom("LOWVRAM_DATASET")


class ScoreComplexity(io.ComfyNode):
    """Scores how much there is to learn in each sample."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's inputs and outputs."""
        return schema(
            node_id="LowVRAMScoreComplexity",
            display_name="Score Complexity",
            description="Scores each sample by its image's entropy and its caption's length.",
            inputs=[
                DatasetType.Input("dataset", tooltip="From Load Dataset."),
                io.Float.Input(
                    "image_weight",
                    default=DEFAULTS["image_weight"],
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    tooltip="Weight of the image's entropy, 0 (one flat colour) to 1.",
                ),
                io.Float.Input(
                    "text_weight",
                    default=DEFAULTS["text_weight"],
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    tooltip="Weight of the caption's length against the longest one.",
                ),
            ],
            outputs=[
                DatasetType.Output("scored", display_name="dataset"),
                io.String.Output("report", display_name="report"),
            ],
        )

    @classmethod
    def execute(cls, dataset: Dataset, image_weight: float, text_weight: float) -> io.NodeOutput:
        """Score every sample."""
        scored = score(dataset, ComplexityConfig(image_weight=image_weight, text_weight=text_weight))
        text = report(scored)
        return reported(scored, report=text, node_id=cls.hidden.unique_id)
