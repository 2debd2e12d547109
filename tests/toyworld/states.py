"""Training that can be stopped at any moment: weights, optimizers and the curve so far, in safetensors files."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file


class Optimizer:
    """Muon for the matrices (convolutions as matrices), AdamW for the rest; the learning rate is given per step.

    Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the rates are made
    comparable with AdamW's as in Liu et al., "Muon is Scalable for LLM Training", 2025.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], others: list[torch.nn.Parameter]) -> None:
        self._matrices = matrices
        # Muon takes matrices alone; these are copies of the parameters they stand for.
        self._flat = [torch.nn.Parameter(matrix.detach().flatten(1).clone()) for matrix in matrices]
        self.muon = torch.optim.Muon(self._flat, lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, rate: float, share: float = 1.0) -> None:
        """Apply the gradients and clear them: Muon at the learning rate ``rate``, AdamW at ``share`` of it."""
        for flat, matrix in zip(self._flat, self._matrices, strict=True):
            assert matrix.grad is not None
            flat.data.copy_(matrix.detach().flatten(1))
            flat.grad = matrix.grad.flatten(1)
        for optimizer in (self.muon, self.adamw):
            for group in optimizer.param_groups:
                group["lr"] = rate if optimizer is self.muon else rate * share
            optimizer.step()
        for flat, matrix in zip(self._flat, self._matrices, strict=True):
            matrix.data.copy_(flat.detach().view(matrix.shape))
        for parameter in (*self._matrices, *self.adamw.param_groups[0]["params"]):
            parameter.grad = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return its whole state, under names of its own."""
        named = {}
        for name, optimizer in (("muon", self.muon), ("adamw", self.adamw)):
            for index, state in optimizer.state_dict()["state"].items():
                named |= {f"{name}.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
        return named

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take up the state that ``tensors`` returned."""
        for name, optimizer in (("muon", self.muon), ("adamw", self.adamw)):
            whole = optimizer.state_dict()
            states: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in tensors.items():
                owner, _, rest = key.partition(".")
                if owner == name:
                    index, _, entry = rest.partition(".")
                    states.setdefault(int(index), {})[entry] = value
            optimizer.load_state_dict({**whole, "state": states})


class OtherRecipeError(ValueError):
    """A training on disk was made by another recipe and can't go on."""


@dataclass
class Run:
    """A training run on disk: its file, the step it has reached, its curve and the processor seconds it took.

    ``recipe`` stands for everything that decides what is learned (see ``digest``). A run by another is not taken up;
    None takes up any, to read what it was.
    """

    file: Path
    recipe: str | None = None
    step: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)

    def save(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write everything; a run that is cut off here leaves the earlier file whole."""
        about = {"step": str(self.step), "seconds": str(self.seconds), "curve": json.dumps(self.curve)}
        write(self.file, tensors, about | {"recipe": str(self.recipe)})

    def load(self) -> dict[str, torch.Tensor] | None:
        """Return what the last ``save`` wrote and take up its step and curve; None if there is nothing.

        Raises:
            OtherRecipeError: the file was written by another recipe.
        """
        if not self.file.is_file():
            return None
        with safe_open(self.file, "pt") as stored:
            about = stored.metadata()
            if self.recipe not in (None, about.get("recipe")):
                raise OtherRecipeError(f"{self.file} was trained on other scenes or with other settings: move it away.")
            tensors = {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118
        self.step, self.seconds = int(about["step"]), float(about["seconds"])
        self.curve = [(int(step), float(loss)) for step, loss in json.loads(about["curve"])]
        return tensors

    def note(self, step: int, loss: torch.Tensor, what: str) -> None:
        """Add a step's loss to the curve; print where the training is, now and then."""
        self.curve.append((step, float(loss.detach())))
        if step % 100 == 0:
            recent = [value for _, value in self.curve[-100:]]
            print(f"{what}: step {step}, loss {sum(recent) / len(recent):.4f}", flush=True)

    def steps(self, until: int, keep: Callable[[], dict[str, torch.Tensor]], every: int = 200) -> Iterator[int]:
        """Yield each step still to be made and save the state ``keep`` returns at every ``every``th and at the end."""
        clock = os.times()
        for step in range(self.step, until):
            yield step
            self.step = step + 1
            if self.step % every == 0 or self.step == until:
                now = os.times()
                self.seconds += now.user + now.system - clock.user - clock.system
                clock = now
                self.save(keep())


def write(file: Path, tensors: dict[str, torch.Tensor], about: dict[str, str]) -> None:
    """Write tensors and what is said about them; whoever reads the file finds the old one or the new one, whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial, about)
    os.replace(partial, file)


def digest(*parts: object) -> str:
    """Return a checksum of settings, arrays and tensors: what decides a training, in one word."""
    whole = hashlib.sha256()
    for part in parts:
        array = part.detach().float().numpy() if isinstance(part, torch.Tensor) else part
        whole.update(array.tobytes() if isinstance(array, np.ndarray) else repr(array).encode())
    return whole.hexdigest()[:16]


def cosine(step: int, total: int, peak: float, warmup: int = 50, floor: float = 0.02) -> float:
    """Return the learning rate of a step: linear to ``peak``, then half a cosine down to ``floor`` of it."""
    if step < warmup:
        return peak * (step + 1) / warmup
    share = (step - warmup) / max(1, total - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share)))
