"""Which layers a preset adapts, judged by their place in the network."""

import math
import re
from typing import Any

from torch import nn

from ..config import Targets
from ..errors import NothingToTrainError
from ..memory.frozen import is_conv, is_linear, matrices, why_not

_ATTENTION = re.compile(r"(^|\.)\w*att(n|ention)\w*\.|(^|\.)single_blocks\.\d+\.linear[12]$")
_FEED_FORWARD = re.compile(r"(^|\.)(ff\w*|\w*mlp\w*|feed_forward)\.")
# Timestep and text embedders hold small MLPs that belong to no transformer block.
_EMBEDDER = re.compile(r"(^|\.)\w*embed\w*\.")
MIN_CONV_CHANNELS = 32


def select(network: nn.Module, targets: Targets) -> dict[str, nn.Module]:
    """Return the layers that ``targets`` adapts, by path.

    Raises:
        NothingToTrainError: the preset matches no layer.
    """
    layers = dict(matrices(network))
    chosen = {path: module for path, module in layers.items() if _matches(path, module, targets)}
    if not chosen:
        raise NothingToTrainError(targets, len(layers))
    return chosen


def _matches(path: str, module: nn.Module, targets: Targets) -> bool:
    if targets == "all linear + conv":
        return is_linear(module) or _is_adaptable_conv(module)
    if not is_linear(module):
        return False
    if targets == "all linear":
        return True
    if _EMBEDDER.search(path):
        return False
    in_attention = _ATTENTION.search(path) is not None
    return in_attention or (targets != "attention" and _FEED_FORWARD.search(path) is not None)


def _is_adaptable_conv(module: Any) -> bool:
    """PEFT's convolution adapter knows no groups, dilation or transposition.

    The first and the last convolution only translate between latents and features, with too few channels for any
    usual rank; kohya leaves them out too.
    """
    if not is_conv(module) or why_not(module) or module.transposed:
        return False
    if min(module.in_channels, module.out_channels) < MIN_CONV_CHANNELS:
        return False
    return bool(module.groups == 1 and all(step == 1 for step in module.dilation))


def rank_limit(module: Any) -> int:
    """Return the largest rank that a delta of this layer's weight can have."""
    if is_linear(module):
        return min(int(module.in_features), int(module.out_features))
    fan_in = int(module.in_channels) * math.prod(int(side) for side in module.kernel_size)
    return min(fan_in, int(module.out_channels))
