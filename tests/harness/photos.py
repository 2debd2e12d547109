"""A small data set of real photographs, taken from the wheel of scikit-image. Nothing is downloaded."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from PIL import Image


@dataclass(frozen=True)
class Photo:
    """One photograph and where it goes.

    Attributes:
        source: file name in ``skimage/data``.
        target: path in the data set; the ending decides the format.
        caption: goes into the ``.txt`` file beside it.
        longest_px: the longer side after shrinking, so that sizes and shapes are mixed.
    """

    source: str
    target: str
    caption: str
    longest_px: int


# All are photographs: a cat, a portrait, a rocket on its pad, a cup, old coins, and three textures. The first
# folder is in kohya's style: its number says how often each of its pictures is repeated.
PHOTOS = (
    Photo("chelsea.png", "2_cat/chelsea.png", "a photo of a tabby cat, close-up of its face", 451),
    Photo("coffee.png", "photos/coffee.jpg", "a cup of coffee on a saucer with a spoon, wooden table", 600),
    Photo("astronaut.png", "photos/astronaut.png", "portrait of a smiling astronaut in an orange suit", 512),
    Photo("rocket.jpg", "photos/rocket.jpg", "a white rocket on its launch pad under a dark sky", 640),
    Photo("camera.png", "photos/camera.png", "black and white photo of a man behind a camera on a tripod", 400),
    Photo("coins.png", "photos/coins.jpg", "rows of old Greek coins on a dark cloth", 384),
    Photo("gravel.png", "photos/gravel.jpg", "gravel, seen from above", 320),
    Photo("brick.png", "photos/brick.png", "a brick wall", 256),
)


def source_folder() -> Path:
    """Return the folder of scikit-image's own pictures, without importing scikit-image."""
    spec = importlib.util.find_spec("skimage")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("scikit-image is missing; `python3 dev.py test` installs it.")
    return Path(spec.origin).parent / "data"


def make_dataset(folder: Path, photos: tuple[Photo, ...] = PHOTOS) -> Path:
    """Write the photographs and their captions to ``folder`` and return it."""
    for photo in photos:
        target = folder / photo.target
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(source_folder() / photo.source) as picture:
            picture.thumbnail((photo.longest_px, photo.longest_px))
            picture.save(target)
        target.with_suffix(".txt").write_text(photo.caption, encoding="utf-8")
    return folder
