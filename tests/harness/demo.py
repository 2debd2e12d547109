"""The main job end to end: a real ComfyUI trains a LoRA and draws with it.

Without a checkpoint or pictures of the user's own, the toy world's base model learns a new shape, and what it drew
before and after stands beside the truth.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness import graph
from tests.harness.host import Event, HostError, HostProcess, device_flags, offer_checkpoint, texts
from tests.harness.photos import make_dataset
from tests.harness.places import CACHE
from tests.toyworld import base as toy_base
from tests.toyworld import dataset as toy_dataset
from tests.toyworld import lesson, scenes, show

TIMEOUT_S = 24 * 3600.0
USUAL_PX, USUAL_STEPS = 512, 20
NUM_EXAM, NUM_ROWS = 24, 4
PICTURES_A_LINE = 16
CHECKPOINT_SUFFIXES = (".safetensors", ".sft", ".ckpt")


class ProgressLines:
    """Prints what ComfyUI is doing: each node as it starts, and its steps."""

    def __init__(self, prompt: graph.Prompt) -> None:
        self._prompt = prompt
        self._started = time.monotonic()
        self._shown_at = self._started
        self._pictures = 0

    def on_event(self, event: Event) -> None:
        """Print a line if the event is worth one."""
        data: dict[str, Any] = event.get("data") or {}
        node_id = str(data.get("node") or "")
        # A gallery has dozens of small nodes; only its pictures are worth a line.
        if node_id in self._prompt and node_id.rpartition("_")[2].isdigit():
            self._count(event, node_id)
        elif event.get("type") == "executing" and node_id:
            self._line(node_id, "")
        elif event.get("type") == "progress":
            self._step(node_id, int(data["value"]), int(data["max"]))

    def _count(self, event: Event, node_id: str) -> None:
        if event.get("type") != "executing" or self._prompt[node_id]["class_type"] != "KSampler":
            return
        self._pictures += 1
        if self._pictures % PICTURES_A_LINE == 0:
            total = sum(node["class_type"] == "KSampler" for node in self._prompt.values())
            self._line(node_id, f"  {self._pictures}/{total} pictures")

    def _step(self, node_id: str, value: int, total: int) -> None:
        # At most a line a second, and the end of each node.
        now = time.monotonic()
        if value == total or now > self._shown_at + 1:
            self._shown_at = now
            self._line(node_id, f"  {value}/{total}")

    def _line(self, node_id: str, text: str) -> None:
        seconds = time.monotonic() - self._started
        print(f"  {seconds:6.1f} s  {self._prompt[node_id]['class_type']} ({node_id}){text}", flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="dev.py demo", description=__doc__)
    parser.add_argument("--checkpoint", type=a_file, help="a checkpoint file; default: the toy world's base model")
    parser.add_argument(
        "--dataset",
        type=a_folder,
        help=f"a folder of pictures with captions; default: {lesson.CONCEPT}s, with --checkpoint photographs",
    )
    parser.add_argument("--steps", type=a_count, help=f"default: {lesson.STEPS}, with --checkpoint {USUAL_STEPS}")
    parser.add_argument("--resolution", type=a_count, help=f"default: {scenes.SIDE}, with --checkpoint {USUAL_PX}")
    parser.add_argument("--caption", help="draw this as well; default with your own files: a photo of a cat")
    options = parser.parse_args(arguments)
    if is_lesson(options) and options.resolution not in (None, scenes.SIDE):
        parser.error(f"the toy world is {scenes.SIDE} pixels wide; --resolution is for --checkpoint or --dataset")
    return options


def a_file(text: str) -> Path:
    """Return the checkpoint that an option names. Its name stays a link's own: what it leads to may have no ending."""
    if not text or not exists(Path(text).is_file):
        raise argparse.ArgumentTypeError(f"there is no file {shortened(text)!r}")
    if Path(text).suffix.lower() not in CHECKPOINT_SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} is no checkpoint: {', '.join(CHECKPOINT_SUFFIXES)}")
    return Path(text).absolute()


def a_folder(text: str) -> Path:
    """Return the folder that an option names. It is offered to ComfyUI by its name, so the root of a disk can't be."""
    if not text or not exists(Path(text).is_dir):
        raise argparse.ArgumentTypeError(f"there is no folder {shortened(text)!r}")
    folder = Path(text).resolve()
    if not folder.name:
        raise argparse.ArgumentTypeError(f"{folder} is a whole disk; name a folder of pictures on it")
    return folder


def a_count(text: str) -> int:
    """Return the number that an option gives, 1 or more."""
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is not a whole number of 1 or more")
    return int(text)


def exists(check: Callable[[], bool]) -> bool:
    """Ask a file system about a name; one that it can't hold is not there."""
    try:
        return check()
    except (OSError, ValueError):
        return False


def shortened(text: str) -> str:
    """Return at most 100 letters of ``text``."""
    return text if len(text) <= 100 else f"{text[:99]}…"


