"""Load Dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from comfy_api.latest import io

from ..lowvram_lora.config import MAX_SEED, CaptionExtension, DataConfig, Masks, MissingCaptions, require
from ..lowvram_lora.data.doctor import Intent
from ..lowvram_lora.data.examination import examination
from ..lowvram_lora.data.image_input import captions_for, write_images
from ..lowvram_lora.data.scan import folder_fingerprint, report, scan
from ..lowvram_lora.errors import LowVramLoraError
from ._host import Progress, choice, dataset_roots, images_root, measures_root, reported, schema
from ._text import window_of

DEFAULTS = {field.name: field.default for field in fields(DataConfig)}
DatasetType = io.Custom("LOWVRAM_DATASET")


class LoadDataset(io.ComfyNode):
    """Reads a folder of images and captions, or images from other nodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's inputs and outputs."""
        return schema(
            node_id="LowVRAMLoadDataset",
            display_name="Load Dataset",
            description="Reads a folder of images and captions for LoRA training.",
            inputs=[*_first(), *_from_nodes(), *_captions(), *_sizes(), *_variants(), *_plans()],
            outputs=[
                DatasetType.Output("dataset", display_name="dataset"),
                io.String.Output("report", display_name="report"),
                io.Image.Output("picture", display_name="picture"),
            ],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **widgets: Any) -> str:
        """Return text that changes with the folder's files. Widgets fed by a link are None here."""
        known = {name: value for name, value in widgets.items() if value is not None and name in DEFAULTS}
        roots = dataset_roots()
        try:
            files = folder_fingerprint(DataConfig(**{"folder": "", **known}), roots)
        except LowVramLoraError as error:
            files = str(error)  # execute raises it, where the user sees it
        return f"{files} {[str(root) for root in roots]}"

    @classmethod
    def execute(
        cls,
        images: Any = None,
        captions: str | None = None,
        clip: Any = None,
        planned_steps: int = 0,
        planned_batch_size: int = 0,
        **widgets: Any,
    ) -> io.NodeOutput:
        """Scan the folder."""
        roots = dataset_roots()
        if images is not None:
            folder = widgets["folder"]
            require(not folder.strip(), "folder", folder, "empty when images are connected")
            written = write_images(images, captions_for(captions or "", len(images)), images_root())
            widgets, roots = {**widgets, "folder": str(written)}, (images_root(),)
        else:
            require(not captions, "captions", captions, "unconnected without images; a folder has its own captions")
        on_read, on_look = (_shown(Progress(100, cls.hidden.unique_id)) for _ in range(2))
        dataset = scan(DataConfig(**widgets), roots, on_read, store_root=measures_root())
        intent = _intent(clip, planned_steps, planned_batch_size)
        examined = examination(dataset, measures_root(), on_look, intent)
        text = f"{report(dataset)}\n{examined.text}"
        return reported(dataset, report=text, node_id=cls.hidden.unique_id, picture=examined.picture)


def _intent(clip: Any, planned_steps: int, planned_batch_size: int) -> Intent:
    window = None if clip is None else window_of(clip)
    return Intent(steps=planned_steps or None, batch_size=planned_batch_size or None, text_window=window)


