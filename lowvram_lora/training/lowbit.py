"""AdamW for parameters or moments in bfloat16, which has 8 bits of precision.

A usual step changes a parameter by less than half of its last bit, so rounding to the nearest would never change it.
Rounded up or down by chance, in proportion to the distance, every value is right on average (Gupta et al., Deep
Learning with Limited Numerical Precision, arXiv:1502.02551).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn

from ..ports import Transfers
from .moments import Chunk, Moments, views


def round_stochastically_(values: Tensor, noise: Tensor, generator: torch.Generator | None) -> Tensor:
    """Round float32 ``values`` in place to numbers that bfloat16 holds; each is right on average.

    bfloat16 is the upper half of a float32's bits. A random number added to the lower half carries over as often as
    the value is above the number below it.

    Args:
        noise: int32 memory of the same size to write over.
    """
    noise.random_(0, 1 << 16, generator=generator)
    values.view(torch.int32).add_(noise).bitwise_and_(-(1 << 16))
    return values


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with stochastic rounding, computed in float32.

    It works through the parameters a chunk at a time, in memory for one chunk that it takes before it changes
    anything, so that a device short of memory can't stop it half-way. A step's moments are used before they are
    rounded.

    Args:
        dtype: of the moments, float32 or bfloat16. The parameters may be either too.
        transfers: by which the moments wait in RAM from the start; None leaves them on the device.
        seed: decides the rounding on this kind of device; the global generator is left as it was.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        transfers: Transfers | None = None,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for parameter in parameters:
            self.state[parameter]["step"] = 0
        self.moments = Moments(self.state, parameters, dtype, transfers)
        device = parameters[0].device
        # Tensors without data draw nothing.
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what ``closure`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # The schedule and the scaler know of one group, and so does this.
        (group,) = self.param_groups
        device = group["params"][0].device
        work = torch.empty(4, self.moments.largest, dtype=torch.float32, device=device)

        def update(chunk: Chunk) -> None:
            for first, run, steps in self._runs(chunk):
                self._update(chunk, first, run, work, {**group, "step": steps})

        self.moments.each(update)
        return loss

    def _runs(self, chunk: Chunk) -> Iterator[tuple[int, list[Tensor], int]]:
        """Yield neighbours that have a gradient and as many steps behind them, from where in the chunk; count this."""
        offsets = accumulate((parameter.numel() for parameter in chunk.parameters), initial=0)
        pairs = zip(offsets, chunk.parameters, strict=False)
        for steps, run in groupby(pairs, lambda pair: None if pair[1].grad is None else self.state[pair[1]]["step"]):
            places, parameters = zip(*run, strict=True)
            if steps is not None:
                for parameter in parameters:
                    self.state[parameter]["step"] = steps + 1
                yield places[0], list(parameters), steps + 1

    def _update(self, chunk: Chunk, first: int, run: list[Tensor], work: Tensor, options: dict[str, Any]) -> None:
        beta1, beta2 = options["betas"]
        size = sum(parameter.numel() for parameter in run)
        gradient, weights, exp_avg, exp_avg_sq = work[:, :size]
        assert chunk.flat is not None
        stored = [half[first : first + size] for half in chunk.flat.chunk(2)]
        if chunk.flat.dtype == torch.float32:
            exp_avg, exp_avg_sq = stored
        else:
            exp_avg.copy_(stored[0])
            exp_avg_sq.copy_(stored[1])
        shaped = views(weights, run)
        torch._foreach_copy_(shaped, run)
        torch._foreach_copy_(views(gradient, run), [parameter.grad for parameter in run if parameter.grad is not None])

        exp_avg.lerp_(gradient, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # The gradient is not needed any more: its memory takes the denominator, then the noise.
        spread = math.sqrt(1 - beta2 ** options["step"])
        denominator = torch.sqrt(exp_avg_sq, out=gradient).div_(spread).add_(options["eps"])
        weights.mul_(1 - options["lr"] * options["weight_decay"])
        weights.addcdiv_(exp_avg, denominator, value=-options["lr"] / (1 - beta1 ** options["step"]))

        noise = gradient.view(torch.int32)
        if chunk.flat.dtype != torch.float32:
            stored[0].copy_(round_stochastically_(exp_avg, noise, self._generator))
            stored[1].copy_(round_stochastically_(exp_avg_sq, noise, self._generator))
        if run[0].dtype != torch.float32:
            round_stochastically_(weights, noise, self._generator)
        torch._foreach_copy_(run, shaped)
