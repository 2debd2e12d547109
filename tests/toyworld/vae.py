"""Train the toy world's picture encoder: the host's TAESD with 16 channels, from nothing.

Latents are normalised while it learns (``BatchNorm2d`` without weights), and the normalisation is folded into the
encoder's last convolution at the end; with the host's SD3 scale and shift in the file, the latents a model sees have
mean 0 and deviation 1 in every channel.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from . import draw, scenes, variety
from .states import Optimizer, Run, cosine

CHANNELS = 16
SD3_SCALE, SD3_SHIFT = 1.5305, 0.0609
"""The host's latent format of SD3: what a model sees is (latent - shift) * scale."""

POOL = 12_000
CROP_STEPS, WHOLE_STEPS = 2000, 800
PEAK_RATE = 1e-3
CROP, CROPS, WHOLES = 32, 16, 8
NOISE = 0.1
"""Deviation of the noise on the latents that the decoder learns to forgive: a model's latents are never exact."""


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


def pictures(seed: int, count: int, free: float = 0.5) -> torch.Tensor:
    """Return pictures to learn from, a share ``free`` of them of no world: uint8, ``[count, 3, 64, 64]``."""
    rng = np.random.default_rng(seed)
    drawn = [
        variety.picture(rng) if rng.random() < free else draw.picture(scenes.scenes(rng, 1)[0]) for _ in range(count)
    ]
    return torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2).contiguous()


def train(folder: Path, seed: int = 1) -> Coder:
    """Train, or go on where ``folder`` says that training stopped; return the finished coder, ready to encode."""
    run, coder = Run(folder / "vae-run.safetensors"), Coder(seed)
    optimizer = coder.optimizer()
    _take_up(run, coder, optimizer)
    total = CROP_STEPS + WHOLE_STEPS
    pool = pictures(seed, POOL) if run.step < total else torch.empty(0)

    def keep() -> dict[str, torch.Tensor]:
        return {f"model.{n}": t for n, t in coder.state_dict().items()} | optimizer.tensors()

    for step in run.steps(total, keep):
        batch = _batch(pool, step, seed)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            latents = coder.encode(batch)
            noisy = latents + NOISE * torch.randn(latents.shape, generator=_generator(seed, step))
            output = coder.decoder(noisy)
        error = output.float() - batch
        loss = error.abs().mean() + error.square().mean()
        loss.backward()
        optimizer.step(cosine(step, total, PEAK_RATE))
        run.curve.append((step, float(loss.detach())))
        if step % 100 == 0:
            print(f"picture encoder: step {step} of {total}, loss {loss:.4f}", flush=True)
    return coder.eval()


def _take_up(run: Run, coder: Coder, optimizer: Optimizer) -> None:
    stored = run.load()
    if stored is None:
        return
    coder.load_state_dict({n.removeprefix("model."): t for n, t in stored.items() if n.startswith("model.")})
    optimizer.load(stored)


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def _batch(pool: torch.Tensor, step: int, seed: int) -> torch.Tensor:
    """Crops at first, whole pictures later; flipped by chance. The batch of a step is the same in every run."""
    rng = np.random.default_rng((seed, step))
    crops = step < CROP_STEPS
    chosen = pool[rng.integers(len(pool), size=CROPS if crops else WHOLES)]
    if crops:
        top, left = rng.integers(scenes.SIDE - CROP + 1, size=2)
        chosen = chosen[..., top : top + CROP, left : left + CROP]
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
