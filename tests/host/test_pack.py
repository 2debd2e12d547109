"""The pack in a real ComfyUI: it loads, offers the pinned nodes, and its install breaks nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import contract
from tests.harness.host import ODD_FOLDER_NAME, HostProcess
from tests.harness.places import ROOT

# Python runs a module of this name at start. It hides packages as if they were not installed.
HIDING = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}


class HidingFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = HidingFinder
"""
OPTIONAL = ("diffusers", "peft", "pynvml")
# Installing one of these through a node pack has broken many a ComfyUI.
HOST_OWNED = {
    "torch",
    "torchvision",
    "torchaudio",
    "numpy",
    "transformers",
    "safetensors",
    "xformers",
    "pillow",
}


@pytest.mark.parametrize("class_type", contract.CLASS_TYPES)
def test_node_keeps_its_contract(host: HostProcess, class_type: str) -> None:
    assert contract.describe(host.object_info(class_type)) == contract.pinned()[class_type]


def test_pack_loads_from_an_odd_folder_name(host: HostProcess) -> None:
    assert (host.base / "custom_nodes" / ODD_FOLDER_NAME / "__init__.py").is_file()
    lines = [line for line in host.log_text().splitlines() if ODD_FOLDER_NAME in line]
    assert [line for line in lines if " seconds" in line]
    assert not [line for line in lines if "IMPORT FAILED" in line or "Cannot import" in line]


def test_front_end_gets_the_pack_scripts_once(host: HostProcess) -> None:
    scripts = [path for path in host.get("/extensions") if "Low-VRAM" in path or "lowvram" in path.lower()]
    assert len(scripts) == len({path.rpartition("/")[2] for path in scripts})


def test_nodes_stay_without_optional_packages(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(HIDING.format(hidden=OPTIONAL), encoding="utf-8")
    probe = "import importlib.util, sys; sys.exit(sum(importlib.util.find_spec(n) is not None for n in {!r}))"
    environment = {"PYTHONPATH": str(site)}
    with HostProcess(tmp_path / "base", environment=environment) as bare:
        hidden = [sys.executable, "-c", probe.format(OPTIONAL)]
        assert subprocess.run(hidden, env=bare.environment, check=False).returncode == 0
        missing = [name for name in contract.CLASS_TYPES if not bare.object_info(name)]
    assert not missing


def test_requirements_name_only_what_the_host_lacks() -> None:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]
    assert all(re.fullmatch(r"[\w-]+>=[\d.]+", line) for line in wanted)
    assert not HOST_OWNED & {line.partition(">=")[0].lower() for line in wanted}


def test_installing_requirements_changes_nothing_of_the_host() -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-"]
    command += ["--disable-pip-version-check", "-r", str(ROOT / "requirements.txt")]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    names = {item["metadata"]["name"].lower() for item in report["install"]}
    assert not HOST_OWNED & names
