"""The plainest LoRA training there is: PEFT's layers in a float32 copy of the network, torch's autograd, AdamW.

Nothing of our package is used but to count bytes. The recipe is that of our defaults: uniform draws from the model's
own table of noise levels, the squared error of the velocity (Esser et al., "Scaling Rectified Flow Transformers for
High-Resolution Image Synthesis", 2024), AdamW with weight decay 0.01, gradients clipped at norm 1, the rate falling as
a cosine.
"""

from __future__ import annotations

import copy
import math
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .task import ALPHA, BATCH, RANK, Task, Taught, fresh_model

LAYER = re.compile(r"joint_blocks\.\d+\.\w+\.(attn\.(qkv|proj)|mlp\.fc[12])")
LEAST_SIGMA = 1e-3
ADAPTER = "default"


def train(task: Task, rate: float, seed: int) -> Taught:
    """Train on the task's pictures in batches of ``BATCH``."""
    return fit(fresh_model(), task, rate, seed)


def fit(model: Any, task: Task, rate: float, seed: int) -> Taught:
    """Train on the host's MODEL, which stays as it is."""
    steps = task.samples // BATCH
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = adapted(model.model.diffusion_model)
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
        falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
        losses, seconds = [], []
        for clean, noise, sigmas, context, pooled in batches(model, task, steps, seed):
            began = time.perf_counter()
            loss = flow_loss(network, clean, noise, sigmas, context, pooled)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            falling.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            seconds.append(time.perf_counter() - began)
    return Taught(state(network), tuple(losses), statistics.median(seconds))


def live_bytes(task: Task) -> int:
    """Return the most bytes of tensors at once in two steps of this loop: weights, captions of a batch, all of it."""
    from lowvram_lora.memory.simulate import LiveBytes

    model = fresh_model()
    with LiveBytes("cpu") as counter:
        fit(model, replace(task, samples=2 * BATCH), 1e-3, 0)
    return counter.peak


def adapted(network: nn.Module) -> nn.Module:
    """Return a float32 copy of the network with PEFT's layers in it, which alone are trained."""
    from peft import LoraConfig, inject_adapter_in_model

    plain = copy.deepcopy(network).float().requires_grad_(False)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets(plain))
    return inject_adapter_in_model(config, plain, ADAPTER)


def targets(network: nn.Module) -> list[str]:
    """Return the names of the linear layers of attention and feed-forward, of both streams."""
    return [name for name, _ in network.named_modules() if LAYER.fullmatch(name)]


def batches(model: Any, task: Task, steps: int, seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield scaled latents, noise, noise levels, context and pooled vectors; every epoch shows each picture once."""
    generator = torch.Generator().manual_seed(seed)
    latents = model.model.process_latent_in(task.latents.float())
    table = model.model.model_sampling.sigmas
    order: list[int] = []
    for _ in range(steps):
        if len(order) < BATCH:
            order += torch.randperm(len(latents), generator=generator).tolist()
        chosen, order = order[:BATCH], order[BATCH:]
        noise = torch.randn(latents[chosen].shape, generator=generator)
        sigmas = table[torch.randint(len(table), (BATCH,), generator=generator)].clamp(min=LEAST_SIGMA)
        said = [task.texts[number][0] for number in chosen]
        context, pooled = torch.cat([text for text, _ in said]), torch.cat([more["pooled_output"] for _, more in said])
        yield latents[chosen], noise, sigmas, context, pooled


def flow_loss(
    network: nn.Module,
    clean: torch.Tensor,
    noise: torch.Tensor,
    sigmas: torch.Tensor,
    context: torch.Tensor,
    pooled: torch.Tensor,
) -> torch.Tensor:
    """Return the mean squared error of the predicted velocity, ``noise - clean``."""
    share = sigmas[:, None, None, None]
    noised = (1 - share) * clean + share * noise
    options = {"optimized_attention_override": _attention}
    predicted = network(noised, sigmas * 1000, context=context, y=pooled, transformer_options=options)
    return (predicted - (noise - clean)).square().mean()


def _attention(_: Any, *args: Any, **kwargs: Any) -> Any:
    from comfy.ldm.modules.attention import attention_pytorch

    return attention_pytorch(*args, **kwargs)


def state(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return the adapters by PEFT's names, as the host's own loader takes them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, module in network.named_modules():
        if hasattr(module, "lora_A"):
            layer: Any = module
            tensors[f"diffusion_model.{name}.lora_A.weight"] = layer.lora_A[ADAPTER].weight.detach()
            tensors[f"diffusion_model.{name}.lora_B.weight"] = layer.lora_B[ADAPTER].weight.detach()
            tensors[f"diffusion_model.{name}.alpha"] = torch.tensor(ALPHA)
    return tensors
