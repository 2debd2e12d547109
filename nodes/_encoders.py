"""The host's VAE and CLIP as the core's ports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..lowvram_lora.data.encodings import pack
from ..lowvram_lora.ports import EncodedPictures, Encoding
from ._digest import digest, patcher_digest
from ._host import has_own_memory
from ._text import PADDING, of_loaded, padding_of

# Pictures of one size that go through the VAE at once, where there is a device to keep busy.
_VAE_BATCH = 4


class HostVae:
    """The host's VAE as the core's ``LatentCodec``."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae
        self.fingerprint = patcher_digest(vae.patcher)

    @property
    def batch_limit(self) -> int:
        """One where a batch stands for the frames of a video, and where it takes as long as its pictures."""
        is_video = self._vae.latent_dim == 3 and not getattr(self._vae, "not_video", False)
        return 1 if is_video or not has_own_memory(self._vae.device) else _VAE_BATCH

    def encode(self, pixels_BHWC: Tensor) -> EncodedPictures:
        """Return the unscaled latents; the host divides a batch, and a picture, that memory is too small for."""
        encoded = _encoded(self._vae, pixels_BHWC)
        if not encoded.in_tiles or len(pixels_BHWC) == 1:
            return encoded
        # Of a batch all go in tiles where only together they were too much.
        singles = [_encoded(self._vae, pixels_BHWC[i : i + 1]) for i in range(len(pixels_BHWC))]
        latents = torch.cat([single.latents for single in singles])
        return EncodedPictures(latents, any(single.in_tiles for single in singles))

    def encode_precisely(self, pixels_BHWC: Tensor) -> EncodedPictures | None:
        """Return the latents from the same weights in float32 arithmetic."""
        if self._vae.vae_dtype == torch.float32:
            return None
        return _encoded(self._in_float32, pixels_BHWC)

    @cached_property
    def _in_float32(self) -> Any:
        weights = {name: tensor.float() for name, tensor in self._vae.get_sd().items()}
        # The host's own class knows the architecture by the weights.
        return type(self._vae)(sd=weights, device=self._vae.device, dtype=torch.float32)


def _encoded(vae: Any, pixels_BHWC: Tensor) -> EncodedPictures:
    with _noticing_tiles(vae) as tiled:
        latents: Tensor = vae.encode(pixels_BHWC)
    return EncodedPictures(latents.float().cpu(), bool(tiled))


@contextmanager
def _noticing_tiles(vae: Any) -> Iterator[list[str]]:
    """Yield a list that fills where the host encodes in tiles; it tells nobody but the log."""
    tiled: list[str] = []

    def noted(name: str, encode: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tiled.append(name)
            return encode(*args, **kwargs)

        return call

    names = [name for name in ("encode_tiled_", "encode_tiled_1d", "encode_tiled_3d") if hasattr(vae, name)]
    before = {name: vae.__dict__.get(name) for name in names}
    try:
        for name in names:
            setattr(vae, name, noted(name, getattr(vae, name)))
        yield tiled
    finally:
        for name, own in before.items():
            if own is None:
                del vae.__dict__[name]
            else:
                setattr(vae, name, own)


# SD 1.5 and SDXL checkpoints lack it; the host then leaves it as the memory was, and these families do not use it.
_NOT_LOADED = ("clip_l.transformer.text_projection.weight",)


class HostClip:
    """The host's CLIP as the core's ``TextEncoder``."""

    def __init__(self, clip: Any) -> None:
        self._clip = clip
        options = (clip.layer_idx, sorted(clip.tokenizer_options.items()))
        self.fingerprint = digest([patcher_digest(clip.patcher, _NOT_LOADED), repr(options)])

    def encode(self, caption: str) -> Encoding:
        """Return the conditioning the host's own CLIP Text Encode node gives for ``caption``, and its padding."""
        tokens = self._clip.tokenize(caption)
        encoded = self._clip.encode_from_tokens_scheduled(tokens, show_pbar=False)
        padding = padding_of(self._clip.tokenizer, of_loaded(self._clip, tokens))
        if padding is not None:
            encoded = [[tensor, {**more, PADDING: padding}] for tensor, more in encoded]
        return pack(encoded)
