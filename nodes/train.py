"""LoRA Train (low-VRAM)."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import closing
from functools import partial
from typing import Any

from comfy_api.latest import io

from ..lowvram_lora import config as cfg
from ..lowvram_lora.data.doctor import describe, exposed
from ..lowvram_lora.events import Finished, Lowered, Noted, Planning, Started, Stepped, Validated
from ..lowvram_lora.training.job import Job
from ..lowvram_lora.training.report import describe_run
from ..lowvram_lora.training.run import run
from ..lowvram_lora.units import format_duration
from . import _host
from ._models import HostDenoiser, with_lora

LOG = logging.getLogger(__name__)
_TRAIN, _LORA, _OPTIM = cfg.TrainConfig(), cfg.LoraConfig(), cfg.OptimConfig()


class LoraTrain(io.ComfyNode):
    """Trains a LoRA on the MODEL that is already loaded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's inputs and outputs; saved workflows depend on their names and order."""
        return _host.schema(
            node_id="LowVRAMLoRATrain",
            display_name="LoRA Train (low-VRAM)",
            description="Trains a LoRA on the checkpoint that is already loaded, and writes it to models/loras.",
            is_output_node=True,
            inputs=[
                *_main_inputs(),
                *_network_inputs(),
                *_optimizer_inputs(),
                *_other_inputs(),
                *_function_inputs(),
            ],
            outputs=[
                io.Model.Output("model_out", display_name="MODEL", tooltip="MODEL with the LoRA applied."),
                io.Custom("LORA_MODEL").Output("lora", display_name="LORA_MODEL"),
                io.Custom("LOSS_MAP").Output("loss_map", display_name="LOSS_MAP"),
                io.String.Output("report", display_name="report"),
            ],
        )

    @classmethod
    def execute(cls, model: Any, batches: Any, **widgets: Any) -> io.NodeOutput:
        """Train, or return the finished run of the unchanged graph."""
        config = _config(widgets)
        progress = _host.Progress(config.steps, cls.hidden.unique_id)
        job = Job(
            denoiser=HostDenoiser(model),
            recipe=batches,
            config=config,
            hardware=_host.ProcessHardware(model.load_device),
            cancel=_host.InterruptButton(),
            loras_root=_host.loras_root(),
            store=_host.run_store(),
            say=progress.say,
            transfers=partial(_host.transfers, model.load_device),
        )
        with _host.outside_inference_mode():
            followed = _follow(job, progress)
        finished, record = followed.finished, followed.finished.record
        notes = (*followed.notes, *_foreseen(batches, config, record.metadata))
        report = describe_run(record, finished.path, followed.plan, notes, finished.reused)
        outputs = with_lora(model, record.lora), record.lora, {"loss": list(record.losses)}
        return _host.reported(*outputs, report=report, node_id=cls.hidden.unique_id)


def _foreseen(batches: Any, config: cfg.TrainConfig, metadata: dict[str, str]) -> list[str]:
    """Return what the doctor says once the steps are known, and how large batches really were."""
    draws, num_batches = (int(metadata[f"ss_num_{name}"]) for name in ("train_images", "batches_per_epoch"))
    found = exposed(batches.cache.entries, config.steps, config.optim.accumulation * draws / num_batches)
    return [describe(found)] if found else []


@dataclasses.dataclass(frozen=True)
class _Followed:
    """What remains of a run's events."""

    finished: Finished
    plan: str
    notes: tuple[str, ...]


def _follow(job: Job, progress: _host.Progress) -> _Followed:
    """Run ``job`` and show each event on the node."""
    plan, notes = "", []
    with closing(run(job)) as events:
        for event in events:
            if isinstance(event, Planning):
                progress.update(0, "Working out how the job fits into memory ...")
            elif isinstance(event, Started):
                plan, notes = event.plan, list(event.notes)
                LOG.info("Training %d layers in %s\n%s", event.num_layers, event.precision, plan)
                progress.update(0, plan)
            elif isinstance(event, Noted):
                LOG.info("%s", event.text)
                notes.append(event.text)
            elif isinstance(event, Lowered):
                plan = event.plan
                notes.append(f"Memory ran out at step {event.step}; it was repeated with the plan below.")
                LOG.warning("%s (%s)\n%s", notes[-1], event.cause, plan)
            elif isinstance(event, Stepped):
                if event.alarm and not any(note.startswith("Step ") for note in notes):
                    LOG.warning("%s", event.alarm)
                    notes.append(event.alarm)
                progress.update(event.step, f"{_line(event)}\n{plan}")
            elif isinstance(event, Validated):
                progress.update(event.done, f"loss on held-out pictures {event.loss:.4f}\n{plan}")
            elif isinstance(event, Finished):
                return _Followed(event, plan, (*notes, *event.reading))
    raise AssertionError("a run ends with Finished or an error")


def _line(event: Stepped) -> str:
    left = format_duration(event.remaining_s)
    return (
        f"step {event.step}/{event.steps} · loss {event.loss:.4f} · {event.seconds_per_step:.2f} s/step · {left} left"
    )


