"""What a LoRA file says about itself: kohya's ``ss_*`` keys and ModelSpec 1.0.1."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from ..adapters.file import FINGERPRINT_KEY, as_json
from ..config import TrainConfig
from ..data.batches import BatchRecipe
from ..ports import Denoiser

_ARCHITECTURES = {
    "sd_v1": "stable-diffusion-v1",
    "sdxl_base_v1-0": "stable-diffusion-xl-v1-base",
    "sd3": "stable-diffusion-3-medium",
    "flux1": "flux-1-dev",
}


def describe(
    denoiser: Denoiser,
    recipe: BatchRecipe,
    config: TrainConfig,
    precision: str,
    fingerprint: str,
    changes: Sequence[str] = (),
) -> dict[str, str]:
    """Return the metadata that is known before step 1; all values are strings, as safetensors wants them.

    Args:
        changes: what a lossy plan has altered.
    """
    base = denoiser.base_name
    lora, optim = config.lora, config.optim
    values: dict[str, Any] = {
        FINGERPRINT_KEY: fingerprint,
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{_architecture(denoiser)}/lora",
        "modelspec.implementation": "lowvram-lora",
        "modelspec.title": config.output_name,
        "modelspec.prediction_type": denoiser.prediction,
        "ss_base_model_version": base,
        "ss_v2": base == "sd_v2",
        "ss_network_module": "networks.lora",
        "ss_network_dim": lora.rank,
        "ss_network_alpha": lora.alpha,
        "ss_network_args": as_json({"targets": lora.targets}),
        "ss_output_name": config.output_name,
        "ss_learning_rate": optim.learning_rate,
        "ss_unet_lr": optim.learning_rate,
        "ss_lr_scheduler": optim.schedule,
        "ss_lr_warmup_steps": optim.warmup_steps,
        "ss_optimizer": f"torch.optim.AdamW(weight_decay={optim.weight_decay})",
        "ss_gradient_accumulation_steps": optim.accumulation,
        "ss_gradient_checkpointing": config.recompute,
        "ss_max_grad_norm": optim.max_grad_norm,
        "ss_max_train_steps": config.steps,
        "ss_seed": config.seed,
        "ss_mixed_precision": "no" if precision == "fp32" else precision,
        "ss_num_train_images": sum(entry.repeats for entry in recipe.cache.entries),
        "ss_num_batches_per_epoch": recipe.batches_per_epoch,
        "ss_batch_size_per_device": recipe.config.batch_size,
        **({"ss_batch_sizes": as_json(recipe.sizes_by_resolution())} if recipe.sizes else {}),
        **({"ss_training_comment": f"lossy: {', '.join(changes)}"} if changes else {}),
    }
    return {key: str(value) for key, value in values.items()}


def _architecture(denoiser: Denoiser) -> str:
    if denoiser.base_name == "sd_v2":
        return "stable-diffusion-v2-768-v" if denoiser.prediction == "v" else "stable-diffusion-v2-512"
    return _ARCHITECTURES.get(denoiser.base_name, denoiser.base_name)


def at_step(metadata: dict[str, str], started: float, finished: float, steps: int, is_partial: bool) -> dict[str, str]:
    """Return ``metadata`` with what is known once ``steps`` steps are done.

    A partial file carries no fingerprint: it must never be taken for the finished run.
    """
    now = {
        "ss_steps": str(steps),
        "ss_training_started_at": str(started),
        "ss_training_finished_at": str(finished),
        "modelspec.date": datetime.fromtimestamp(finished, timezone.utc).isoformat(timespec="seconds"),
    }
    if not is_partial:
        return {**metadata, **now}
    kept = {key: value for key, value in metadata.items() if key != FINGERPRINT_KEY}
    comments = [f"partial: {steps} of {metadata['ss_max_train_steps']} steps", metadata.get("ss_training_comment")]
    return {**kept, **now, "ss_training_comment": "; ".join(filter(None, comments))}
