"""The workflow that the pack ships, in the format the canvas loads.

``python -m tests.harness.workflow`` writes ``workflows/train_sd15.json`` anew: ComfyUI's front end turns the graph in
API format into its own, so that the file has every widget a node has.
"""

from __future__ import annotations

import json
import tempfile
import uuid
from pathlib import Path
from typing import Any

from tests.harness import graph
from tests.harness.browser import front_end
from tests.harness.host import HostProcess
from tests.harness.places import ROOT

FILE = ROOT / "workflows" / "train_sd15.json"
OPTIONS = graph.GraphOptions(
    checkpoint="v1-5-pruned-emaonly-fp16.safetensors",
    folder="my_pictures",
    steps=500,
    resolution=512,
    learning_rate=1e-4,
    rank=16,
    output_name="my_lora",
    sampling_steps=20,
    guidance=7.0,
    caption="a photo of a cat",
)
# What stands where, left to right; nodes of a column stand one under another.
COLUMNS: tuple[tuple[str, ...], ...] = (
    (graph.CHECKPOINT, graph.DATASET),
    (graph.SCORE,),
    (graph.CACHE,),
    (graph.SAMPLER,),
    (graph.TRAIN,),
    (graph.MONITOR, "positive_lora", "negative_lora", "latent_lora"),
    ("sample_lora", graph.LOSS),
    ("decode_lora", "preview"),
)
# Nodes that show pictures or text need room from the start.
# Room for the reports, which the front end shows below the widgets.
ROOM = {
    graph.DATASET: (340, 420),
    graph.SCORE: (300, 320),
    graph.CACHE: (300, 280),
    graph.SAMPLER: (300, 320),
    graph.TRAIN: (380, 680),
    graph.LOSS: (400, 320),
    graph.MONITOR: (340, 320),
    "preview": (400, 400),
}
FIRST_X, FIRST_Y, GAP_X, GAP_Y, TITLE_PX = 40, 160, 60, 40, 30

# Seeds stay as they are: with "randomize", pressing Queue again would train again.
TO_CANVAS = """async prompt => {
    await app.loadApiJson(prompt, 'train_sd15');
    const widgets = app.graph._nodes.flatMap(node => node.widgets ?? []);
    widgets.filter(widget => widget.name === 'control_after_generate').forEach(widget => widget.value = 'fixed');
    return JSON.stringify(app.graph.serialize());
}"""


def prompt() -> graph.Prompt:
    """Return the shipped graph in API format, with numbers for ids, as the canvas has them."""
    nodes = graph.training(OPTIONS)
    nodes |= graph.sampling("lora", [graph.MONITOR, 0], [graph.CHECKPOINT, 1], [graph.CHECKPOINT, 2], OPTIONS)
    del nodes["save_lora"]
    nodes["preview"] = graph.node("PreviewImage", images=["decode_lora", 0])
    return {str(number(name)): _numbered(nodes[name]) for column in COLUMNS for name in column}


def number(name: str) -> int:
    """Return the canvas id of a node: its place in ``COLUMNS``."""
    return [each for column in COLUMNS for each in column].index(name) + 1


def _numbered(node: dict[str, Any]) -> dict[str, Any]:
    inputs = {
        key: [str(number(value[0])), value[1]] if isinstance(value, list) else value
        for key, value in node["inputs"].items()
    }
    return {**node, "inputs": inputs}


def lay_out(workflow: dict[str, Any]) -> None:
    """Put the nodes of a workflow into their columns, without overlap."""
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for name, size in ROOM.items():
        nodes[number(name)]["size"] = list(size)
    x = FIRST_X
    for column in COLUMNS:
        y = FIRST_Y
        members = [nodes[number(name)] for name in column]
        for member in members:
            member["pos"] = [x, y]
            y += round(member["size"][1]) + TITLE_PX + GAP_Y
        x += max(round(member["size"][0]) for member in members) + GAP_X


def canvas_format(host: HostProcess) -> dict[str, Any]:
    """Return the shipped workflow as the front end of ``host`` writes it."""
    with front_end(host) as page:
        workflow: dict[str, Any] = json.loads(page.evaluate(TO_CANVAS, prompt()))
    for node in workflow["nodes"]:
        node["id"] = int(node["id"])
    workflow["id"] = str(uuid.uuid5(uuid.NAMESPACE_URL, "lowvram-lora/train_sd15"))
    workflow["last_node_id"] = max(node["id"] for node in workflow["nodes"])
    lay_out(workflow)
    return workflow


def main() -> None:
    """Write the workflow file."""
    with tempfile.TemporaryDirectory() as folder, HostProcess(Path(folder)) as host:
        workflow = canvas_format(host)
    FILE.write_text(json.dumps(workflow, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"Wrote {FILE}")


if __name__ == "__main__":
    main()
