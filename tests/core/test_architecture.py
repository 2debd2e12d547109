"""The shape of the code: who imports whom, how long things are."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "lowvram_lora"
HOST = {"comfy", "comfy_extras", "folder_paths", "server", "execution", "latent_preview", "comfy_api"}
HOST_FILES = {"_host.py", "_models.py"}
# From the bottom; a file imports from its own layer's package or from lower ones.
LAYERS = (
    ("errors", "units"),
    ("config", "ports", "events"),
    ("memory", "data"),
    ("adapters",),
    ("training", "fakes", "__main__"),
)


def modules(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(CORE).with_suffix("").parts).removesuffix(".__init__")


def layer_of(module: str) -> int:
    """Return the layer of ``module``: that of the longest entry that is it or holds it."""
    fitting = [
        (len(entry), number)
        for number, entries in enumerate(LAYERS)
        for entry in entries
        if module == entry or module.startswith(f"{entry}.")
    ]
    return max(fitting)[1]


def relative_imports(path: Path, tree: ast.Module) -> Iterator[str]:
    package = name_of(path).split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            if node.module:
                yield ".".join([*base, node.module])
            else:
                yield from (".".join([*base, alias.name]) for alias in node.names)


def test_a_file_imports_only_from_its_layer_or_below() -> None:
    wrong = [
        f"{name_of(path)} imports {imported}"
        for path, tree in modules(CORE)
        if path.name != "__init__.py"
        for imported in relative_imports(path, tree)
        if layer_of(imported) > layer_of(name_of(path))
    ]
    assert wrong == []


def test_the_core_knows_no_host_and_only_two_node_files_do() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), imported.split(".")[0])
        for folder in (CORE, ROOT / "nodes")
        for path, tree in modules(folder)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0)
        for imported in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if imported.split(".")[0] in HOST
    }
    in_core = {file for file, _ in found if file.startswith("lowvram_lora/")}
    in_nodes = {file for file, name in found if name != "comfy_api"}
    assert in_core == set()
    assert in_nodes == {f"nodes/{name}" for name in HOST_FILES}


def test_the_core_imports_itself_by_relative_names_only() -> None:
    absolute = [
        path.name
        for path, tree in modules(CORE)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("lowvram_lora")
    ]
    assert absolute == []


def test_functions_fit_a_screen_and_files_stay_short() -> None:
    long = [
        f"{path.name}:{node.name}"
        for folder in (CORE, ROOT / "nodes")
        for path, tree in modules(folder)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60
    ]
    files = [path.name for path, _ in modules(CORE) if len(path.read_text(encoding="utf-8").splitlines()) > 400]
    assert long == []
    assert files == []


def test_no_worker_processes() -> None:
    """h01, i11. Each loader process commits gigabytes on Windows (a public fault of other trainers)."""
    text = "\n".join(path.read_text(encoding="utf-8") for path, _ in modules(CORE))
    assert "multiprocessing" not in text and "DataLoader" not in text


def test_whatever_trains_comes_with_comfyui_or_the_pack() -> None:
    """h02. An optimizer of a package that is broken on Windows ends the run of other trainers."""
    nodes = [node for _, tree in modules(CORE) for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    outside = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    requirements = (CORE.parent / "requirements.txt").read_text(encoding="utf-8").split()
    brought = {line.partition(">=")[0] for line in requirements}
    # ComfyUI asks for the first four itself; torch asks for filelock.
    assert outside <= {"torch", "numpy", "PIL", "safetensors", "filelock", *brought}
    assert {"torch", "peft"} <= outside
