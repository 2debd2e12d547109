"""Everything that can be known before step 1, checked at once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import nn

from ..adapters.file import require_writable
from ..adapters.names import output_path
from ..adapters.targets import rank_limit, select
from ..config import TrainConfig
from ..data.batches import BatchRecipe
from ..data.index import CacheEntry, CacheIndex
from ..data.store import Kind, invalidate, path_of, peek
from ..errors import CacheMissError, LowVramLoraError, PreflightError
from ..memory.frozen import matrices, why_not
from ..ports import Denoiser

T = TypeVar("T")
# What training needs beyond the host's own packages; the pack loads without them.
PACKAGES = ("peft", "diffusers.optimization")


@dataclass(frozen=True)
class Checked:
    """What a run is made of, once nothing stands against it."""

    layers: dict[str, nn.Module]
    path: Path


def check(
    denoiser: Denoiser,
    recipe: BatchRecipe,
    config: TrainConfig,
    loras_root: Path,
    room: int | None = None,
    found: Sequence[str] = (),
    only_path: bool = False,
) -> Checked:
    """Return the layers to adapt and where the file goes.

    Args:
        room: device bytes that are needed beside the model; None where weights are where the network computes.
        found: problems that are known already.
        only_path: check where the file goes and nothing else; there is nothing to train.

    Raises:
        PreflightError: with every problem found.
    """
    problems = _missing_packages()
    path = _attempt(lambda: _writable_path(loras_root, config), problems)
    if only_path and path is not None:
        return Checked({}, path)
    problems += found
    problems += denoiser.problems(_latent_shapes(recipe.cache))
    problems += _missing_encodings(recipe.cache)
    if not problems:
        denoiser.load(room)
    layers = _attempt(lambda: select(denoiser.network, config.lora.targets), problems)
    problems += _unfit_layers(denoiser.network)
    problems += _low_rank_layers(layers or {}, config.lora.rank)
    if problems or path is None or layers is None:
        raise PreflightError(problems)
    return Checked(layers, path)


def _missing_packages() -> list[str]:
    problems = []
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            problems.append(
                f"The Python package {name.partition('.')[0]} can't be used here ({error}). Install what this pack's "
                "requirements.txt names with ComfyUI's own Python, and restart ComfyUI."
            )
    return problems


def _attempt(make: Callable[[], T], problems: list[str]) -> T | None:
    try:
        return make()
    except LowVramLoraError as error:
        problems.append(str(error))
        return None


def _writable_path(root: Path, config: TrainConfig) -> Path:
    path = output_path(root, config.output_name)
    require_writable(path)
    return path


def _latent_shapes(index: CacheIndex) -> list[tuple[int, ...]]:
    return sorted({encoded.latent_shape for entry in index.entries for encoded in entry.scales})


def _missing_encodings(index: CacheIndex) -> list[str]:
    gone = [entry.name for entry in index.entries if not _is_cached(index, entry)]
    if index.caption_dropout and not _is_there(index, "text", index.empty_text_key):
        gone.append("the empty caption")
    if not gone:
        return []
    # Build Tiered Cache takes this as its own fingerprint: it runs at the next Queue.
    invalidate(index.root)
    named = gone[0] if len(gone) == 1 else f"{gone[0]} and {len(gone) - 1} more"
    return [str(CacheMissError(named))]


def _is_cached(index: CacheIndex, entry: CacheEntry) -> bool:
    return all(_is_there(index, kind, key) for kind, key in entry.files())


def _is_there(index: CacheIndex, kind: Kind, key: str) -> bool:
    return peek(path_of(index.root, kind, key)) is not None


def _unfit_layers(network: nn.Module) -> list[str]:
    reasons = ((path, _why_unfit(module)) for path, module in matrices(network))
    unfit = [f"{path} ({reason})" for path, reason in reasons if reason]
    if not unfit:
        return []
    named = ", ".join(unfit[:3]) + (f" and {len(unfit) - 3} more" if len(unfit) > 3 else "")
    return [f"These layers of the model can't be trained through: {named}."]


def _why_unfit(module: nn.Module) -> str | None:
    if "forward" in module.__dict__:
        return "another extension has replaced its forward; reload the model without that extension's node"
    return why_not(module)


def _low_rank_layers(layers: dict[str, nn.Module], rank: int) -> list[str]:
    limits = {path: rank_limit(module) for path, module in layers.items()}
    smallest = min(limits, key=lambda path: limits[path], default=None)
    if smallest is None or rank <= limits[smallest]:
        return []
    num_small = sum(limit < rank for limit in limits.values())
    return [
        f"rank {rank} is larger than a layer: too large for {num_small} of the {len(layers)} chosen layers. The "
        f"smallest, {smallest}, holds {limits[smallest]} at most. Lower rank to {limits[smallest]}."
    ]
