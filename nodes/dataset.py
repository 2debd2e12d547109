"""Load Dataset."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from comfy_api.latest import io

from ..lowvram_lora.config import CaptionExtension, DataConfig
from ..lowvram_lora.data.scan import folder_fingerprint, report, scan
from ..lowvram_lora.errors import LowVramLoraError
from ._host import choice, dataset_roots, reported, schema

DEFAULTS = {field.name: field.default for field in fields(DataConfig)}
DatasetType = io.Custom("LOWVRAM_DATASET")


class LoadDataset(io.ComfyNode):
    """Reads a folder of images and captions."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's inputs and outputs."""
        return schema(
            node_id="LowVRAMLoadDataset",
            display_name="Load Dataset",
            description="Reads a folder of images and captions for LoRA training.",
            inputs=[
                io.String.Input(
                    "folder",
                    default="",
                    tooltip="A folder inside ComfyUI's input folder, or inside one listed under 'datasets:' in "
                    "extra_model_paths.yaml. Folders named 10_cat give 10 repeats.",
                ),
                io.Int.Input(
                    "resolution",
                    default=DEFAULTS["resolution"],
                    min=64,
                    max=4096,
                    step=64,
                    tooltip="Images are scaled to about this many pixels squared, each near its own shape.",
                ),
                io.String.Input(
                    "trigger_word",
                    default=DEFAULTS["trigger_word"],
                    tooltip="Put in front of every caption that does not hold it.",
                ),
                choice(
                    "caption_extension",
                    CaptionExtension,
                    DEFAULTS["caption_extension"],
                    "auto takes .txt, then .caption.",
                ),
                io.Int.Input(
                    "bucket_step",
                    default=DEFAULTS["bucket_step"],
                    min=8,
                    max=256,
                    step=8,
                    optional=True,
                    tooltip="Widths and heights are multiples of this.",
                ),
                io.String.Input(
                    "background",
                    default=DEFAULTS["background"],
                    optional=True,
                    tooltip="The colour under transparent pixels.",
                ),
            ],
            outputs=[
                DatasetType.Output("dataset", display_name="dataset"),
                io.String.Output("report", display_name="report"),
            ],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **widgets: Any) -> str:
        """Return text that changes with the folder's files. Widgets fed by a link are None here."""
        known = {name: value for name, value in widgets.items() if value is not None}
        roots = dataset_roots()
        try:
            files = folder_fingerprint(DataConfig(**{"folder": "", **known}), roots)
        except LowVramLoraError as error:
            files = str(error)  # execute raises it, where the user sees it
        return f"{files} {[str(root) for root in roots]}"

    @classmethod
    def execute(cls, **widgets: Any) -> io.NodeOutput:
        """Scan the folder."""
        dataset = scan(DataConfig(**widgets), dataset_roots())
        text = report(dataset)
        return reported(dataset, report=text, node_id=cls.hidden.unique_id)
