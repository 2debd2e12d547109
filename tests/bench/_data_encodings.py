"""What each encoding of latents takes and how exact it is, on latents of real pictures.

The latents are those of the toy world's VAE, a small trained one, unless another is named; the random
checkpoints of the tests are no use here. Below the five encodings stand forms that are not offered: they show why the
five are made as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lowvram_lora.data import precision
from lowvram_lora.data.channels import along, peaks, powers_of_two

LATENT_STEP_PX = 8
NUM_SCENES, LONGEST_PX = 24, 512

Form = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], float]]
"""A round trip in float64, and the bytes it takes for one picture's latents."""


def encodings(vae: Path | None = None, folder: Path | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return rows for each set of latents, with the host entered.

    Args:
        vae: a file that the host's Load VAE reads; None for the toy world's.
        folder: of pictures; None for scikit-image's photographs.
    """
    return {name: rows(latents) for name, latents in latent_sets(vae, folder).items()}


def latent_sets(vae: Path | None, folder: Path | None) -> dict[str, list[Tensor]]:
    """Return latents by where they are from, one tensor ``[C, h, w]`` a picture, float32."""
    photos = photographs(folder)
    sets = {"photographs": encoded(load_vae(vae), photos)}
    if not vae:
        sets["toy world's scenes"] = encoded(load_vae(None), scenes())
    sets["photographs, VAE in bfloat16"] = encoded(load_vae(vae, torch.bfloat16), photos)
    return sets


def load_vae(file: Path | None, dtype: torch.dtype = torch.float32) -> Any:
    """Return the host's VAE, computing in ``dtype``."""
    import comfy.sd
    import comfy.utils

    from tests.toyworld import base

    state = comfy.utils.load_torch_file(str(file or base.FOLDER / base.VAE))
    return comfy.sd.VAE(sd=state, dtype=dtype)


def encoded(vae: Any, pictures: Sequence[np.ndarray]) -> list[Tensor]:
    """Return what VAE Encode gives for each picture, uint8 ``[H, W, 3]``."""
    with torch.inference_mode():
        return [vae.encode(torch.from_numpy(each).unsqueeze(0).float() / 255)[0].clone() for each in pictures]


def scenes() -> list[np.ndarray]:
    """Return pictures of the toy world."""
    from tests.toyworld import dataset, draw

    return [draw.picture(scene) for scene in dataset.lesson_scenes("heart", NUM_SCENES)]


def pictures_in(folder: Path) -> list[Path]:
    """Return the pictures of a folder."""
    known = Image.registered_extensions()
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in known) if folder.is_dir() else []


def photographs(folder: Path | None) -> list[np.ndarray]:
    """Return real pictures, uint8 ``[H, W, 3]``, cut to whole latents."""
    from tests.harness import photos

    files = pictures_in(folder) if folder else [photos.source_folder() / photo.source for photo in photos.PHOTOS]
    return [opened(file) for file in files]


def opened(file: Path) -> np.ndarray:
    """Return one picture, at most ``LONGEST_PX`` long."""
    with Image.open(file) as image:
        picture = image.convert("RGB")
    picture.thumbnail((LONGEST_PX, LONGEST_PX))
    width, height = (side // LATENT_STEP_PX * LATENT_STEP_PX for side in picture.size)
    return np.array(picture.crop((0, 0, width, height)))


def rows(latents: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return a row for each encoding, then one for each form that is not offered."""
    offered: dict[str, Form] = {name: offered_form(name) for name in precision.NAMES}
    forms = {**offered, **{f"({name})": form for name, form in other_forms().items()}}
    return [row(name, form, latents) for name, form in forms.items()]


def row(name: str, form: Form, latents: Sequence[Tensor]) -> dict[str, Any]:
    """Return the bytes and errors of one form."""
    round_trip, size = form
    numbers = torch.cat([each.double().flatten() for each in latents])
    errors = torch.cat([(round_trip(each.double()) - each.double()).flatten() for each in latents])
    num_bytes = sum(size(each) for each in latents)
    rms = float(errors.pow(2).mean().sqrt())
    return {
        "name": name,
        "bytes_per_sample": round(num_bytes / len(latents)),
        "bytes_per_number": num_bytes / len(numbers),
        "max_error": float(errors.abs().max()),
        "rms_error": rms,
        "rms_of_deviation": rms / float(numbers.std()),
    }


def offered_form(name: str) -> Form:
    """Return an encoding of the product."""

    def round_trip(exact: Tensor) -> Tensor:
        return precision.decode(*precision.encode(exact, name)).double()

    return round_trip, lambda exact: precision.num_bytes(name, tuple(exact.shape))


def other_forms() -> dict[str, Form]:
    """Return the forms that are not offered. Bytes by channel are left out: they are few."""
    forms: dict[str, Form] = {
        "bfloat16": (lambda exact: exact.to(torch.bfloat16).double(), lambda exact: 2.0 * exact.numel()),
        "16-bit steps, no low band": (lambda exact: fixed(exact, 16), lambda exact: 2.0 * exact.numel()),
        "24-bit steps, no low band": (lambda exact: fixed(exact, 24), lambda exact: 3.0 * exact.numel()),
        "8-bit steps around 0": (lambda exact: fixed(exact, 8, around_0=True), lambda exact: float(exact.numel())),
        "means of 2x2 as float16, detail as float32 less one of four": (
            lambda exact: low_band(exact, 2) + exact - spread(means(exact, 2), 2, exact),
            lambda exact: 3.5 * exact.numel(),
        ),
    }
    for block in (2, 4, 8, 16):
        for bits in (8, 16, 24):
            forms[f"means of {block}x{block} as float16, {bits}-bit detail"] = banded(block, bits)
    return forms


def banded(block: int, bits: int) -> Form:
    """Return the band split with blocks and steps of any size."""

    def round_trip(exact: Tensor) -> Tensor:
        low = low_band(exact, block)
        return low + fixed(exact - low, bits, around_0=True)

    def size(exact: Tensor) -> float:
        return bits / 8 * exact.numel() + 2.0 * means(exact, block).numel()

    return round_trip, size


def fixed(exact: Tensor, bits: int, around_0: bool = False) -> Tensor:
    """Return numbers rounded to ``2**bits`` equal steps of each channel's range."""
    flat = exact.flatten(1)
    low, high = (-peaks(exact), peaks(exact)) if around_0 else (flat.amin(1), flat.amax(1))
    step = along((high - low) / (2**bits - 1), exact)
    middle = along((high + low) / 2, exact)
    lowest = -(2 ** (bits - 1))
    numbers = ((exact - middle) / step).nan_to_num().round().clamp(lowest, -lowest - 1)
    return numbers * step + middle


def low_band(exact: Tensor, block: int) -> Tensor:
    """Return the means of the blocks at half precision, spread over their blocks."""
    scale = along(powers_of_two(peaks(exact), 15), exact)
    return spread((means(exact, block) / scale).half().double() * scale, block, exact)


def means(exact: Tensor, block: int) -> Tensor:
    """Return the mean of each block."""
    return torch.nn.functional.avg_pool2d(exact.unsqueeze(0), block, ceil_mode=True)[0]


def spread(low: Tensor, block: int, like: Tensor) -> Tensor:
    """Return each mean over all of its block."""
    return low.repeat_interleave(block, -2).repeat_interleave(block, -1)[..., : like.shape[-2], : like.shape[-1]]