def _config(widgets: dict[str, Any]) -> cfg.TrainConfig:
    """Sort the node's widgets into the settings they belong to."""
    optim = _picked(widgets, cfg.OptimConfig)
    if "gradient_accumulation" in widgets:
        optim["accumulation"] = widgets["gradient_accumulation"]
    return cfg.TrainConfig(
        **_picked(widgets, cfg.TrainConfig),
        lora=cfg.LoraConfig(**_picked(widgets, cfg.LoraConfig)),
        optim=cfg.OptimConfig(**optim),
    )


def _picked(widgets: dict[str, Any], settings: type) -> dict[str, Any]:
    return {f.name: widgets[f.name] for f in dataclasses.fields(settings) if f.name in widgets}


def _main_inputs() -> list[Any]:
    return [
        io.Model.Input("model", tooltip="The loaded checkpoint to train on; it is left as it is."),
        io.Custom("LOWVRAM_BATCHES").Input("batches", tooltip="From Sparse Batch Sampler."),
        io.Int.Input("steps", default=_TRAIN.steps, min=1, max=1_000_000, tooltip="Updates of the LoRA in all."),
        io.Float.Input(
            "learning_rate",
            default=_OPTIM.learning_rate,
            min=1e-9,
            max=1e9,
            step=1e-6,
            round=False,
            tooltip="How far each step goes. Too high and training falls apart; it then stops and says so.",
        ),
        io.Int.Input("rank", default=_LORA.rank, min=1, max=4096, tooltip="Size of the LoRA: more holds more detail."),
        io.Float.Input(
            "alpha",
            default=_LORA.alpha,
            min=0.01,
            max=4096.0,
            step=0.5,
            tooltip="The LoRA's strength is alpha / rank.",
        ),
        io.Float.Input(
            "vram_budget_gb",
            default=_TRAIN.vram_budget_gb,
            min=0.0,
            max=1024.0,
            step=0.05,
            round=0.01,
            tooltip="GiB of VRAM the run may use; 0 takes what is free. A plan is made before the first step.",
        ),
        io.String.Input(
            "output_name",
            default=_TRAIN.output_name,
            tooltip="File name in models/loras; subfolder/name works too.",
        ),
        io.Int.Input(
            "seed",
            default=_TRAIN.seed,
            min=0,
            max=cfg.MAX_SEED,
            control_after_generate=False,
            tooltip="Decides the first weights and the noise; the same seed repeats the run.",
        ),
    ]


def _network_inputs() -> list[Any]:
    return [
        _host.choice("targets", cfg.Targets, _LORA.targets, "Which layers get an adapter.", optional=True),
        _host.choice(
            "precision",
            cfg.Precision,
            _TRAIN.precision,
            "The network's arithmetic; adapters stay float32.",
            optional=True,
        ),
        io.Boolean.Input(
            "recompute",
            default=_TRAIN.recompute,
            optional=True,
            tooltip="Blocks may run again in the backward pass where memory is short: far less memory, more time.",
        ),
    ]


def _optimizer_inputs() -> list[Any]:
    return [
        _host.choice(
            "schedule", cfg.Schedule, _OPTIM.schedule, "How the learning rate falls over the run.", optional=True
        ),
        io.Int.Input(
            "warmup_steps",
            default=_OPTIM.warmup_steps,
            min=0,
            max=1_000_000,
            optional=True,
            tooltip="Steps over which the learning rate rises from 0.",
        ),
        io.Int.Input(
            "gradient_accumulation",
            default=_OPTIM.accumulation,
            min=1,
            max=4096,
            optional=True,
            tooltip="Batches that make one step: a larger batch for no more VRAM, in more time.",
        ),
        io.Float.Input(
            "max_grad_norm",
            default=_OPTIM.max_grad_norm,
            min=0.0,
            max=1e6,
            step=0.1,
            optional=True,
            tooltip="Gradients above this norm are scaled down to it; 0 turns clipping off.",
        ),
        io.Float.Input(
            "weight_decay",
            default=_OPTIM.weight_decay,
            min=0.0,
            max=10.0,
            step=0.001,
            optional=True,
            tooltip="AdamW's pull of the LoRA towards nothing.",
        ),
    ]


def _other_inputs() -> list[Any]:
    return [
        io.Boolean.Input(
            "overwrite",
            default=_TRAIN.overwrite,
            optional=True,
            tooltip="Replace a LoRA of the same name. Off: the next free name is taken.",
        ),
        io.Boolean.Input(
            "allow_lossy",
            default=_TRAIN.allow_lossy,
            optional=True,
            tooltip="If nothing else fits the budget, change the job: bf16 optimizer, smaller pictures, lower rank.",
        ),
    ]


def _function_inputs() -> list[Any]:
    """What makes the network another function than its own; off by default."""
    return [
        io.Int.Input(
            "local_attention_tokens",
            default=_TRAIN.local_attention_tokens,
            min=0,
            max=1 << 20,
            optional=True,
            tooltip="Above so many image tokens self-attention sees windows, not the whole picture; 0 is never.",
        ),
        io.Int.Input(
            "local_attention_window",
            default=_TRAIN.local_attention_window,
            min=1,
            max=1024,
            optional=True,
            tooltip="Tokens a side of such a window.",
        ),
        io.Boolean.Input(
            "dynamic_text",
            default=_TRAIN.dynamic_text,
            optional=True,
            tooltip="Leave out the padding behind captions that the network was made to see (T5 of Flux, SD3, Wan).",
        ),
    ]
