"""Pictures to latents on disk: read on threads, encoded in batches of one size, each by one process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from ..errors import DatasetError, PathError, UnsupportedModelError
from ..ports import EncodedPictures, LatentCodec
from . import precision
from .channels import all_finite
from .lock import claimed
from .masks import mask_weights
from .ordered import in_order
from .pixels import strict_decoding, to_pixels
from .precision import LATENTS
from .store import UnreadableFileError, path_of, peek, read, write
from .traits import with_features
from .wanted import WantedPicture

# One picture is made ready while another is encoded. A few wait in RAM, so more threads would only take more of it.
_THREADS = 2

OnDone = Callable[[WantedPicture, tuple[int, ...], str], None]


@dataclass
class Incidents:
    """What the user should know of how pictures were encoded; names of samples."""

    retried: list[str] = field(default_factory=list)
    in_tiles: list[str] = field(default_factory=list)


def cached_shape(root: Path, wanted: WantedPicture) -> tuple[int, ...] | None:
    """Return the shape of latents that are on disk, or None."""
    header = peek(path_of(root, "latents", wanted.key))
    return None if header is None else header.shapes.get(LATENTS)


@dataclass(frozen=True, kw_only=True)
class PictureEncoder:
    """Encodes what is missing.

    Attributes:
        encoding: how latents are kept.
        waiting: called every now and then while another process encodes what is wanted; may raise.
    """

    codec: LatentCodec
    root: Path
    background: str
    encoding: str
    waiting: Callable[[], None]
    incidents: Incidents = field(default_factory=Incidents)

    def run(self, missing: Sequence[WantedPicture], on_done: OnDone) -> None:
        """Encode ``missing`` and call ``on_done`` for each, with the shape of its latents and what was done.

        What another process is encoding comes last: by then it is done, mostly.
        """
        groups = list(_groups(missing, self.codec.batch_limit))
        busy: list[list[WantedPicture]] = []
        with strict_decoding():
            pixels = in_order(self._pixels, (wanted for group in groups for wanted in group), _THREADS)
            try:
                for group in groups:
                    ready = [next(pixels) for _ in group]
                    with claimed(self.root, group[0].key) as is_ours:
                        if is_ours:
                            self._finish(group, ready, on_done)
                        else:
                            busy.append(group)
            finally:
                pixels.close()
            for group in busy:
                with claimed(self.root, group[0].key, self.waiting):
                    self._finish(group, [self._pixels(wanted) for wanted in group], on_done)

    def _finish(self, group: Sequence[WantedPicture], pixels: Sequence[Tensor | None], on_done: OnDone) -> None:
        """Encode what is still missing of a group."""
        todo: list[tuple[WantedPicture, Tensor]] = []
        for wanted, ready in zip(group, pixels, strict=True):
            # Since it was found missing, another process may have brought it.
            shape = cached_shape(self.root, wanted)
            if shape is not None:
                on_done(wanted, shape, "already cached")
            elif (shape := self._recoded(wanted)) is not None:
                on_done(wanted, shape, "kept in another way")
            else:
                todo.append((wanted, self._read(wanted) if ready is None else ready))
        if not todo:
            return
        latents = self._encode([wanted for wanted, _ in todo], torch.stack([ready for _, ready in todo]))
        for (wanted, _), each in zip(todo, latents, strict=True):
            self._write(wanted, each)
            on_done(wanted, tuple(each.shape), "encoded")

    def _pixels(self, wanted: WantedPicture) -> Tensor | None:
        """Return the picture as the codec takes it; None if no pixels are needed."""
        if any(peek(path_of(self.root, "latents", key)) is not None for key in (wanted.key, wanted.full_key)):
            return None
        return self._read(wanted)

    def _read(self, wanted: WantedPicture) -> Tensor:
        data = read_unchanged(wanted.sample.image, wanted.sample.image_digest, wanted.sample.name)
        return to_pixels(data, wanted.sample.image, wanted.size_px, self.background, wanted.variant)

    def _recoded(self, wanted: WantedPicture) -> tuple[int, ...] | None:
        """Return the shape of latents that were on disk in full and are now there as they are wanted."""
        if wanted.full_key == wanted.key:
            return None
        try:
            stored = read(path_of(self.root, "latents", wanted.full_key))
            latents = precision.decode(stored.tensors, stored.metadata)
        except (UnreadableFileError, ValueError):
            return None
        self._write(wanted, latents)
        return tuple(latents.shape)

    def _write(self, wanted: WantedPicture, latents: Tensor) -> None:
        tensors, metadata = precision.encode(latents, self.encoding)
        write(path_of(self.root, "latents", wanted.key), tensors, with_features(tensors, metadata))

    def _encode(self, group: Sequence[WantedPicture], pixels_BHWC: Tensor) -> list[Tensor]:
        names = [wanted.sample.name for wanted in group]
        encoded = self.codec.encode(pixels_BHWC)
        if encoded.in_tiles:
            self.incidents.in_tiles += [name for name in names if name not in self.incidents.in_tiles]
        latents = _plain(encoded)
        return [
            each if all_finite(each) else self._retried(name, pixels_BHWC[i : i + 1])
            for i, (name, each) in enumerate(zip(names, latents, strict=True))
        ]

    def _retried(self, name: str, pixels_BHWC: Tensor) -> Tensor:
        """Return a picture's latents in float32, where half precision gave none."""
        encoded = self.codec.encode_precisely(pixels_BHWC)
        latents = None if encoded is None else _plain(encoded)[0]
        if latents is None or not all_finite(latents):
            also = "" if encoded is None else ", in float32 neither"
            raise UnsupportedModelError(f"The VAE's output for {name} is not a number{also}.", "Load another VAE.")
        if name not in self.incidents.retried:
            self.incidents.retried.append(name)
        return latents


