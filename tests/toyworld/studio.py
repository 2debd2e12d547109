"""Draw with the toy world's base model by the host's own nodes, in this process.

The host must be on the path and on its device already (``tests/inhost/conftest.py`` and ``tests.bench`` do that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import base, scenes, words
from .scenes import Scene

LATENT = (16, scenes.SIDE // 8, scenes.SIDE // 8)


@dataclass(frozen=True)
class Studio:
    """The host's MODEL, CLIP and VAE of the base model, and what the CLIP says in closed form."""

    model: Any
    clip: Any
    vae: Any
    table: words.Table
    tokens: words.Tokens

    def conditioning(self, captions: Sequence[str]) -> Any:
        """Return the CONDITIONING of a batch, one caption a picture, as the CLIP gives it but at no cost."""
        context, pooled = self.table.encode(self.tokens.ids(captions))
        wide = torch.nn.functional.pad(context, (0, 4096 - words.WIDTH))
        return [[wide, {"pooled_output": torch.nn.functional.pad(pooled, (0, 2048 - words.WIDTH))}]]

    def conditioning_by_clip(self, captions: Sequence[str]) -> Any:
        """Return the CONDITIONING of a batch from the CLIP itself: some 0.2 s a caption."""
        parts = [self.clip.encode_from_tokens_scheduled(self.clip.tokenize(caption))[0] for caption in captions]
        context = torch.cat([part[0] for part in parts])
        pooled = torch.cat([part[1]["pooled_output"] for part in parts])
        return [[context, {"pooled_output": pooled}]]

    def draw(self, captions: Sequence[str], seed: int, model: Any = None) -> list[np.ndarray]:
        """Return one picture for each caption, uint8 ``[96, 96, 3]``, by KSampler and VAEDecode.

        Args:
            captions: what to draw.
            seed: of the noise; the same for a batch as for the base's.
            model: a MODEL in the base's place, say with a LoRA.
        """
        from nodes import common_ksampler

        latents = {"samples": torch.zeros(len(captions), *LATENT)}
        with torch.inference_mode():
            drawn = common_ksampler(
                model or self.model,
                seed,
                base.STEPS,
                base.GUIDANCE,
                base.SAMPLER,
                base.SCHEDULER,
                self.conditioning(captions),
                self.conditioning([""]),
                latents,
            )[0]["samples"]
            pictures = self.vae.decode(drawn)
        return list((pictures.clamp(0, 1) * 255).round().byte().cpu().numpy())

    def encode(self, pictures: Sequence[np.ndarray]) -> torch.Tensor:
        """Return the VAE's latents of pictures: ``[N, 16, 12, 12]``, as VAEEncode gives them."""
        with torch.inference_mode():
            return self.vae.encode(torch.from_numpy(np.stack(pictures)).float() / 255)


def open_studio(files: dict[str, Path] | None = None) -> Studio:
    """Load the base model as the host's UNETLoader, CLIPLoader and VAELoader do."""
    import comfy.sd
    import comfy.utils

    files = files or base.files()
    model = comfy.sd.load_diffusion_model(str(files["diffusion_models"]))
    clip = comfy.sd.load_clip([str(files["text_encoders"])], clip_type=comfy.sd.CLIPType.SD3)
    state = comfy.utils.load_torch_file(str(files["vae"]))
    return Studio(model, clip, comfy.sd.VAE(sd=state), words.Table(), words.Tokens())


def drawn_scenes(wanted: Sequence[Scene], studio: Studio, seed: int, model: Any = None) -> list[np.ndarray]:
    """Return one picture for each scene."""
    return studio.draw([scene.caption() for scene in wanted], seed, model)
