"""LoRA files: kohya keys, metadata, written whole or not at all."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import PathError

FINGERPRINT_KEY = "lowvram_fingerprint"


def state_dict(
    state: Mapping[str, tuple[Tensor, Tensor]], alpha: float, file_name: Callable[[str], str]
) -> dict[str, Tensor]:
    """Return the adapters as a plain state dict: ``<name>.lora_down.weight``, ``.lora_up.weight``, ``.alpha``.

    Args:
        state: ``(down, up)`` by layer path, as ``Adapters.state`` gives them.
        alpha: readers scale by ``alpha / rank`` and take 1 where it is missing, so it is always written.
        file_name: the kohya name of a layer path.

    Returns:
        Copies on the CPU, float32, so that the file computes what was trained.
    """
    tensors: dict[str, Tensor] = {}
    for path, (down, up) in state.items():
        name = file_name(path)
        tensors[f"{name}.lora_down.weight"] = down.detach().to("cpu", torch.float32, copy=True).contiguous()
        tensors[f"{name}.lora_up.weight"] = up.detach().to("cpu", torch.float32, copy=True).contiguous()
        tensors[f"{name}.alpha"] = torch.tensor(alpha, dtype=torch.float32)
    return tensors


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write ``tensors`` to ``path`` so that a reader sees the whole file or none.

    Raises:
        PathError: the folder can't be written to.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        ordinary = temporary.stat().st_mode
        save_file(dict(tensors), temporary, metadata=dict(metadata))
        # The library's files can be read by nobody but their owner.
        temporary.chmod(ordinary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise PathError(path, f"can't be written ({error}). Free some space or choose another folder.") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and metadata of ``path``. Raises ``PathError`` if it is not a whole safetensors file."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            # Copies: a mapped file can't be replaced on Windows.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise PathError(path, f"is not a readable safetensors file ({error}).") from error


def fingerprint_of(path: Path) -> str | None:
    """Return the fingerprint of the run that wrote ``path``, or None if another program did."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return (file.metadata() or {}).get(FINGERPRINT_KEY)
    except (OSError, SafetensorError):
        return None


def require_writable(path: Path) -> None:
    """Raise ``PathError`` unless a file can be made where ``path`` is to go."""
    probe = path.with_name(f"{path.name}.{os.getpid()}.probe")
    try:
        if path.is_dir():
            raise PathError(path, "is a folder; choose another output_name.")
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise PathError(
            path.parent,
            f"can't be written to ({error.strerror}). Make it writable or set another LoRA folder.",
        ) from error


def as_json(value: object) -> str:
    """Return ``value`` as the JSON text that metadata holds; safetensors metadata is strings only."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
