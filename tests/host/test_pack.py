"""The pack in a real ComfyUI: it loads, offers the pinned nodes, and its install breaks nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.harness import contract, graph
from tests.harness.host import ODD_FOLDER_NAME, HostProcess
from tests.harness.photos import PHOTOS, make_dataset
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
# And this one notes every connection that leaves the machine, with who asked for it, and lets none through.
WATCHING = """
import os, socket, traceback

connect = socket.socket.connect


def watched(self, address):
    host = address[0] if isinstance(address, tuple) else ""
    if host in ("", "127.0.0.1", "::1", "localhost") or self.family not in (socket.AF_INET, socket.AF_INET6):
        return connect(self, address)
    with open(os.environ["CONNECTION_LOG"], "a", encoding="utf-8") as log:
        log.write(f"{address} {traceback.format_stack()!r}\\n")
    raise OSError("no network in this test")


socket.socket.connect = watched
"""
# And this one notes the version of numpy.
TELLING = """
import os, numpy

with open(os.environ["VERSION_FILE"], "w", encoding="utf-8") as file:
    file.write(numpy.__version__)
"""
OPTIONAL = ("diffusers", "peft", "pynvml")
# As they are called on disk.
BROUGHT_BY_THE_PACK = ("diffusers", "peft", "accelerate", "nvidia_ml_py", "pynvml")
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
    """i05"""
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
    """i06, i07"""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]
    assert all(re.fullmatch(r"[\w-]+>=[\d.]+", line) for line in wanted)
    assert not HOST_OWNED & {line.partition(">=")[0].lower() for line in wanted}


def test_installing_requirements_changes_nothing_of_the_host(tmp_path: Path) -> None:
    """i06. The host's environment is this one without what the pack brings."""
    python = environment_without(BROUGHT_BY_THE_PACK, tmp_path / "environment")
    command = [str(python), "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-"]
    command += ["--disable-pip-version-check", "-r", str(ROOT / "requirements.txt")]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    names = {item["metadata"]["name"].lower() for item in report["install"]}
    assert {"diffusers", "peft", "nvidia-ml-py"} <= names
    assert not HOST_OWNED & names


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="numpy 1.26 has no wheel for this Python")
def test_a_lora_is_trained_with_the_numpy_of_old(tmp_path: Path, checkpoint: Path) -> None:
    """i07. Every other test runs with the numpy that ComfyUI's requirements bring, 2.x."""
    site, version = tmp_path / "site", tmp_path / "version.txt"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--only-binary=:all:", "--target", str(site), "numpy==1.26.4"], check=True)
    (site / "sitecustomize.py").write_text(TELLING, encoding="utf-8")
    base = tmp_path / "base"
    make_dataset(base / "input" / "pictures", PHOTOS[:2])
    options = graph.GraphOptions(checkpoint=checkpoint.name, folder="pictures", steps=2, resolution=64)
    environment = {"PYTHONPATH": str(site), "VERSION_FILE": str(version)}
    with HostProcess(base, environment=environment, search_paths={"checkpoints": checkpoint.parent}) as old:
        prompt = graph.training(options)
        prompt[graph.SAMPLER]["inputs"]["strategy"] = "sparse"
        old.run(prompt)
    assert list((base / "models" / "loras").glob("demo*.safetensors"))
    assert version.read_text(encoding="utf-8") == "1.26.4"


def environment_without(packages: tuple[str, ...], folder: Path) -> Path:
    """Make a virtual environment of links to this one's packages, but for ``packages``; return its Python."""
    venv.create(folder, with_pip=False)
    here, there = (Path(sysconfig.get_path("purelib", vars={"base": base})) for base in (sys.prefix, str(folder)))
    for entry in here.iterdir():
        if not entry.name.lower().replace("-", "_").startswith(packages):
            (there / entry.name).symlink_to(entry, target_is_directory=entry.is_dir())
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def test_training_asks_for_no_network(tmp_path: Path, checkpoint: Path) -> None:
    """i08. Other trainers fetch a tokenizer or a config from a hub; ours uses the host's CLIP and what is on disk."""
    site, log = tmp_path / "site", tmp_path / "connections.txt"
    site.mkdir()
    (site / "sitecustomize.py").write_text(WATCHING, encoding="utf-8")
    base = tmp_path / "base"
    make_dataset(base / "input" / "pictures", PHOTOS[:1])
    options = graph.GraphOptions(checkpoint=checkpoint.name, folder="pictures", steps=2, resolution=64)
    environment = {"PYTHONPATH": str(site), "CONNECTION_LOG": str(log)}
    with HostProcess(base, environment=environment, search_paths={"checkpoints": checkpoint.parent}) as watched:
        watched.run(graph.training(options))
        before = log.read_text(encoding="utf-8") if log.exists() else ""
        dial = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)"
        subprocess.run([sys.executable, "-c", dial], env=watched.environment, capture_output=True, check=False)
    assert "192.0.2.1" in log.read_text(encoding="utf-8")
    ours = ("lowvram", "peft", "diffusers", "huggingface_hub", "transformers")
    assert not [line for line in before.splitlines() if any(name in line for name in ours)]
