"""Train the toy world's picture encoder: the host's TAESD with 16 channels, from nothing.

Latents are normalised while it learns (``BatchNorm2d`` without weights), and the normalisation is folded into the
encoder's last convolution at the end; with the host's SD3 scale and shift in the file, the latents a model sees have
mean 0 and deviation 1 in every channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from . import draw, scenes, variety
from .states import Optimizer, Run, cosine, digest

CHANNELS = 16
SD3_SCALE, SD3_SHIFT = 1.5305, 0.0609
"""The host's latent format of SD3: what a model sees is (latent - shift) * scale."""


@dataclass(frozen=True)
class Stage:
    """A part of the training: pictures of one size, small at first, for they teach the same in less time.

    Attributes:
        side: of the pictures, in pixels.
        crop: side of the part that is cut out of each, in pixels.
        batch: parts a step.
        steps: how long it lasts.
        rate: learning rate at its start.
        horizon: after how many steps the rate would be down; a stage may be left before.
        pool: how many pictures are drawn for it.
        free: share of these that are of no world.
    """

    side: int
    crop: int
    batch: int
    steps: int
    rate: float
    horizon: int
    pool: int
    free: float


STAGES = (
    Stage(side=64, crop=32, batch=16, steps=1800, rate=1e-3, horizon=2800, pool=12_000, free=0.5),
    Stage(side=64, crop=64, batch=8, steps=1200, rate=6e-4, horizon=1200, pool=12_000, free=0.5),
    Stage(side=scenes.SIDE, crop=64, batch=8, steps=1200, rate=8e-4, horizon=1200, pool=6_000, free=0.3),
    Stage(side=scenes.SIDE, crop=scenes.SIDE, batch=4, steps=200, rate=4e-4, horizon=200, pool=2_000, free=0.3),
)
NOISE = 0.1
"""Deviation of the noise on the latents that the decoder learns to forgive: a model's latents are never exact."""


FILE = "vae-run.safetensors"


class Coder(torch.nn.Module):
    """The host's encoder and decoder with the normalisation between them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        from comfy.taesd.taesd import TAESD

        inner = TAESD(latent_channels=CHANNELS)
        self.encoder, self.decoder = inner.taesd_encoder, inner.taesd_decoder
        self.normalise = torch.nn.BatchNorm2d(CHANNELS, affine=False, momentum=0.05)
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight, generator=generator)
                if module.bias is not None:
                    torch.nn.init.zeros_(module.bias)
        for block in (module for module in self.modules() if type(module).__name__ == "Block"):
            # Each block starts as the identity, nearly: three of them in a row would blow up otherwise.
            block.conv[-1].weight.data.mul_(0.1)
        self.to(memory_format=torch.channels_last)

    def encode(self, pictures: torch.Tensor) -> torch.Tensor:
        """Pictures in [0, 1], ``[N, 3, H, W]``, to normalised latents, ``[N, 16, H / 8, W / 8]``."""
        return self.normalise(self.encoder(pictures).float())

    def optimizer(self) -> Optimizer:
        """Muon for the inner convolutions; the first and last ones and the biases by AdamW."""
        edge = (self.encoder[0], self.encoder[-1], self.decoder[1], self.decoder[-1])
        edges = {id(module.weight) for module in edge}
        inner = [p for p in self.parameters() if p.ndim == 4 and id(p) not in edges]
        return Optimizer(inner, [p for p in self.parameters() if p.ndim != 4 or id(p) in edges])


def pictures(seed: int, count: int, side: int, free: float = 0.5) -> torch.Tensor:
    """Return pictures to learn from, a share ``free`` of them of no world: uint8, ``[count, 3, side, side]``."""
    rng = np.random.default_rng(seed)
    drawn = [
        variety.picture(rng, side) if rng.random() < free else draw.picture(scenes.scenes(rng, 1)[0], side)
        for _ in range(count)
    ]
    return torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2).contiguous()


def recipe(seed: int) -> str:
    """Return a word for what it learns from: settings and pictures. Other code that trains it has the same word."""
    known = np.stack([draw.picture(scene) for scene in scenes.specimens()])
    return digest(STAGES, NOISE, seed, known, pictures(seed, 16, scenes.SIDE).numpy())


def train(folder: Path, seed: int = 1) -> Coder:
    """Train, or go on where ``folder`` says that training stopped; return the finished coder, ready to encode."""
    run, coder = Run(folder / FILE, recipe(seed)), Coder(seed)
    optimizer = coder.optimizer()
    stored = run.load()
    if stored is not None:
        coder.load_state_dict({n.removeprefix("model."): t for n, t in stored.items() if n.startswith("model.")})
        optimizer.load(stored)

    def keep() -> dict[str, torch.Tensor]:
        return {f"model.{n}": t for n, t in coder.state_dict().items()} | optimizer.tensors()

    first = 0
    for stage in STAGES:
        if run.step < first + stage.steps:
            pool = pictures(seed, stage.pool, stage.side, stage.free)
            for step in run.steps(first + stage.steps, keep):
                batch = _batch(pool, step, seed, stage)
                loss = _loss(coder, batch, torch.Generator().manual_seed(seed * 1_000_003 + step))
                loss.backward()
                optimizer.step(cosine(step - first, stage.horizon, stage.rate))
                run.note(step, loss, "picture encoder")
        first += stage.steps
    return coder.eval()


def _loss(coder: Coder, batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Mean absolute plus mean squared error of what comes back."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        latents = coder.encode(batch)
        output = coder.decoder(latents + NOISE * torch.randn(latents.shape, generator=generator))
    error = output.float() - batch
    return error.abs().mean() + error.square().mean()


def _batch(pool: torch.Tensor, step: int, seed: int, stage: Stage) -> torch.Tensor:
    """Parts of pictures, flipped by chance; the batch of a step is the same in every run."""
    rng = np.random.default_rng((seed, step))
    chosen = pool[rng.integers(len(pool), size=stage.batch)]
    if stage.crop < stage.side:
        top, left = rng.integers(stage.side - stage.crop + 1, size=2)
        chosen = chosen[..., top : top + stage.crop, left : left + stage.crop]
    if rng.random() < 0.5:
        chosen = chosen.flip(-1)
    return (chosen.float() / 255).contiguous(memory_format=torch.channels_last)


def export(coder: Coder, file: Path) -> None:
    """Write the coder as a VAE that the host's VAELoader loads, in half precision."""
    deviation = (coder.normalise.running_var + coder.normalise.eps).sqrt()
    last = coder.encoder[-1]
    state = {f"taesd_encoder.{name}": tensor.clone() for name, tensor in coder.encoder.state_dict().items()}
    state |= {f"taesd_decoder.{name}": tensor.clone() for name, tensor in coder.decoder.state_dict().items()}
    end = f"taesd_encoder.{len(coder.encoder) - 1}"
    state[f"{end}.weight"] = last.weight.detach() / deviation[:, None, None, None]
    state[f"{end}.bias"] = (last.bias.detach() - coder.normalise.running_mean) / deviation
    halves = {name: tensor.detach().half().contiguous() for name, tensor in state.items()}
    halves |= {"vae_scale": torch.tensor(SD3_SCALE), "vae_shift": torch.tensor(SD3_SHIFT)}
    save_file(halves, file)
