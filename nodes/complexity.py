"""Score Complexity."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from comfy_api.latest import io

from ..lowvram_lora.config import ComplexityConfig
from ..lowvram_lora.data.complexity import report, score
from ..lowvram_lora.data.overview import overview
from ..lowvram_lora.data.scan import Dataset
from ._host import Progress, measures_root, reported, schema

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
            description="Scores each sample, 0 to 1, by measures of its image and its caption's length.",
            inputs=[
                DatasetType.Input("dataset", tooltip="From Load Dataset."),
                _weight("image_weight", "Weight of the image's entropy, 0 (one flat colour) to 1.", optional=False),
                _weight("text_weight", "Weight of the caption's length against the longest one.", optional=False),
                _weight("frequency_weight", "Weight of the image's high-frequency energy: fine texture and noise."),
                _weight("edge_weight", "Weight of the share of the image that is edges."),
                _weight("colour_weight", "Weight of the image's number of colours."),
                io.Boolean.Input(
                    "percentile",
                    default=DEFAULTS["percentile"],
                    optional=True,
                    tooltip="Measure each image and caption by its rank in this dataset, which spreads the scores.",
                ),
                io.Boolean.Input(
                    "skip",
                    default=DEFAULTS["skip"],
                    optional=True,
                    tooltip="For a quick try: read no image and give every sample the same score.",
                ),
            ],
            outputs=[
                DatasetType.Output("scored", display_name="dataset"),
                io.String.Output("report", display_name="report"),
                io.Image.Output("picture", display_name="picture"),
            ],
        )

    @classmethod
    def execute(cls, dataset: Dataset, **widgets: Any) -> io.NodeOutput:
        """Score every sample."""
        progress = Progress(len(dataset.samples), cls.hidden.unique_id)
        scored = score(
            dataset,
            ComplexityConfig(**widgets),
            measures_root(),
            lambda done, _total, text: progress.update(done, text),
        )
        return reported(scored, report=report(scored), node_id=cls.hidden.unique_id, picture=overview(scored))


def _weight(name: str, tooltip: str, optional: bool = True) -> Any:
    return io.Float.Input(name, default=DEFAULTS[name], min=0.0, max=1.0, step=0.05, tooltip=tooltip, optional=optional)