def _shown(progress: Progress) -> Callable[[int, int, str], None]:
    """Return what moves the bar with every file, so that Cancel acts at once, and changes the text now and then."""

    def show(done: int, total: int, text: str) -> None:
        is_worth_telling = done % max(total // 100, 1) == 0
        progress.update(100 * done // total, f"{text} ({done} of {total})" if is_worth_telling else "")

    return show


def _int(name: str, low: int, high: int, tooltip: str, step: int = 1) -> Any:
    return io.Int.Input(name, default=DEFAULTS[name], min=low, max=high, step=step, optional=True, tooltip=tooltip)


def _float(name: str, low: float, high: float, tooltip: str, step: float = 0.05) -> Any:
    return io.Float.Input(name, default=DEFAULTS[name], min=low, max=high, step=step, optional=True, tooltip=tooltip)


def _switch(name: str, tooltip: str) -> Any:
    return io.Boolean.Input(name, default=DEFAULTS[name], optional=True, tooltip=tooltip)


def _first() -> list[Any]:
    """The inputs that every saved workflow has, in their order."""
    return [
        io.String.Input(
            "folder",
            default="",
            tooltip="A folder inside ComfyUI's input folder, or inside one listed under 'datasets:' in "
            "extra_model_paths.yaml. Folders named 10_cat give 10 repeats. Empty when images are connected.",
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
        _int("bucket_step", 8, 256, "Widths and heights are multiples of this.", step=8),
        io.String.Input(
            "background",
            default=DEFAULTS["background"],
            optional=True,
            tooltip="The colour under transparent pixels.",
        ),
    ]


def _from_nodes() -> list[Any]:
    return [
        io.Image.Input("images", optional=True, tooltip="A batch from other nodes, in place of a folder."),
        io.String.Input(
            "captions",
            optional=True,
            force_input=True,
            tooltip="For images: one a line, or a single line for all of them.",
        ),
    ]


def _captions() -> list[Any]:
    return [
        io.String.Input(
            "custom_extension",
            default=DEFAULTS["custom_extension"],
            optional=True,
            tooltip="Another ending of caption files, such as .tags; looked for first.",
        ),
        choice(
            "missing_captions",
            MissingCaptions,
            DEFAULTS["missing_captions"],
            "What an image without a caption trains on; skip leaves it out.",
            optional=True,
        ),
        _int("caption_variants", 1, 32, "Captions for each image, the written one included, by shuffle or dropout."),
        _switch("shuffle_tags", "Comma-separated tags of the other variants come in another order."),
        _float("tag_dropout", 0.0, 0.9, "The share of tags that the other variants leave out."),
        _int("keep_tags", 0, 1000, "So many leading tags stay in front and are never left out."),
        _float("caption_dropout", 0.0, 1.0, "The share of draws in training that see the empty caption."),
    ]


def _sizes() -> list[Any]:
    return [
        _float("max_aspect", 1.0, 16.0, "Buckets are at most so many times as long as wide.", step=0.1),
        _int("min_side", 0, 4096, "The shortest side a bucket may have, in pixels; 0 for no limit.", step=8),
        _int("max_side", 0, 16384, "The longest side a bucket may have, in pixels; 0 for no limit.", step=8),
        _switch("upscale", "Off: images smaller than their bucket keep their size and get a bucket of their own."),
        _int("repeats", 1, 1000, "Times each image is seen in an epoch, on top of what folder names say."),
    ]


def _variants() -> list[Any]:
    return [
        _int("image_variants", 1, 16, "Encoded variants of each image, the plain one included."),
        _switch("flip", "Every second variant is mirrored. Not for text, or what has a left and a right."),
        _switch("random_crop", "Variants show another part of the image."),
        _float("colour_jitter", 0.0, 0.5, "How far brightness, contrast and saturation of variants may be off."),
        _int("variant_seed", 0, MAX_SEED, "Decides the variants of images and captions."),
        choice(
            "masks",
            Masks,
            DEFAULTS["masks"],
            "What counts in the loss: everything, the opaque parts, or what is white in masks/ beside the images.",
            optional=True,
        ),
        _float("validation_share", 0.0, 0.5, "The share of images that is never trained on, chosen by content."),
    ]


def _plans() -> list[Any]:
    """What only the doctor asks for; the dataset is the same without."""
    return [
        io.Clip.Input(
            "clip",
            optional=True,
            tooltip="Lets the report name captions longer than what this CLIP reads at once. Only its tokenizer is "
            "used: nothing is loaded.",
        ),
        io.Int.Input(
            "planned_steps",
            default=0,
            min=0,
            max=1_000_000,
            optional=True,
            tooltip="The steps of LoRA Train, copied here so that the report says whether there are too few or too "
            "many images for them. 0: not known.",
        ),
        io.Int.Input(
            "planned_batch_size",
            default=0,
            min=0,
            max=256,
            optional=True,
            tooltip="The batch_size of Sparse Batch Sampler, copied here so that the report names what can't fill a "
            "batch. 0: not known.",
        ),
    ]
