"""Optimizer and learning-rate schedule from flat settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..config import OptimConfig
from ..memory.setting import Setting
from ..ports import Transfers
from .lowbit import RoundedAdamW
from .moments import Chunk, Moments

# The optimizers torch ships a fused kernel for; elsewhere the ordinary one serves.
_FUSED_DEVICES = ("cpu", "cuda")


class PlainAdamW(torch.optim.AdamW):
    """torch's AdamW, with all of its state there before the first step.

    A state that waits in RAM is brought in parts, each to the same memory, which is taken before anything changes. So
    a device short of memory can't stop an update half-way where torch has a kernel that needs none of its own.

    Attributes:
        moments: its state, which may wait in RAM between steps.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, lr: float, weight_decay: float, transfers: Transfers | None = None
    ) -> None:
        device = parameters[0].device
        is_fused = device.type in _FUSED_DEVICES
        # torch's choice, but without data there is nothing to be fast about.
        foreach = False if device.type == "meta" else None
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, fused=is_fused, foreach=foreach)
        # Where torch keeps its step counts; of numbers without data it could read none.
        counts = torch.zeros(len(parameters), dtype=torch.float32, device=device if is_fused else "cpu")
        for number, parameter in enumerate(parameters):
            self.state[parameter]["step"] = counts[number]
        self.moments = Moments(self.state, parameters, parameters[0].dtype, transfers)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what ``closure`` does."""
        if not self.moments.are_in_ram:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # The schedule and the scaler know of one group, and so does this.
        (group,) = self.param_groups
        everything = group["params"]
        try:
            self.moments.each(self._update)
        finally:
            group["params"] = everything
        return loss

    def _update(self, chunk: Chunk) -> None:
        """Let torch do its step as if there were no other parameters."""
        self.param_groups[0]["params"] = chunk.parameters
        super().step()


Optimizer = PlainAdamW | RoundedAdamW


def build_optimizer(
    parameters: Sequence[nn.Parameter],
    config: OptimConfig,
    setting: Setting | None = None,
    *,
    seed: int = 0,
    transfers: Transfers | None = None,
) -> Optimizer:
    """Return AdamW over ``parameters``, its state made already, where ``setting`` wants it.

    Args:
        setting: decides the state's type and place; the parameters have theirs already.
        seed: decides how bfloat16 is rounded.
        transfers: needed where the state is to wait in RAM.
    """
    setting = setting or Setting()
    assert transfers is not None or not setting.optimizer_in_ram, "a state can't go to RAM without transfers"
    waiting = transfers if setting.optimizer_in_ram else None
    rate, decay = config.learning_rate, config.weight_decay
    if torch.bfloat16 in (parameters[0].dtype, setting.optimizer_dtype):
        return RoundedAdamW(
            parameters, lr=rate, weight_decay=decay, dtype=setting.optimizer_dtype, seed=seed, transfers=waiting
        )
    return PlainAdamW(parameters, lr=rate, weight_decay=decay, transfers=waiting)


def place_state(optimizer: Optimizer, setting: Setting, transfers: Transfers | None) -> None:
    """Let the optimizer's state stay where ``setting`` wants it from now on, between steps too; no number changes."""
    if not setting.optimizer_in_ram:
        optimizer.moments.keep_on_device()
    else:
        assert transfers is not None, "a state can't go to RAM without transfers"
        optimizer.moments.keep_in_ram(transfers)


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, steps: int) -> Any:
    """Return the learning-rate schedule (diffusers), linear warm-up included, over ``steps`` optimizer steps."""
    from diffusers.optimization import get_scheduler

    name = config.schedule
    if name == "constant" and config.warmup_steps:
        return get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=config.warmup_steps)
    return get_scheduler(name, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=steps)
