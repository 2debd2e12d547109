"""The main job end to end: a real ComfyUI trains a LoRA on real pictures and draws with it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from tests.harness import graph
from tests.harness.checkpoint import cached_sd15
from tests.harness.host import Event, HostError, HostProcess, device_flags, offer_checkpoint, texts
from tests.harness.photos import make_dataset
from tests.harness.places import CACHE

TIMEOUT_S = 24 * 3600.0
# What the random checkpoint is trained at, so that two CPU cores manage; real checkpoints need more.
SMALL_PX, USUAL_PX = 256, 512


class ProgressLines:
    """Prints what ComfyUI is doing: each node as it starts, and its steps."""

    def __init__(self, prompt: graph.Prompt) -> None:
        self._prompt = prompt
        self._started = time.monotonic()
        self._shown: tuple[str, int] = ("", 0)

    def on_event(self, event: Event) -> None:
        """Print a line if the event is worth one."""
        data: dict[str, Any] = event.get("data") or {}
        if event.get("type") == "executing" and data.get("node"):
            self._line(data["node"], "")
        elif event.get("type") == "progress":
            self._step(str(data["node"]), int(data["value"]), int(data["max"]))

    def _step(self, node_id: str, value: int, total: int) -> None:
        # At most twenty lines a node.
        shown = (node_id, value * 20 // max(total, 1))
        if shown != self._shown:
            self._shown = shown
            self._line(node_id, f"  {value}/{total}")

    def _line(self, node_id: str, text: str) -> None:
        seconds = time.monotonic() - self._started
        print(f"  {seconds:6.1f} s  {self._prompt[node_id]['class_type']} ({node_id}){text}", flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="dev.py demo", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint file; default: a small random SD 1.5")
    parser.add_argument("--dataset", type=Path, help="a folder of pictures with captions; default: photographs")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resolution", type=int, help=f"default: {SMALL_PX}, or {USUAL_PX} with --checkpoint")
    parser.add_argument("--caption", default="a photo of a cat", help="what the preview pictures show")
    options = parser.parse_args(arguments)
    for path in (options.checkpoint, options.dataset):
        if path is not None and not path.exists():
            parser.error(f"there is no {path}")
    return options


def build_prompt(options: argparse.Namespace, checkpoint: Path, dataset: Path) -> graph.Prompt:
    """Return the demo's graph."""
    own = options.checkpoint is not None
    return graph.whole(
        graph.GraphOptions(
            checkpoint=checkpoint.name,
            folder=dataset.name,
            steps=options.steps,
            resolution=options.resolution or (USUAL_PX if own else SMALL_PX),
            learning_rate=1e-4 if own else 1e-3,
            output_name="demo",
            caption=options.caption,
            sampling_steps=20 if own else 4,
            with_loader=False,
        )
    )


def save_pictures(host: HostProcess, entry: Event, folder: Path) -> dict[str, Path]:
    """Save the previews and the loss curve to ``folder``; return the files by what they show."""
    wanted = {
        "picture without the LoRA": (graph.SAVE_BASE, "base.png"),
        "picture with the LoRA": (graph.SAVE_LORA_IMAGE, "lora.png"),
        "loss curve": (graph.LOSS, "loss.png"),
    }
    saved = {}
    for title, (node_id, name) in wanted.items():
        saved[title] = folder / name
        saved[title].write_bytes(host.view(entry["outputs"][node_id]["images"][0]))
    return saved


def report(host: HostProcess, entry: Event, folder: Path) -> None:
    """Print what the run made and where it is."""
    for node_id in (graph.DATASET, graph.TRAIN):
        print(f"\n{texts(entry, node_id)}")
    print()
    for file in sorted((host.base / "models" / "loras").glob("*.safetensors")):
        print(f"{'LoRA:':<27}{file}")
    for title, file in save_pictures(host, entry, folder).items():
        print(f"{title + ':':<27}{file}")


def main(arguments: list[str]) -> int:
    """Run the demo and return the exit status."""
    options = parse(arguments)
    started = time.monotonic()
    if options.checkpoint is None:
        print("Without --checkpoint this uses a random one: everything runs, the pictures show noise.")
    checkpoint = (options.checkpoint or cached_sd15()).resolve()
    dataset = (options.dataset or make_dataset(CACHE / "photos")).resolve()
    folder = CACHE / "demo" / time.strftime("%Y-%m-%d_%H-%M-%S")
    prompt = build_prompt(options, checkpoint, dataset)
    base = folder / "comfyui"
    offer_checkpoint(base, checkpoint)
    print("Starting ComfyUI ...", flush=True)
    with HostProcess(base, flags=device_flags(), search_paths={"datasets": dataset.parent}) as host:
        try:
            entry = host.run(prompt, TIMEOUT_S, ProgressLines(prompt).on_event)
        except HostError as error:
            print(f"\nThe run failed. {error}\nComfyUI's log: {host.log}")
            return 1
        report(host, entry, folder)
    print(f"Done in {time.monotonic() - started:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
