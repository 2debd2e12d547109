"""The pack's graph in ComfyUI's API format: what a user wires, and the previews around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Prompt = dict[str, dict[str, Any]]
Link = list[Any]

# Ids are words, so that tests and the demo can say which node they mean.
CHECKPOINT, DATASET, SCORE, CACHE, SAMPLER = "checkpoint", "dataset", "score", "cache", "sampler"
TRAIN, MONITOR, LOSS = "train", "monitor", "loss"
SAVE_BASE, SAVE_LORA_IMAGE, SAVE_LOADED, SAVE_FILE = "save_base", "save_lora", "save_loaded", "save_file"


@dataclass(frozen=True, kw_only=True)
class Loaders:
    """The nodes that load a base model, and what comes out of them.

    Attributes:
        nodes: the loader nodes.
        model, clip, vae: the outputs that give MODEL, CLIP and VAE.
        empty_latent: the type of the node that makes this family's empty latents.
    """

    nodes: Prompt
    model: Link
    clip: Link
    vae: Link
    empty_latent: str


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """What differs between graphs.

    Attributes:
        checkpoint: a file of models/checkpoints, for Load Checkpoint.
        loaders: other loader nodes in its place; ``checkpoint`` is then not read.
        dataset, train: more widgets of Load Dataset and of LoRA Train; for the latter also other values.
        with_loader: also sample through the host's Load LoRA Model and save with its Save LoRA Weights.
    """

    checkpoint: str = ""
    loaders: Loaders | None = None
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
    scheduler: str = "normal"
    ram_cache_mb: int = 1024
    with_loader: bool = True
    dataset: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)

    def base(self) -> Loaders:
        """Return what loads the base model."""
        return self.loaders or checkpoint_loader(self.checkpoint)


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """Return one node."""
    return {"class_type": class_type, "inputs": inputs}


def checkpoint_loader(file: str) -> Loaders:
    """Return Load Checkpoint with one file of models/checkpoints, of a family with SD 1.5's latents."""
    return Loaders(
        nodes={CHECKPOINT: node("CheckpointLoaderSimple", ckpt_name=file)},
        model=[CHECKPOINT, 0],
        clip=[CHECKPOINT, 1],
        vae=[CHECKPOINT, 2],
        empty_latent="EmptyLatentImage",
    )


def sd3_loaders(model: str, clip: str, vae: str) -> Loaders:
    """Return the loaders of an SD3 base whose parts are files of their own."""
    return Loaders(
        nodes={
            "unet": node("UNETLoader", unet_name=model, weight_dtype="default"),
            "clip": node("CLIPLoader", clip_name=clip, type="sd3"),
            "vae": node("VAELoader", vae_name=vae),
        },
        model=["unet", 0],
        clip=["clip", 0],
        vae=["vae", 0],
        empty_latent="EmptySD3LatentImage",
    )


