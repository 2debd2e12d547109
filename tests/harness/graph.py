"""The pack's graph in ComfyUI's API format: what a user wires, and the previews around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Prompt = dict[str, dict[str, Any]]
Link = list[Any]

# Ids are words, so that tests and the demo can say which node they mean.
CHECKPOINT, DATASET, SCORE, CACHE, SAMPLER = "checkpoint", "dataset", "score", "cache", "sampler"
TRAIN, MONITOR, LOSS = "train", "monitor", "loss"
SAVE_BASE, SAVE_LORA_IMAGE, SAVE_LOADED, SAVE_FILE = "save_base", "save_lora", "save_loaded", "save_file"


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """What differs between graphs.

    Attributes:
        train: more widgets of LoRA Train, or other values for them.
        with_loader: also sample through the host's Load LoRA Model and save with its Save LoRA Weights.
    """

    checkpoint: str
    folder: str
    steps: int = 20
    resolution: int = 256
    output_name: str = "demo"
    trigger_word: str = ""
    batch_size: int = 1
    learning_rate: float = 1e-3
    rank: int = 8
    seed: int = 0
    caption: str = "a photo of a cat"
    sampling_steps: int = 4
    guidance: float = 2.0
    ram_cache_mb: int = 1024
    with_loader: bool = True
    train: dict[str, Any] = field(default_factory=dict)


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """Return one node."""
    return {"class_type": class_type, "inputs": inputs}


def training(options: GraphOptions) -> Prompt:
    """Return the pack's nodes, from the checkpoint to the LoRA."""
    return {
        CHECKPOINT: node("CheckpointLoaderSimple", ckpt_name=options.checkpoint),
        DATASET: node(
            "LowVRAMLoadDataset",
            folder=options.folder,
            resolution=options.resolution,
            trigger_word=options.trigger_word,
            caption_extension="auto",
        ),
        SCORE: node("LowVRAMScoreComplexity", dataset=[DATASET, 0], image_weight=0.7, text_weight=0.3),
        CACHE: node(
            "LowVRAMBuildTieredCache",
            dataset=[SCORE, 0],
            vae=[CHECKPOINT, 2],
            clip=[CHECKPOINT, 1],
            ram_cache_mb=options.ram_cache_mb,
            profile="balanced",
        ),
        SAMPLER: node(
            "LowVRAMSparseBatchSampler",
            cache=[CACHE, 0],
            batch_size=options.batch_size,
            strategy="shuffle",
            seed=options.seed,
        ),
        TRAIN: train_node(options),
        MONITOR: node("LowVRAMMonitor", value=[TRAIN, 0]),
        LOSS: node("LossGraphNode", loss=[TRAIN, 2], filename_prefix="loss"),
    }


def train_node(options: GraphOptions) -> dict[str, Any]:
    """Return LoRA Train with the required widgets and those in ``options.train``."""
    widgets = {
        "steps": options.steps,
        "learning_rate": options.learning_rate,
        "rank": options.rank,
        "alpha": float(options.rank),
        "vram_budget_gb": 0.0,
        "output_name": options.output_name,
        "seed": options.seed,
        **options.train,
    }
    return node("LowVRAMLoRATrain", model=[CHECKPOINT, 0], batches=[SAMPLER, 0], **widgets)


def sampling(name: str, model: Link, clip: Link, vae: Link, options: GraphOptions) -> Prompt:
    """Return the nodes that make one picture with ``model``; the last one is ``save_<name>``."""
    return {
        f"positive_{name}": node("CLIPTextEncode", clip=clip, text=options.caption),
        f"negative_{name}": node("CLIPTextEncode", clip=clip, text=""),
        f"latent_{name}": node("EmptyLatentImage", width=options.resolution, height=options.resolution, batch_size=1),
        f"sample_{name}": node(
            "KSampler",
            model=model,
            positive=[f"positive_{name}", 0],
            negative=[f"negative_{name}", 0],
            latent_image=[f"latent_{name}", 0],
            seed=1,
            steps=options.sampling_steps,
            cfg=options.guidance,
            sampler_name="euler",
            scheduler="normal",
            denoise=1.0,
        ),
        f"decode_{name}": node("VAEDecode", samples=[f"sample_{name}", 0], vae=vae),
        f"save_{name}": node("SaveImage", images=[f"decode_{name}", 0], filename_prefix=name),
    }


def base_picture(options: GraphOptions) -> Prompt:
    """Return a graph of ComfyUI's own nodes only: one picture with the checkpoint as it is."""
    loader = {CHECKPOINT: node("CheckpointLoaderSimple", ckpt_name=options.checkpoint)}
    return {**loader, **sampling("base", [CHECKPOINT, 0], [CHECKPOINT, 1], [CHECKPOINT, 2], options)}


def loader_picture(options: GraphOptions) -> Prompt:
    """Return the nodes that use LORA_MODEL with ComfyUI's own nodes: load it and sample, and save it."""
    load = node("LoraModelLoader", model=[CHECKPOINT, 0], lora=[TRAIN, 1], strength_model=1.0, bypass=False)
    save = node("SaveLoRA", lora=[TRAIN, 1], prefix="loras/saved_by_host")
    pictures = sampling("loaded", ["loader", 0], [CHECKPOINT, 1], [CHECKPOINT, 2], options)
    return {"loader": load, SAVE_FILE: save, **pictures}


def whole(options: GraphOptions) -> Prompt:
    """Return the whole graph: training, and pictures with the base, the LoRA and the loaded LORA_MODEL."""
    prompt = {**training(options), **base_picture(options)}
    prompt |= sampling("lora", [MONITOR, 0], [CHECKPOINT, 1], [CHECKPOINT, 2], options)
    return prompt | loader_picture(options) if options.with_loader else prompt
