"""Pictures that other nodes made, as files in a folder, so that all else sees a folder like any other."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from ..errors import ConfigError, PathError
from .dataset import digest_of

FOLDER_NAME = "images"

_FORMAT_VERSION = 1


def captions_for(text: str, num_images: int) -> tuple[str, ...]:
    """Return one caption for each image: those of ``text``, one a line, or its single line for all.

    Nothing but white space gives none at all. A blank line between others is a blank caption.

    Raises:
        ConfigError: another number of lines than of images.
    """
    lines = re.split(r"\r\n|\r|\n", text.strip()) if text.strip() else []
    if len(lines) <= 1:
        return tuple(line.strip() for line in lines) * num_images
    if len(lines) != num_images:
        raise ConfigError("captions", f"{len(lines)} lines", f"one line, or one for each of the {num_images} images")
    return tuple(line.strip() for line in lines)


def write_images(images_BHWC: Tensor, captions: Sequence[str], root: Path) -> Path:
    """Write a batch as PNG files, with a ``.txt`` beside each if there are captions; return their folder.

    The folder's place is named by the content, so the same batch is written once. It is complete or not there.

    Args:
        images_BHWC: 1, 3 or 4 channels in 0..1; what is beyond is cut. Rounded to 8 bits.
        captions: one for each image, or none.
        root: made if needed.

    Raises:
        ConfigError: these are no images, or some of their numbers are not finite.
        PathError: the files can't be written.
    """
    if images_BHWC.ndim != 4 or images_BHWC.shape[-1] not in (1, 3, 4) or not images_BHWC.numel():
        raise ConfigError("images", f"a tensor of shape {tuple(images_BHWC.shape)}", "a batch of images")
    # Digests of one picture at a time: the batch as bytes would be a second copy of it.
    digests = [hashlib.sha256(_bytes_of(image)).hexdigest() for image in images_BHWC]
    shape = tuple(images_BHWC.shape)
    place = root / digest_of("images", _FORMAT_VERSION, shape, digests, list(captions))[:32]
    folder = place / FOLDER_NAME
    if not folder.is_dir():
        try:
            root.mkdir(parents=True, exist_ok=True)
            _write(images_BHWC, captions, place)
        except OSError as error:
            raise PathError(place, f"the images can't be written ({error.strerror or error})") from error
    return folder


def _write(images_BHWC: Tensor, captions: Sequence[str], place: Path) -> None:
    # Beside its place, so that a write that breaks off leaves nothing under that name.
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=place.parent))
    try:
        (partial / FOLDER_NAME).mkdir()
        for number, image in enumerate(images_BHWC):
            file = partial / FOLDER_NAME / f"{number + 1:05}.png"
            _to_picture(image).save(file, "PNG", compress_level=1)
            if captions:
                file.with_suffix(".txt").write_text(captions[number], encoding="utf-8")
        try:
            os.replace(partial, place)
        except OSError:
            # Another process was first; what is there is the same.
            if not (place / FOLDER_NAME).is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _bytes_of(image_HWC: Tensor) -> bytes:
    return _to_8_bits(image_HWC).numpy().tobytes()


def _to_picture(image_HWC: Tensor) -> Image.Image:
    values = _to_8_bits(image_HWC)
    return Image.fromarray((values[..., 0] if values.shape[-1] == 1 else values).numpy())


def _to_8_bits(image_HWC: Tensor) -> Tensor:
    values = image_HWC.detach().to("cpu", torch.float32)
    if not bool(values.isfinite().all()):
        raise ConfigError("images", "a batch with numbers that are not finite", "pictures; see what made them")
    return (values.clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)
