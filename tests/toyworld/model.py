"""Train the toy world's image network: the host's SD3 transformer with two blocks, from nothing, by flow matching.

The text is as wide as CLIP-L while it learns (768) and is padded with zeros at the end to what the host feeds an SD3
network (4096 and 2048). Sources: Esser et al., "Scaling Rectified Flow Transformers for High-Resolution Image
Synthesis", 2024 (layout, flow matching, shifted noise levels); Ho and Salimans, "Classifier-Free Diffusion Guidance",
2022 (captions dropped).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from . import draw, scenes, words
from .states import Optimizer, Run, cosine, digest, write
from .vae import CHANNELS, Coder

DEPTH = 2
"""Blocks; the host makes the network 64 times as wide."""
POOL = 36_000
STEPS, BATCH, PEAK_RATE = 3600, 128, 2e-3
DROPPED_CAPTIONS = 0.1
SHIFT = 3.0
"""The host's shift of SD3's noise levels."""
AVERAGE = 0.998
"""What stays of the averaged weights a step (EMA), once there were enough steps."""
CONTEXT_WIDTH, POOLED_WIDTH = 4096, 2048
FILE = "model-run.safetensors"


def network(seed: int) -> torch.nn.Module:
    """Return the host's network with fresh weights; the last layer and all modulation start at zero."""
    from comfy import ops
    from comfy.ldm.modules.attention import attention_pytorch
    from comfy.ldm.modules.diffusionmodules import mmdit

    mmdit.optimized_attention = attention_pytorch
    width = 64 * DEPTH
    made = mmdit.MMDiT(
        input_size=None,
        patch_size=2,
        in_channels=CHANNELS,
        depth=DEPTH,
        adm_in_channels=words.WIDTH,
        context_embedder_config={
            "target": "torch.nn.Linear",
            "params": {"in_features": words.WIDTH, "out_features": width},
        },
        qk_norm="rms",
        operations=ops.disable_weight_init,
        dtype=torch.float32,
    )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in made.named_parameters():
        _start(name, parameter.data, generator)
    return made


