"""Latents as they are kept: five encodings, from float32 to a quarter of its bytes.

For latents of ``n`` numbers in ``C`` channels; ``p`` is the peak (largest magnitude) of a channel, ``r`` its range
(largest less smallest). Next to each bound: the rms error in parts of the latents' standard deviation, measured on
photographs with a small trained VAE in float32 (``dev.py bench data --only encodings``).

| name     | bytes           | a number ``x`` is off by at most                 | rms      |
|----------|-----------------|--------------------------------------------------|----------|
| full     | ``4n``          | 0                                                | 0        |
| bands    | ``2.03n + 8C``  | see ``bands.join``; ``p / 2**14.9`` at most      | 0.00003  |
| half     | ``2n + 4C``     | ``|x| / 2**11``, or ``p / 2**39`` where larger   | 0.0002   |
| int8     | ``n + 8C``      | ``r / 509 + p / 2**22``                          | 0.007    |
| float8   | ``n + 4C``      | ``|x| / 2**4``, or ``p / 2**17`` where larger    | 0.026    |

All but full may be off by 2**-126 where latents are as small as that. bands takes 2 bytes for each block of 8 by 8 that
is begun, 2.03 in all for large latents.

**half** is float16 times a power of two for each channel, and not bfloat16: on real latents its error is an eighth
(11 bits against 8), and the power of two takes away its one weakness, the range. What a VAE computed in float16 comes
back bit for bit, and what it computed in bfloat16 as well, down to 2**-31 of the peak: for these, half is full, and
bands would be larger and less exact. So keep ``smallest_exact`` where nothing may be lost; what is kept at half is
never read as bands.

**int8** is more exact than **float8** at the same bytes: latents fill their range evenly enough, so that steps of one
width serve them better than steps that grow with the number. float8 keeps small numbers near 0 exact in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch import Tensor

from ..config import require
from ..errors import UnsupportedModelError
from . import bands
from .channels import all_finite, along, peaks, powers_of_two, steps, to_float32

LatentPrecision = Literal["full", "bands", "half", "int8", "float8"]
Compression = Literal["none", "moderate", "high"]

NAMES: tuple[LatentPrecision, ...] = get_args(LatentPrecision)
"""The encodings from the most exact to the least, as measured on latents in float32."""

ON_DISK: Mapping[str, LatentPrecision] = MappingProxyType({"none": "full", "moderate": "half", "high": "int8"})
"""What the disk cache keeps for each ``compression``.

``none`` may keep ``smallest_exact`` just as well. ``moderate`` halves the files, ``high`` quarters them; it is int8 and
not float8, see above. A sample is never read at more precision than it was kept.
"""

LATENTS = "latents"
"""The tensor that has the latents' own shape in every encoding."""
PRECISION = "precision"
"""The metadata key with the encoding's name. A file without it holds full latents."""

_HALF_BITS, _FLOAT8_BITS = 15, 8
_INT8_STEPS = 255


def encode(latents: Tensor, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return ``latents`` as the encoding ``name`` keeps them: CPU tensors and metadata for one safetensors file.

    Args:
        latents: ``[C, h, w]`` or ``[C, frames, h, w]``, any floating-point type, on any device.

    Raises:
        ConfigError: there is no such encoding.
        UnsupportedModelError: a number is not finite as a float32, or the shape is another.
    """
    check_name(name)
    _check_shape(tuple(latents.shape))
    plain = latents.detach().to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format)
    _check_finite(plain)
    return _ENCODERS[name](plain), {PRECISION: name}


def smallest_exact(latents: Tensor) -> LatentPrecision:
    """Return ``half`` where that keeps every number of ``latents``, as of a VAE in half precision, else ``full``.

    Raises:
        UnsupportedModelError: as for ``encode``.
    """
    kept = decode(*encode(latents, "half"))
    return "half" if torch.equal(kept, latents.detach().to("cpu", torch.float32)) else "full"


def decode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the latents in ``dtype``, on the CPU, the same bits on each machine. May share memory with ``tensors``.

    Raises:
        ValueError: the tensors are not what ``encode`` made.
        UnsupportedModelError: a number is too large for ``dtype``.
    """
    name = metadata.get(PRECISION, "full")
    _check_tensors(tensors, name)
    latents = _DECODERS[name](tensors)
    if not all_finite(latents):
        raise ValueError(f"damaged: latents kept as {name} are not finite")
    result = latents.to(dtype)
    if result is not latents and not bool(result.isfinite().all()):
        raise UnsupportedModelError(
            f"Latents reach {float(latents.abs().max()):.3g}, but {dtype} ends at {torch.finfo(dtype).max:.3g}.",
            "Choose precision bf16 or fp32 on LoRA Train (low-VRAM).",
        )
    return result


def convert(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], name: str
) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
    """Return kept latents as ``name`` keeps them; as they are where they are no more exact than that already.

    Raises:
        ConfigError: there is no such encoding.
        ValueError: the tensors are not what ``encode`` made.
    """
    kept = metadata.get(PRECISION, "full")
    if less_exact(kept, name) == kept:
        return tensors, metadata
    return encode(decode(tensors, metadata), name)


