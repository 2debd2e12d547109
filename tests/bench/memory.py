"""Device memory of one training step at full size, simulated: no GPU, no weights, every live byte counted."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

TARGETS = {"attn": "attention", "attn-ff": "attention + feed-forward"}
# No budget of interest is near it.
LARGE = 1 << 40


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="dev.py bench memory", description=__doc__)
    parser.add_argument("--model", choices=("sd15", "sdxl", "sd3", "flux"), required=True)
    parser.add_argument("--resolution", type=int, help="pixels a side; 512 for sd15 and 1024 for the others by default")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", choices=tuple(TARGETS), default="attn-ff")
    parser.add_argument("--residency", choices=("resident", "streamed", "auto"), default="auto")
    parser.add_argument("--budget-gb", type=float, default=0.0, help="for auto: what the plan must fit into")
    for name in ("no-recompute", "keep-convolutions", "whole-blocks"):
        parser.add_argument(f"--{name}", action="store_true", help="for resident and streamed")
    for name in ("inputs-in-ram", "optimizer-in-ram", "chunks"):
        how = argparse.BooleanOptionalAction
        parser.add_argument(f"--{name}", action=how, help="on for streamed unless said otherwise, off for resident")
    for name in ("bf16-state", "bf16-adapters"):
        parser.add_argument(f"--{name}", action="store_true", help="lossy")
    parser.add_argument("--peaks", type=int, default=0, help="also print this many of the highest peaks by block")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    options.resolution = options.resolution or usual_resolution(options.model)
    for name in ("inputs_in_ram", "optimizer_in_ram", "chunks"):
        if getattr(options, name) is None:
            setattr(options, name, options.residency == "streamed")
    return options


def main(arguments: list[str]) -> int:
    """Simulate one step and print what it takes."""
    from tests.bench import _full_size

    options = parse(arguments)
    pack = _full_size.enter_host()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        job = full_size_job(pack, options.model, options, Path(folder))
        try:
            result = measure(pack, job, options)
        except pack.lowvram_lora.errors.LowVramLoraError as refused:
            print(refused, file=sys.stderr)
            return 1
        result["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(result) if options.json else "\n".join(f"{name:18} {value}" for name, value in result.items()))
    return 0


def usual_resolution(model: str) -> int:
    """Return the pixels a side that ``model`` was made for."""
    return 512 if model == "sd15" else 1024


def full_size_job(pack: Any, family: str, options: argparse.Namespace, folder: Path) -> Any:
    """Return a job on a network of ``family`` without memory, on a device of a made-up size."""
    from tests.bench import _full_size

    core = pack.lowvram_lora
    index = _full_size.cache(pack, family, options.resolution, options.batch, folder)
    return core.training.job.Job(
        denoiser=pack.nodes._models.HostDenoiser(_full_size.model(family)),
        recipe=core.data.batches.BatchRecipe(index, core.config.SamplerConfig(batch_size=options.batch)),
        config=core.config.TrainConfig(
            precision="bf16",
            vram_budget_gb=options.budget_gb,
            lora=core.config.LoraConfig(rank=options.rank, targets=TARGETS[options.targets]),
        ),
        hardware=core.fakes.FakeHardware(available_bytes=LARGE, total_bytes=LARGE),
        cancel=core.fakes.FakeCancel(),
        loras_root=folder,
        store=core.training.record.RunStore(folder / "runs"),
    )


def measure(pack: Any, job: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return the peak of one step, and where it is."""
    core = pack.lowvram_lora
    network = job.denoiser.network
    layers = core.adapters.targets.select(network, job.config.lora.targets)
    prepare = core.training.prepare
    if options.residency == "auto":
        prepared = prepare.prepare(job, layers, "bf16", prepare.device_facts(job))
    else:
        prepared = prepare.Prepared(
            config=job.config,
            precision="bf16",
            samples=prepare.samples_of(job),
            setting=fixed_setting(core, job, options),
            wishes=prepare.wishes_of(job.config, "bf16"),
            device=prepare.device_facts(job),
        )
    run = prepare.simulated(job, layers, prepared)
    counter = run.counter
    weights = sum(t.nbytes for _, m in core.memory.frozen.matrices(network) for t in job.denoiser.weights.payload(m))
    result = {
        "weights_mib": mib(weights),
        "resident_mib": mib(run.resident_bytes - prepared.setting.ring_bytes),
        "ring_mib": mib(prepared.setting.ring_bytes),
        "device_peak_mib": mib(counter.peak),
        "phase": counter.peak_phase,
        "block": counter.peak_block,
        "adapters_mib": mib(run.adapter_bytes),
        "small_mib": mib(run.small_bytes),
        "tflops": round(sum(count.flops for count in counter.counts.values()) / 1e12, 3),
    }
    if options.peaks:
        highest = sorted(counter.counts.items(), key=lambda item: -item[1].peak)[: options.peaks]
        result["peaks"] = {f"{path or '(outside)'} {phase}": mib(count.peak) for (path, phase), count in highest}
    if prepared.plan is not None and not options.json:
        print(prepared.table)
    return result


def mib(num_bytes: int) -> float:
    """Return bytes as MiB."""
    return round(num_bytes / (1 << 20), 1)


def fixed_setting(core: Any, job: Any, options: argparse.Namespace) -> Any:
    """Return the setting that the flags describe."""
    import torch

    network, payload = job.denoiser.network, job.denoiser.weights.payload
    sizes = {p: core.training.estimate.payload_bytes(payload(m)) for p, m in core.memory.frozen.matrices(network)}
    blocks = core.memory.recompute.find_blocks(network)
    is_streamed = options.residency == "streamed"
    ring = 2 * max(sizes.values())
    if options.whole_blocks:
        ring = 2 * max(sum(size for path, size in sizes.items() if path.startswith(f"{block}.")) for block in blocks)
    return replace(
        core.memory.setting.Setting(),
        resident=frozenset() if is_streamed else frozenset(sizes),
        ring_bytes=ring if is_streamed else 0,
        kept=frozenset(blocks) if options.no_recompute else frozenset(),
        inputs_in_ram=options.inputs_in_ram,
        optimizer_in_ram=options.optimizer_in_ram,
        keep_convolutions=options.keep_convolutions,
        chunked=frozenset(blocks) if options.chunks else frozenset(),
        optimizer_dtype=torch.bfloat16 if options.bf16_state else torch.float32,
        adapter_dtype=torch.bfloat16 if options.bf16_adapters else torch.float32,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