def training(options: GraphOptions) -> Prompt:
    """Return the base model's loaders and the pack's nodes, from there to the LoRA."""
    base = options.base()
    return {
        **base.nodes,
        DATASET: node(
            "LowVRAMLoadDataset",
            folder=options.folder,
            resolution=options.resolution,
            trigger_word=options.trigger_word,
            caption_extension="auto",
            **options.dataset,
        ),
        SCORE: node("LowVRAMScoreComplexity", dataset=[DATASET, 0], image_weight=0.7, text_weight=0.3),
        CACHE: node(
            "LowVRAMBuildTieredCache",
            dataset=[SCORE, 0],
            vae=base.vae,
            clip=base.clip,
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
    return node("LowVRAMLoRATrain", model=options.base().model, batches=[SAMPLER, 0], **widgets)


def sampling(name: str, model: Link, clip: Link, vae: Link, options: GraphOptions) -> Prompt:
    """Return the nodes that make one picture with ``model``; the last one is ``save_<name>``."""
    return {
        f"positive_{name}": node("CLIPTextEncode", clip=clip, text=options.caption),
        f"negative_{name}": node("CLIPTextEncode", clip=clip, text=""),
        f"latent_{name}": empty_latent(options),
        f"sample_{name}": sampler_node(
            options,
            model=model,
            positive=[f"positive_{name}", 0],
            negative=[f"negative_{name}", 0],
            latent_image=[f"latent_{name}", 0],
            seed=1,
        ),
        f"decode_{name}": node("VAEDecode", samples=[f"sample_{name}", 0], vae=vae),
        f"save_{name}": node("SaveImage", images=[f"decode_{name}", 0], filename_prefix=name),
    }


def empty_latent(options: GraphOptions) -> dict[str, Any]:
    """Return the node that makes the latents to start one picture from."""
    return node(options.base().empty_latent, width=options.resolution, height=options.resolution, batch_size=1)


def sampler_node(options: GraphOptions, **inputs: Any) -> dict[str, Any]:
    """Return KSampler with the options' widgets; ``inputs`` are its links and its seed."""
    return node(
        "KSampler",
        steps=options.sampling_steps,
        cfg=options.guidance,
        sampler_name="euler",
        scheduler=options.scheduler,
        denoise=1.0,
        **inputs,
    )


def encoded_texts(name: str, captions: Sequence[str], options: GraphOptions) -> Prompt:
    """Return one node for each caption, ``<name>_text_<number>``; the last one is the empty caption."""
    clip = options.base().clip
    return {
        f"{name}_text_{number}": node("CLIPTextEncode", clip=clip, text=caption)
        for number, caption in enumerate([*captions, ""])
    }


def gallery(name: str, model: Link, texts: Prompt, options: GraphOptions) -> Prompt:
    """Return the nodes that draw every caption of ``texts`` with ``model``, decoded and saved as one batch.

    ``save_<name>`` shows them in the captions' order. The noise of a picture depends on its place alone, so that
    two galleries of the same texts differ by their models only.

    Args:
        name: of the gallery.
        model: what draws.
        texts: what ``encoded_texts`` returned; two galleries may share it.
        options: how large and with which sampler settings.
    """
    *asked, empty = texts
    nodes: Prompt = {f"{name}_latent": empty_latent(options)}
    joined: Link = []
    for number, text in enumerate(asked):
        nodes[f"{name}_sample_{number}"] = sampler_node(
            options,
            model=model,
            positive=[text, 0],
            negative=[empty, 0],
            latent_image=[f"{name}_latent", 0],
            seed=number + 1,
        )
        one = [f"{name}_sample_{number}", 0]
        if joined:
            nodes[f"{name}_joined_{number}"] = node("LatentBatch", samples1=joined, samples2=one)
            one = [f"{name}_joined_{number}", 0]
        joined = one
    nodes[f"{name}_decode"] = node("VAEDecode", samples=joined, vae=options.base().vae)
    nodes[f"save_{name}"] = node("SaveImage", images=[f"{name}_decode", 0], filename_prefix=name)
    return nodes


def base_picture(options: GraphOptions) -> Prompt:
    """Return a graph of ComfyUI's own nodes only: one picture with the base model as it is."""
    base = options.base()
    return {**base.nodes, **sampling("base", base.model, base.clip, base.vae, options)}


def loader_picture(options: GraphOptions) -> Prompt:
    """Return the nodes that use LORA_MODEL with ComfyUI's own nodes: load it and sample, and save it."""
    base = options.base()
    save = node("SaveLoRA", lora=[TRAIN, 1], prefix="loras/saved_by_host")
    pictures = sampling("loaded", ["loader", 0], base.clip, base.vae, options)
    return {"loader": loaded_lora(options), SAVE_FILE: save, **pictures}


def loaded_lora(options: GraphOptions) -> dict[str, Any]:
    """Return the host's Load LoRA Model on LORA_MODEL: the base model with the LoRA, at full strength."""
    return node("LoraModelLoader", model=options.base().model, lora=[TRAIN, 1], strength_model=1.0, bypass=False)


def whole(options: GraphOptions) -> Prompt:
    """Return the whole graph: training, and pictures with the base, the LoRA and the loaded LORA_MODEL."""
    base = options.base()
    prompt = {**training(options), **base_picture(options)}
    prompt |= sampling("lora", [MONITOR, 0], base.clip, base.vae, options)
    return prompt | loader_picture(options) if options.with_loader else prompt
