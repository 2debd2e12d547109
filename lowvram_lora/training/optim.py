"""Optimizer and learning-rate schedule from flat settings."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..config import OptimConfig

# The optimizers torch ships a fused kernel for; elsewhere the ordinary one serves.
_FUSED_DEVICES = ("cpu", "cuda")


def build_optimizer(parameters: Sequence[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW over float32 ``parameters``."""
    fused = parameters[0].device.type in _FUSED_DEVICES
    return torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=fused)


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, steps: int) -> Any:
    """Return the learning-rate schedule (diffusers), linear warm-up included, over ``steps`` optimizer steps."""
    from diffusers.optimization import get_scheduler

    name = config.schedule
    if name == "constant" and config.warmup_steps:
        return get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=config.warmup_steps)
    return get_scheduler(name, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=steps)