def num_bytes(name: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of the tensors that keep latents of ``shape``, without the file's header (some 300 bytes).

    Raises:
        ConfigError: there is no such encoding.
        UnsupportedModelError: no latents have this shape.
    """
    check_name(name)
    _check_shape(shape)
    return sum(math.prod(each) * dtype.itemsize for dtype, each in _layout(name, shape).values())


def less_exact(one: str, other: str) -> LatentPrecision:
    """Return the less exact of two encodings.

    Raises:
        ConfigError: there is no such encoding.
    """
    check_name(one)
    check_name(other)
    return next(name for name in reversed(NAMES) if name in (one, other))


def on_disk(compression: str) -> LatentPrecision:
    """Return the encoding that the disk cache uses.

    Raises:
        ConfigError: there is no such compression.
    """
    require(compression in ON_DISK, "compression", compression, "one of " + ", ".join(map(repr, ON_DISK)))
    return ON_DISK[compression]


def check_name(name: str) -> None:
    """Raise ``ConfigError`` unless ``name`` is an encoding."""
    require(name in NAMES, "precision", name, "one of " + ", ".join(map(repr, NAMES)))


def _layout(name: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return type and shape of each tensor of an encoding."""
    each_channel = (torch.float32, shape[:1])
    others: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {
        "full": {},
        "half": {"scale": each_channel},
        "float8": {"scale": each_channel},
        "int8": {"step": each_channel, "middle": each_channel},
        "bands": {"step": each_channel, "low": (torch.float16, bands.low_shape(shape)), "scale": each_channel},
    }
    return {LATENTS: (_TYPES[name], shape), **others[name]}


def _scaled(latents: Tensor, dtype: torch.dtype, bits: int) -> dict[str, Tensor]:
    scale = powers_of_two(peaks(latents), bits)
    # float32 holds the quotient exactly, so that there is one rounding only.
    return {LATENTS: (latents.double() / along(scale, latents)).float().to(dtype), "scale": scale}


def _unscaled(tensors: Mapping[str, Tensor]) -> Tensor:
    kept = tensors[LATENTS]
    return to_float32(kept.double() * along(tensors["scale"], kept))


def _to_int8(latents: Tensor) -> dict[str, Tensor]:
    exact = latents.double()
    low, high = exact.flatten(1).amin(1), exact.flatten(1).amax(1)
    step, middle = steps(high - low, _INT8_STEPS), ((low + high) / 2).float()
    numbers = ((exact - along(middle, exact)) / along(step, exact)).round().clamp(-128, 127)
    return {LATENTS: numbers.to(torch.int8), "step": step, "middle": middle}


def _from_int8(tensors: Mapping[str, Tensor]) -> Tensor:
    kept = tensors[LATENTS]
    return to_float32(kept.double() * along(tensors["step"], kept) + along(tensors["middle"], kept))


def _to_bands(latents: Tensor) -> dict[str, Tensor]:
    high, step, low, scale = bands.split(latents)
    return {LATENTS: high, "step": step, "low": low, "scale": scale}


def _from_bands(tensors: Mapping[str, Tensor]) -> Tensor:
    return bands.join(tensors[LATENTS], tensors["step"], tensors["low"], tensors["scale"])


_TYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "full": torch.float32,
        "bands": torch.int16,
        "half": torch.float16,
        "int8": torch.int8,
        "float8": torch.float8_e4m3fn,
    }
)
_ENCODERS: Mapping[str, Callable[[Tensor], dict[str, Tensor]]] = MappingProxyType(
    {
        "full": lambda latents: {LATENTS: latents},
        "bands": _to_bands,
        "half": lambda latents: _scaled(latents, torch.float16, _HALF_BITS),
        "int8": _to_int8,
        "float8": lambda latents: _scaled(latents, torch.float8_e4m3fn, _FLOAT8_BITS),
    }
)
_DECODERS: Mapping[str, Callable[[Mapping[str, Tensor]], Tensor]] = MappingProxyType(
    {
        "full": lambda tensors: tensors[LATENTS],
        "bands": _from_bands,
        "half": _unscaled,
        "int8": _from_int8,
        "float8": _unscaled,
    }
)


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) not in (3, 4) or 0 in shape:
        raise UnsupportedModelError(
            f"The VAE gives latents of shape {shape}; channels, height and width were expected, or frames as well.",
            "Connect the VAE of an image model to Build Tiered Cache.",
        )


def _check_finite(latents: Tensor) -> None:
    if not all_finite(latents):
        wrong = latents.numel() - int(latents.isfinite().sum())
        raise UnsupportedModelError(
            f"The VAE's output has {wrong} of {latents.numel()} numbers that are not finite.",
            "Start ComfyUI with --fp32-vae, or load another VAE.",
        )


def _check_tensors(tensors: Mapping[str, Tensor], name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"damaged: there is no encoding {name!r}")
    if LATENTS not in tensors:
        raise ValueError(f"damaged: no tensor {LATENTS!r}")
    shape = tuple(tensors[LATENTS].shape)
    if len(shape) not in (3, 4) or 0 in shape:
        raise ValueError(f"damaged: latents of shape {shape}")
    for part, expected in _layout(name, shape).items():
        found = (tensors[part].dtype, tuple(tensors[part].shape)) if part in tensors else None
        if found != expected:
            raise ValueError(f"damaged: {part} of latents kept as {name} is {found} in place of {expected}")
