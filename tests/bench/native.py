"""The host's own Train LoRA node against ours: seconds a step and memory, on the same full-size SD 1.5.

Every run has a process of its own; the trainers take turns, so that a machine whose speed drifts is fair to all.
Time is measured between the progress updates that both trainers send once a step; the first step is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"ours": "attention + feed-forward", "ours_all": "all linear + conv", "native": ""}
RANK, PIXELS, SEED = 16, 256, 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="dev.py bench native", description=__doc__)
    parser.add_argument("--host", type=Path, help="another ComfyUI folder")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each trainer")
    parser.add_argument("--steps", type=int, default=6, help="steps of each run")
    parser.add_argument("--bypass", action="store_true", help="a newer host's fastest mode: bypass, checkpoint depth 3")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--worker", choices=list(KINDS), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the benchmark, or one worker of it."""
    options = parse(arguments)
    if options.host is not None:
        os.environ["LOWVRAM_HOST"] = str(options.host.resolve())
    if options.worker:
        print(json.dumps(work(options)))
        return 0
    from tests.harness.checkpoint import cached_sd15

    cached_sd15(size="full")
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for number in range(options.rounds):
        for kind in KINDS:
            runs[kind].append(run_worker(kind, options))
            if not options.json:
                seconds = statistics.median(runs[kind][-1]["step_s"])
                print(f"round {number + 1}: {kind} {seconds:.2f} s/step", flush=True)
    result = summary(runs)
    print(json.dumps(result) if options.json else table(result))
    return 0


def run_worker(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one trainer in a fresh process and return what it measured."""
    flags = ["--worker", kind, "--steps", str(options.steps), *(["--bypass"] if options.bypass else [])]
    command = [sys.executable, "-m", "tests.bench.native", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        raise SystemExit(f"{kind} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians with their spread, ratios within a round, and memory."""
    result: dict[str, Any] = {"weights_mib": runs["native"][0]["weights_mib"]}
    medians = {kind: [statistics.median(run["step_s"]) for run in done] for kind, done in runs.items()}
    for kind, done in runs.items():
        result[f"{kind}_s_per_step"] = spread(medians[kind])
        result[f"{kind}_peak_rss_mib"] = max(run["peak_mib"] for run in done)
        result[f"{kind}_rss_rise_mib"] = max(run["peak_mib"] - run["loaded_mib"] for run in done)
    for name, kind in (("ratio", "ours"), ("ratio_all", "ours_all")):
        result[name] = spread([a / b for a, b in zip(medians[kind], medians["native"], strict=True)])
    return result


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and greatest of ``values``."""
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def table(result: dict[str, Any]) -> str:
    """Return the result as lines."""
    return "\n".join(f"{name:24} {value}" for name, value in result.items())


class AnonymousMemory:
    """Watches this process's anonymous memory from a thread: weights read into RAM count, mapped files do not."""

    def __init__(self) -> None:
        self.peak_mib = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> AnonymousMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.peak_mib = max(self.peak_mib, anonymous_mib())


def anonymous_mib() -> int:
    """Return the process's anonymous resident memory; all resident memory where the system does not tell."""
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
        return int(fields["RssAnon"].split()[0]) >> 10
    import psutil

    return int(psutil.Process().memory_info().rss) >> 20


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Load the checkpoint, train, and return step times and memory."""
    from tests.harness.checkpoint import cached_sd15
    from tests.harness.places import host_folder

    checkpoint = cached_sd15(size="full")
    sys.path.insert(0, str(host_folder()))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import comfy.sd
    import comfy.utils
    import torch

    times: list[float] = []
    comfy.utils.set_progress_bar_global_hook(lambda *_args, **_kwargs: times.append(time.perf_counter()))
    with torch.inference_mode():
        model = comfy.sd.load_checkpoint_guess_config(str(checkpoint), output_vae=False, output_clip=False)[0]
        train = prepare_native(model, options) if options.worker == "native" else prepare_ours(model, options)
        loaded = anonymous_mib()
        with AnonymousMemory() as memory:
            train()
    steps = [after - before for before, after in itertools.pairwise(times)]
    weights = sum(p.numel() * p.element_size() for p in model.model.diffusion_model.parameters())
    return {"step_s": steps, "loaded_mib": loaded, "peak_mib": memory.peak_mib, "weights_mib": weights >> 20}


def sample() -> tuple[Any, Any]:
    """Return one latent and one conditioning, the same for every trainer."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    latents = torch.randn(1, 4, PIXELS // 8, PIXELS // 8, generator=generator)
    return latents, torch.randn(1, 77, 768, generator=generator)


def prepare_native(model: Any, options: argparse.Namespace) -> Callable[[], None]:
    """Return a call of the host's Train LoRA node with recompute on, bf16, rank 16."""
    from comfy_extras.nodes_train import TrainLoraNode

    latents, context = sample()
    defaults = {i.id: getattr(i, "default", None) for i in TrainLoraNode.define_schema().inputs}
    values = {
        **defaults,
        "model": model,
        "steps": options.steps,
        "rank": RANK,
        "training_dtype": "bf16",
        "gradient_checkpointing": True,
        "existing_lora": "[None]",
        **({"bypass_mode": True, "checkpoint_depth": 3} if options.bypass else {}),
    }
    # The node takes every input as a list; 0.3.75 fails on a single latent, so the sample is there twice.
    inputs = {name: [value] for name, value in values.items()}
    inputs["latents"], inputs["positive"] = [{"samples": latents}] * 2, [[[context, {}]]] * 2
    return lambda: TrainLoraNode.execute(**inputs) and None


def prepare_ours(model: Any, options: argparse.Namespace) -> Callable[[], None]:
    """Return a call of LoRA Train's own path, without what depends on the server."""
    from tests.inhost.pack import load_pack

    pack = load_pack(ROOT)
    latents, context = sample()
    folder = Path(tempfile.mkdtemp(prefix="lowvram-bench-"))
    core = pack.lowvram_lora
    index = _cache(core, folder, latents[0], context)
    config = core.config.TrainConfig(
        steps=options.steps,
        precision="bf16",
        lora=core.config.LoraConfig(rank=RANK, targets=KINDS[options.worker]),
    )
    job = core.training.run.Job(
        denoiser=pack.nodes._models.HostDenoiser(model),
        recipe=core.data.batches.BatchRecipe(index, core.config.SamplerConfig()),
        config=config,
        hardware=pack.nodes._host.ProcessHardware(model.load_device),
        cancel=pack.nodes._host.InterruptButton(),
        loras_root=folder,
        store=core.training.record.RunStore(folder / "runs"),
    )

    def train() -> None:
        with pack.nodes._host.outside_inference_mode():
            pack.nodes.train._follow(job, pack.nodes._host.Progress(options.steps, None))

    return train


def _cache(core: Any, folder: Path, latents: Any, context: Any) -> Any:
    store, cache = core.data.store, core.data.cache
    encoding = core.data.encodings.pack([[context, {}]])
    store.write(store.path_of(folder, "latents", "aa"), {cache.LATENTS: latents}, {})
    store.write(store.path_of(folder, "text", "bb"), encoding.tensors, {cache.STRUCTURE: encoding.structure})
    entry = cache.CacheEntry.single("noise", "aa", "bb", tuple(latents.shape), 1)
    return cache.CacheIndex(folder, (entry,), 1 << 20, "bb")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
