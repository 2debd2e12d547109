"""What saved workflows depend on: the pack's nodes as ComfyUI describes them, without their texts.

``python -m tests.harness.contract`` writes ``tests/host/contract.json`` anew, after a deliberate change.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.harness.host import HostProcess
from tests.harness.places import ROOT

FILE = ROOT / "tests" / "host" / "contract.json"
CLASS_TYPES = (
    "LowVRAMLoadDataset",
    "LowVRAMScoreComplexity",
    "LowVRAMBuildTieredCache",
    "LowVRAMSparseBatchSampler",
    "LowVRAMLoRATrain",
    "LowVRAMMonitor",
)
PINNED_OPTIONS = (
    "default",
    "min",
    "max",
    "step",
    "options",
    "multiline",
    "control_after_generate",
    "forceInput",
)


def inputs(info: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the inputs in the order in which the front end shows them."""
    for section in ("required", "optional"):
        for name, (kind, *options) in info["input"].get(section, {}).items():
            given = options[0] if options else {}
            pinned = {key: given[key] for key in PINNED_OPTIONS if key in given}
            yield {"name": name, "type": kind, "section": section, **pinned}


def describe(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a node's ``/object_info`` entry that is pinned."""
    return {
        "display_name": info["display_name"],
        "category": info["category"],
        "output_node": info["output_node"],
        "inputs": list(inputs(info)),
        "outputs": [list(pair) for pair in zip(info["output_name"], info["output"], strict=True)],
    }


def current(host: HostProcess) -> dict[str, Any]:
    """Return the contract that a running host shows."""
    return {class_type: describe(host.object_info(class_type)) for class_type in CLASS_TYPES}


def pinned() -> dict[str, Any]:
    """Return the contract that is pinned in the repository."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def main() -> None:
    """Write the contract file from a real host."""
    with tempfile.TemporaryDirectory() as folder, HostProcess(Path(folder)) as host:
        text = json.dumps(current(host), indent=2, ensure_ascii=False)
    FILE.write_text(text + "\n", encoding="utf-8")
    print(f"Wrote {FILE}")


if __name__ == "__main__":
    main()
