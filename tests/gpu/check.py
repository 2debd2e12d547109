"""Everything that only a GPU can show, in one command of less than six minutes: see "On a GPU" in CONTRIBUTING.md.

Prints a table and, on the last line, one JSON object; what goes on meanwhile to stderr. Ends with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.gpu import machine, work
from tests.gpu.arithmetic import Arithmetic
from tests.gpu.outcome import END, Check, Numbers, SkippedError, mib
from tests.gpu.services import Services
from tests.gpu.training import Training
from tests.harness.places import ROOT, host_folder
from tests.inhost.pack import load_pack

DEADLINE_S = 330.0
BEGAN = time.perf_counter()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python tests/gpu/check.py", description=__doc__)
    parser.add_argument("--host", help="ComfyUI's folder; else LOWVRAM_HOST, else .cache/host")
    parser.add_argument("--rehearse", action="store_true", help="the same on the CPU, with tiny networks")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds after which no check begins")
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of the names of the checks to run")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return the exit status."""
    options = parse(arguments)
    if options.host:
        os.environ["LOWVRAM_HOST"] = options.host
    if not options.rehearse and not torch.cuda.is_available():
        print("torch finds no CUDA device. `--rehearse` does the same on the CPU.", file=sys.stderr)
        return 2
    pack = enter_host(is_cpu=options.rehearse)
    chosen = machine.Rehearsal(pack) if options.rehearse else machine.Card(pack)
    if options.rehearse:
        compute_as_a_card_does()
        # Threads that wait for each other take longer than such small sums.
        torch.set_num_threads(1)
    # What is loaded by now stays; every later search for garbage is shorter.
    gc.freeze()
    result: dict[str, Any] = {**chosen.describe(), "torch": torch.__version__, "host": host_version()}
    result["workspaces_mib"] = mib(work.warm_up(chosen))
    # On Windows a file may still be open at the end.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        result["checks"] = run_all(all_checks(pack, chosen, Path(folder)), chosen, options)
    result["seconds"] = round(time.perf_counter() - BEGAN, 1)
    print(table(result))
    print(json.dumps(result))
    return int(any(row["ok"] is False for row in result["checks"]))


def enter_host(is_cpu: bool) -> Any:
    """Put the host on the path and return the pack as the host loads it."""
    sys.path.insert(0, str(host_folder()))
    import comfy.cli_args

    comfy.cli_args.args.cpu = is_cpu
    return load_pack(ROOT)


def host_version() -> str:
    """Return the host's version."""
    import comfyui_version

    return str(comfyui_version.__version__)


def compute_as_a_card_does() -> None:
    """Take no way that only CPUs take: they need other memory."""
    from lowvram_lora.memory import convolution
    from lowvram_lora.training import optim

    convolution.SMALL_PICTURE = 0
    optim._FUSED_DEVICES = ()


def all_checks(pack: Any, chosen: machine.Machine, folder: Path) -> list[tuple[str, Check]]:
    """Return the checks by name, those that the others build on first."""
    found = [*Services(chosen).checks(), *Arithmetic(pack, chosen, folder).checks()]
    for number, layout in enumerate(chosen.sizes.layouts):
        found += Training(pack=pack, machine=chosen, layout=layout, folder=folder, is_first=number == 0).checks()
    return found


def run_all(
    named: Sequence[tuple[str, Check]], chosen: machine.Machine, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run every check that is asked for, whatever becomes of the others; return a row for each."""
    rows = []
    for name, check in named:
        is_end = name.startswith(END)
        if not is_end and not is_chosen(name, options.only):
            continue
        row = run_one(name, check, math.inf if is_end else options.deadline)
        if not is_end or row["ok"] is False:
            rows.append(row)
            say(f"{name}: {verdict(row)} {row.get('skipped', '')}\n{row.get('error', '')}".strip())
        try_to_tidy(chosen)
    return rows


def is_chosen(name: str, only: Sequence[str]) -> bool:
    """Return whether a check is to run. What others work with always is."""
    return not only or name.startswith(("network ", *only))


def run_one(name: str, check: Check, deadline: float) -> dict[str, Any]:
    """Return a check's row; no exception of it goes further."""
    row: dict[str, Any] = {"name": name, "ok": None, "seconds": 0.0}
    began = time.perf_counter()
    if began - BEGAN > deadline:
        return {**row, "skipped": "the time is up"}
    if not name.startswith(END):
        say(f"{name} ...")
    numbers: Numbers = {}
    try:
        check(numbers)
        row["ok"] = True
    except SkippedError as reason:
        row["skipped"] = str(reason)
    except Exception:  # noqa: BLE001 - whatever it is, it is this check's failure and no other's
        row["ok"], row["error"] = False, traceback.format_exc()
    row["seconds"] = round(time.perf_counter() - began, 1)
    return {**row, **numbers}


def try_to_tidy(chosen: machine.Machine) -> None:
    """Give memory back; after a fault of the device nothing works any more, and each check says so itself."""
    try:
        chosen.tidy()
    except RuntimeError as error:
        say(str(error))


def verdict(row: dict[str, Any]) -> str:
    """Return a row's result in a word."""
    return "skipped" if row["ok"] is None else "ok" if row["ok"] else "FAILED"


def say(text: str) -> None:
    """Tell whoever waits."""
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {text}", file=sys.stderr, flush=True)


def table(result: dict[str, Any]) -> str:
    """Return the result as aligned text."""
    about = ", ".join(f"{name} {value}" for name, value in result.items() if name != "checks")
    cells = [(row["name"], verdict(row), f"{row['seconds']:.1f}", details(row)) for row in result["checks"]]
    widths = [max(len(line[i]) for line in (("check", "result", "s"), *cells)) for i in range(3)]
    lines = [
        f"{name:{widths[0]}}  {word:{widths[1]}}  {seconds:>{widths[2]}}  {text}".rstrip()
        for name, word, seconds, text in (("check", "result", "s", ""), *cells)
    ]
    return "\n".join([about, "", *lines, ""])


def details(row: dict[str, Any]) -> str:
    """Return a row's numbers in words."""
    if row["ok"] is False:
        return str(row["error"]).strip().splitlines()[-1]
    if row["ok"] is None:
        return str(row["skipped"])
    skipped = ("name", "ok", "seconds")
    plain = {k: v for k, v in row.items() if k not in skipped and isinstance(v, int | float)}
    words = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in plain.items())
    return "  ".join(words)


if __name__ == "__main__":
    sys.exit(main())
