"""The shipped workflow in ComfyUI's own front end: all of it shows, and Queue runs it to the end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.harness.browser import front_end, open_dialogs
from tests.harness.host import Event, HostProcess
from tests.harness.places import CACHE
from tests.harness.workflow import FILE

SCREENSHOTS = CACHE / "screenshots"
LOAD = "workflow => app.loadGraphData(workflow)"
# Moves the view so that the whole graph is on the page.
FIT = """() => {
    const nodes = app.graph._nodes, ds = app.canvas.ds;
    const right = Math.max(...nodes.map(node => node.pos[0] + node.size[0]));
    const bottom = Math.max(...nodes.map(node => node.pos[1] + node.size[1]));
    ds.scale = Math.min(1750 / right, 850 / bottom);
    ds.offset = [70 / ds.scale, 90 / ds.scale];
    app.canvas.setDirty(true, true);
}"""
SHOWN = """() => app.graph._nodes.map(node => ({
    type: node.type,
    known: node.type in LiteGraph.registered_node_types,
    broken: Boolean(node.has_errors),
    widgets: (node.widgets ?? []).filter(widget => widget.serialize !== false).map(widget => widget.name),
    unlinked: (node.inputs ?? []).filter(input => !input.widget && input.link == null).map(input => input.name),
}))"""
SET_WIDGET = """([type, name, value]) => {
    const node = app.graph._nodes.find(node => node.type === type);
    const widget = node.widgets.find(widget => widget.name === name);
    widget.value = value;
    widget.callback?.(value);
}"""

MOUNTED = "count => document.querySelectorAll('[data-node-id]').length === count"
PREVIEW_ARRIVED = """() => {
    const node = app.graph._nodes.find(node => node.type === 'PreviewImage');
    return app.nodeOutputs[node.id]?.images?.length;
}"""


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    """Return the shipped workflow."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


@contextmanager
def page_errors(page: Page) -> Iterator[list[str]]:
    """Collect the errors that scripts of the page raise."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield errors


def screenshot(page: Page, name: str) -> None:
    """Keep a picture of the page for a person to look at."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.evaluate(FIT)
    page.wait_for_timeout(500)  # until it is drawn; nothing is asserted about pictures
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


def wait_for_new_entry(host: HostProcess, known: set[str], timeout_s: float = 300.0) -> Event:
    """Return the history entry of the prompt that was queued after ``known`` was read."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for prompt_id in set(host.get("/history")) - known:
            return host.wait(prompt_id)
        time.sleep(0.5)
    raise TimeoutError(f"No prompt finished within {timeout_s:g} s:\n{host.log_tail()}")


@pytest.mark.parametrize("vue_nodes", [False, True], ids=["canvas", "vue"])
def test_all_nodes_show(host: HostProcess, workflow: dict[str, Any], vue_nodes: bool) -> None:
    with front_end(host, vue_nodes=vue_nodes) as page, page_errors(page) as errors:
        page.evaluate(LOAD, workflow)
        if vue_nodes:
            page.wait_for_function(MOUNTED, arg=len(workflow["nodes"]))
        shown = page.evaluate(SHOWN)
        screenshot(page, f"workflow-{'vue' if vue_nodes else 'canvas'}")
        dialogs = open_dialogs(page)
    assert [node["type"] for node in shown if not node["known"] or node["broken"]] == []
    assert sorted(node["type"] for node in shown) == sorted(node["type"] for node in workflow["nodes"])
    known = host.get("/object_info")
    optional = {node["type"]: known[node["type"]]["input"].get("optional", {}) for node in shown}
    assert [
        (node["type"], name) for node in shown for name in node["unlinked"] if name not in optional[node["type"]]
    ] == []
    assert dialogs == []
    assert errors == []


def test_queue_runs_the_workflow(host: HostProcess, workflow: dict[str, Any], checkpoint: Path, dataset: str) -> None:
    widgets = [
        ("CheckpointLoaderSimple", "ckpt_name", checkpoint.name),
        ("LowVRAMLoadDataset", "folder", dataset),
        ("LowVRAMLoadDataset", "resolution", 128),
        ("LowVRAMLoRATrain", "steps", 2),
        ("LowVRAMLoRATrain", "rank", 4),
        ("LowVRAMLoRATrain", "output_name", "from the browser"),
        ("EmptyLatentImage", "width", 128),
        ("EmptyLatentImage", "height", 128),
        ("KSampler", "steps", 2),
        ("KSampler", "cfg", 2.0),
    ]
    known = set(host.get("/history"))
    with front_end(host) as page:
        page.evaluate(LOAD, workflow)
        for widget in widgets:
            page.evaluate(SET_WIDGET, list(widget))
        page.evaluate("() => app.queuePrompt(0)")
        assert page.evaluate("() => app.lastNodeErrors") in (None, {})
        entry = wait_for_new_entry(host, known)
        page.wait_for_function(PREVIEW_ARRIVED)
        screenshot(page, "workflow-finished")
        assert open_dialogs(page) == []
    assert (host.base / "models" / "loras" / "from the browser.safetensors").is_file()
    assert any("images" in output for output in entry["outputs"].values())