def new_folder(parent: Path) -> Path:
    """Make a folder for this run, named by the time; of two that start in the same second each gets its own."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / time.strftime("%Y-%m-%d_%H-%M-%S")
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            folder = parent / f"{folder.name}_2"
        else:
            return folder


def is_lesson(options: argparse.Namespace) -> bool:
    """Whether the toy world's model learns the toy world's concept: the truth is known."""
    return options.checkpoint is None and options.dataset is None


def graph_options(options: argparse.Namespace, folder: str) -> graph.GraphOptions:
    """Return the graph's options; what the user left open depends on the base model."""
    chosen = {"steps": options.steps, "resolution": options.resolution, "caption": options.caption}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if options.checkpoint is None:
        return lesson.options(folder, output_name="demo", **chosen)
    usual = {"steps": USUAL_STEPS, "resolution": USUAL_PX, "learning_rate": 1e-4, "sampling_steps": 20}
    fixed = {"checkpoint": options.checkpoint.name, "output_name": "demo", "with_loader": False}
    return graph.GraphOptions(folder=folder, **fixed, **usual | chosen)


def build_prompt(options: argparse.Namespace, folder: str) -> graph.Prompt:
    """Return the demo's graph: training and previews, or training and both sittings of the exam."""
    wanted = graph_options(options, folder)
    if not is_lesson(options):
        return graph.whole(wanted)
    asked = lesson.questions(NUM_EXAM)
    # A caption of the user's own is drawn beside the exam's.
    prompt = graph.whole(wanted) if options.caption else graph.training(wanted)
    prompt |= lesson.sitting("base", wanted.base().model, asked, wanted)
    return prompt | lesson.sitting("lora", [graph.MONITOR, 0], asked, wanted)


def save_previews(host: HostProcess, entry: Event, folder: Path) -> dict[str, Path]:
    """Save the pictures of one caption to ``folder``; return the files by what they show."""
    wanted = {
        "picture without the LoRA": (graph.SAVE_BASE, "base.png"),
        "picture with the LoRA": (graph.SAVE_LORA_IMAGE, "lora.png"),
    }
    return {title: save_picture(host, entry, node_id, folder / name) for title, (node_id, name) in wanted.items()}


def save_picture(host: HostProcess, entry: Event, node_id: str, file: Path) -> Path:
    """Save the first picture that a node shows; return the file."""
    file.write_bytes(host.view(entry["outputs"][node_id]["images"][0]))
    return file


def save_sheet(host: HostProcess, entry: Event, caption: str | None, file: Path) -> Path:
    """Save base, LoRA and truth side by side, and print the scores; return the file."""
    asked = lesson.questions(NUM_EXAM)
    before, after = (lesson.drawn(host, entry, name, asked) for name in ("base", "lora"))
    pairs = zip(before["new"], after["new"], strict=True)
    rows = [show.row(scene, *pair) for scene, pair in zip(asked["new"], pairs, strict=True)][:NUM_ROWS]
    if caption:
        own = (lesson.pictures(host, entry, node_id)[0] for node_id in (graph.SAVE_BASE, graph.SAVE_LORA_IMAGE))
        rows.append(show.Row(caption, (*own, None)))
    show.sheet(("base model", "with the LoRA", "truth"), rows).save(file, optimize=True)
    print(f"\n{show.table(lesson.CONCEPT, asked, before, after)}")
    return file


def report(host: HostProcess, entry: Event, options: argparse.Namespace, folder: Path) -> None:
    """Print what the run made and where it is."""
    for node_id in (graph.DATASET, graph.TRAIN):
        print(f"\n{texts(entry, node_id)}")
    files: dict[str, Path] = {}
    if is_lesson(options):
        files["base, LoRA and truth"] = save_sheet(host, entry, options.caption, folder / "demo.png")
    else:
        files |= save_previews(host, entry, folder)
    files["loss curve"] = save_picture(host, entry, graph.LOSS, folder / "loss.png")
    print()
    for file in sorted((host.base / "models" / "loras").glob("*.safetensors")):
        print(f"{'LoRA:':<27}{file}")
    for title, file in files.items():
        print(f"{title + ':':<27}{file}")


def prepare(options: argparse.Namespace, base: Path) -> tuple[str, dict[str, Path]]:
    """Give the ComfyUI at ``base`` its model and pictures; return the pictures' folder name and search paths."""
    if options.checkpoint is None:
        toy_base.offer_base(base)
    else:
        offer_checkpoint(base, options.checkpoint)
    if is_lesson(options):
        folder = base / "input" / f"{lesson.CONCEPT}s"
        return toy_dataset.write(folder, toy_dataset.lesson_scenes(lesson.CONCEPT)).name, {}
    pictures = options.dataset or make_dataset(CACHE / "photos")
    return pictures.name, {"datasets": pictures.parent}


def main(arguments: list[str]) -> int:
    """Run the demo and return the exit status."""
    options = parse(arguments)
    started = time.monotonic()
    folder = new_folder(CACHE / "demo")
    name, search_paths = prepare(options, folder / "comfyui")
    prompt = build_prompt(options, name)
    if options.checkpoint is None and not is_lesson(options):
        print("The toy model draws simple shapes alone, whatever it learns; --checkpoint takes a model of your own.")
    print("Starting ComfyUI ...", flush=True)
    # The toy world's tensors are tiny: threads would wait for each other longer than they compute.
    environment = {"OMP_NUM_THREADS": "1"} if options.checkpoint is None else {}
    with HostProcess(
        folder / "comfyui", flags=device_flags(), search_paths=search_paths, environment=environment
    ) as host:
        try:
            entry = host.run(prompt, TIMEOUT_S, ProgressLines(prompt).on_event)
        except HostError as error:
            print(f"\nThe run failed. {error}\nComfyUI's log: {host.log}")
            return 1
        report(host, entry, options, folder)
    print(f"Done in {time.monotonic() - started:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