def _plain(encoded: EncodedPictures) -> Tensor:
    return encoded.latents.detach().to("cpu", torch.float32).clone(memory_format=torch.contiguous_format)


def _groups(missing: Sequence[WantedPicture], limit: int) -> Iterator[list[WantedPicture]]:
    """Yield pictures of one size, ``limit`` at most."""
    by_size: dict[tuple[int, int], list[WantedPicture]] = {}
    for wanted in missing:
        by_size.setdefault(wanted.size_px, []).append(wanted)
    for members in by_size.values():
        yield from (members[first : first + limit] for first in range(0, len(members), limit))


def read_unchanged(path: Path, digest: str, name: str) -> bytes:
    """Return a file's bytes.

    Raises:
        PathError: it is gone.
        DatasetError: it is not the one that was scanned.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PathError(path, "this image is gone; queue again to read the folder anew") from error
    # The address promises these bytes: others under it would be taken for them in every later run.
    if hashlib.sha256(data).hexdigest() != digest:
        raise DatasetError([f"{name} has changed since Load Dataset read it; queue again"])
    return data


def build_mask(root: Path, wanted: WantedPicture, latent_shape: Sequence[int], from_alpha: bool) -> bool:
    """Write the weights of a picture's loss, one for each place of its latents, unless they are there.

    A weight is the mean of those of its pixels. ``[1, ..., h, w]``, float32.

    Returns:
        Whether they had to be made.
    """
    sample, key = wanted.sample, wanted.mask_key
    assert sample.mask is not None and key is not None
    path = path_of(root, "mask", key)
    shape = (1, *latent_shape[1:])
    header = peek(path)
    if header is not None and header.shapes.get(LATENTS) == shape:
        return False
    data = read_unchanged(sample.mask, sample.mask_digest, f"the mask of {sample.name}")
    pixels_HW = mask_weights(data, sample.mask, sample.image_size_px, wanted.size_px, from_alpha, wanted.variant)
    weights = adaptive_avg_pool2d(pixels_HW[None], (latent_shape[-2], latent_shape[-1]))
    write(path, {LATENTS: weights.reshape(shape)}, {})
    return True
