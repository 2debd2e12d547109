"""The toy world's base model: its files, and how a ComfyUI is given them."""

from __future__ import annotations

from pathlib import Path

from tests.harness.host import offer
from tests.harness.places import CACHE

from . import words

FOLDER = Path(__file__).parent / "base"
MODEL, VAE, CLIP = "toyworld.safetensors", "toyworld_vae.safetensors", "toyworld_clip.safetensors"
STEPS, GUIDANCE, SAMPLER, SCHEDULER = 20, 3.0, "euler", "simple"
"""What its pictures are drawn with."""


def files() -> dict[str, Path]:
    """Return the files by the host's folder type; the text encoder is made from its seed on first use."""
    return {
        "diffusion_models": FOLDER / MODEL,
        "vae": FOLDER / VAE,
        "text_encoders": words.write(CACHE / "toyworld" / CLIP),
    }


def offer_base(base: Path) -> None:
    """Make the files loadable in the ComfyUI whose base directory is ``base``."""
    for kind, file in files().items():
        offer(base / "models" / kind, file)