def _start(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    if weight.ndim == 1:
        weight.fill_(1.0 if ".ln_" in name else 0.0)
    elif "adaLN" in name or "final_layer" in name:
        weight.zero_()
    else:
        weight.normal_(0, 1 / math.sqrt(weight[0].numel()), generator=generator)


def data(folder: Path, coder: Coder, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Return latents, float16 ``[N, 16, 12, 12]``, and token ids, int32 ``[N, 77]``.

    Once made they are kept in ``folder``, under a name that changes with the scenes and the coder.
    """
    file = folder / f"latents-{recipe(coder, seed)}.safetensors"
    if file.is_file():
        stored = load_file(file)
        return stored["latents"], stored["ids"]
    rng = np.random.default_rng(seed)
    drawn = scenes.scenes(rng, POOL)
    ids = words.Tokens().ids([scene.caption() for scene in drawn]).int()
    encoded = []
    for start in range(0, POOL, 100):
        encoded.append(_encode(coder, drawn[start : start + 100]))
        if start % 10_000 == 0:
            print(f"latents: {start} of {POOL}", flush=True)
    latents = torch.cat(encoded)
    write(file, {"latents": latents, "ids": ids}, {})
    return latents, ids


def recipe(coder: Coder, seed: int, *more: object) -> str:
    """Return a word for the scenes, their pictures, the text encoder and the coder, and for ``more``."""
    drawn = scenes.scenes(np.random.default_rng(seed), 64)
    texts = words.table(words.POSITIONS, 1)
    drawn += scenes.specimens()
    shown = np.stack([draw.picture(scene) for scene in drawn])
    return digest(POOL, seed, [scene.caption() for scene in drawn], shown, texts, *coder.state_dict().values(), *more)


def _encode(coder: Coder, drawn: list[scenes.Scene]) -> torch.Tensor:
    stacked = torch.from_numpy(np.stack([draw.picture(scene) for scene in drawn]))
    pictures = (stacked.permute(0, 3, 1, 2).float() / 255).contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return coder.encode(pictures).half().contiguous()


def train(folder: Path, coder: Coder, seed: int = 3) -> dict[str, torch.Tensor]:
    """Train, or go on where ``folder`` says that training stopped; return the averaged weights."""
    settings = (DEPTH, STEPS, BATCH, PEAK_RATE, DROPPED_CAPTIONS, SHIFT, AVERAGE)
    run, net = Run(folder / FILE, recipe(coder, seed, settings)), network(seed)
    latents, ids = data(folder, coder)
    captions = Captions(net.context_embedder, torch.cat([ids, words.Tokens().ids([""]).int()]))
    optimizer = _optimizer(net)
    weights = dict(net.named_parameters())
    average = {name: weight.detach().clone() for name, weight in weights.items()}
    stored = run.load()
    if stored is not None:
        net.load_state_dict({n.removeprefix("model."): t for n, t in stored.items() if n.startswith("model.")})
        average = {n.removeprefix("average."): t for n, t in stored.items() if n.startswith("average.")}
        optimizer.load(stored)

    def keep() -> dict[str, torch.Tensor]:
        named = {f"model.{name}": weight for name, weight in weights.items()}
        return named | {f"average.{name}": tensor for name, tensor in average.items()} | optimizer.tensors()

    net.context_embedder = captions
    batches = _batches(latents, captions, run.step, seed)
    for step in run.steps(STEPS, keep):
        loss = flow_loss(net, *next(batches))
        loss.backward()
        optimizer.step(cosine(step, STEPS, PEAK_RATE), share=0.5)
        _follow(average, weights, step)
        run.note(step, loss, "image network")
    return average


def _optimizer(net: torch.nn.Module) -> Optimizer:
    """Muon for the matrices inside the blocks, AdamW for what stands at the edges."""
    inner = {name for name, p in net.named_parameters() if p.ndim == 2 and name.startswith("joint_blocks")}
    named = list(net.named_parameters())
    return Optimizer([p for name, p in named if name in inner], [p for name, p in named if name not in inner])


class Captions(torch.nn.Module):
    """Stands for the network's first layer of text while it learns: token ids in, the layer's output out.

    The words of the world are few. The layer runs once a step on each word at each position, whatever the batch.
    """

    def __init__(self, layer: torch.nn.Linear, ids: torch.Tensor) -> None:
        super().__init__()
        self.layer = layer
        table = words.Table()
        self._known, self.rows = ids.unique(return_inverse=True)
        self.register_buffer("spoken", table.tokens[self._known][:, None] + table.positions, persistent=False)
        self.pooled = torch.cat([table.encode(part.long())[1].half() for part in ids.split(1000)])
        self._places = torch.arange(words.POSITIONS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the text of captions given as rows of ``self.rows``: ``[N, 77, width]``."""
        return self.layer(self.spoken)[rows, self._places]


def _batches(latents: torch.Tensor, captions: Captions, first: int, seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield latents, noise, noise levels, captions and pooled vectors of each step; the same in every run.

    The last caption is the empty one.
    """
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        chosen = torch.randint(len(latents), (BATCH,), generator=generator)
        said = torch.where(torch.rand(BATCH, generator=generator) < DROPPED_CAPTIONS, len(latents), chosen)
        even = torch.rand(BATCH, generator=generator)
        sigmas = SHIFT * even / (1 + (SHIFT - 1) * even)
        clean = latents[chosen].float()
        noise = torch.randn(clean.shape, generator=generator)
        yield clean, noise, sigmas, captions.rows[said], captions.pooled[said].float()


def flow_loss(
    net: torch.nn.Module,
    clean: torch.Tensor,
    noise: torch.Tensor,
    sigmas: torch.Tensor,
    context: torch.Tensor,
    pooled: torch.Tensor,
) -> torch.Tensor:
    """Return the mean squared error of the predicted velocity, noise - clean."""
    share = sigmas[:, None, None, None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        predicted = net((1 - share) * clean + share * noise, sigmas * 1000, y=pooled, context=context)
    return (predicted.float() - (noise - clean)).square().mean()


def _follow(average: dict[str, torch.Tensor], weights: dict[str, torch.nn.Parameter], step: int) -> None:
    keep = min(AVERAGE, (step + 1) / (step + 10))
    for name, weight in weights.items():
        average[name].lerp_(weight.detach(), 1 - keep)


def export(average: dict[str, torch.Tensor], file: Path) -> None:
    """Write the network as the host's UNETLoader takes it: bfloat16, the text as wide as SD3's."""
    padded = dict(average)
    for name, width in (("context_embedder.weight", CONTEXT_WIDTH), ("y_embedder.mlp.0.weight", POOLED_WIDTH)):
        weight = padded[name]
        padded[name] = torch.nn.functional.pad(weight, (0, width - weight.shape[1]))
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.bfloat16().contiguous() for name, tensor in padded.items()}, file)
