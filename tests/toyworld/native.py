"""The host's own Train LoRA node as the judge runs it: batches of 1, since its larger ones are at fault.

Float32 throughout and no recompute, which is the best it can do. It adapts every layer and every bias, with alpha 1,
and minimises the error of the clean latents without a weight: all its own choices, and so is how it draws samples. As
it takes one step for each picture, it takes ``BATCH`` times as many steps as the others for the same number of samples.
"""

from __future__ import annotations

import itertools
import statistics
import time
import warnings

import torch

from .task import RANK, Task, Taught, fresh_model


def train(task: Task, rate: float, seed: int) -> Taught:
    """Train on the task's pictures, one at a time."""
    import comfy.utils
    from comfy_extras.nodes_train import TrainLoraNode

    times: list[float] = []
    defaults = {i.id: getattr(i, "default", None) for i in TrainLoraNode.define_schema().inputs}
    values = {
        **defaults,
        "model": fresh_model(),
        "steps": task.samples,
        "rank": RANK,
        "learning_rate": rate,
        "seed": seed,
        "training_dtype": "fp32",
        "lora_dtype": "fp32",
        "gradient_checkpointing": False,
        "existing_lora": "[None]",
    }
    # The node takes every input as a list.
    inputs = {name: [value] for name, value in values.items()}
    inputs["latents"] = [{"samples": latents[None]} for latents in task.latents]
    inputs["positive"] = list(task.texts)
    comfy.utils.set_progress_bar_global_hook(lambda *_args, **_kwargs: times.append(time.perf_counter()))
    try:
        # Which picture, which noise level and the first weights come from torch's own generator.
        with torch.random.fork_rng(devices=[]), torch.inference_mode(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="In CPU autocast")
            torch.manual_seed(seed)
            _, lora, loss_map, _ = TrainLoraNode.execute(**inputs).args
    finally:
        comfy.utils.set_progress_bar_global_hook(None)
    steps = [after - before for before, after in itertools.pairwise(times)]
    tensors = {name: tensor.detach().clone() for name, tensor in lora.items()}
    return Taught(tensors, tuple(loss_map["loss"]), statistics.median(steps) if steps else 0.0)
