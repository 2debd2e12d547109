"""The claims of device memory that this project set out with, against a plain script in the style of diffusers'.

Both are counted by the same ledger, without a device: live bytes of one step at full size, with the same stand-in for
a fused attention kernel. The script is diffusers' own network with PEFT's layers (see ``_plain.py``); ours is the
host's network as LoRA Train runs it. Bytes are exact for what is counted. Not counted, on either side: VAE and text
encoders (the SDXL script keeps them on the device), a driver's context, workspaces, fragmentation. Times are no
measurements but the plan's own model of a nominal card.

Three parts: ``memory``, an SDXL job in 40 % less than the script; ``text``, 50 to 54 % less at 512, 1024 and 2048 text
tokens; ``techniques``, what each of ours earns alone, and what all others lose without it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from tests.bench import _full_size, _plain
from tests.bench._jobs import Case, Model, Ours, core_of, opened
from tests.bench.memory import LARGE, mib

PARTS = ("memory", "text", "techniques")
SHARE_OF_MEMORY, SHARE_OF_TEXT = 0.60, 0.46
"""What is left of the script's bytes where 40 % and 54 % are saved."""
LENGTHS, PLANNED = (512, 1024, 2048), 1024

OF_MEMORY = (Case("sdxl", 4, 128, 77),)
OF_TEXT = tuple(
    Case(family, batch, 128, rows) for family, batch in (("sdxl", 4), ("sd3", 4), ("flux", 1)) for rows in LENGTHS
)
OF_TECHNIQUES = (Case("sdxl", 4, 128, 77), Case("sd3", 4, 128, 1024))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="dev.py bench claims", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="run these parts alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Simulate all that was asked for and print it."""
    options = parse(arguments)
    torch.set_num_threads(1)
    began = time.perf_counter()
    pack = _full_size.enter_host()
    bench = Bench(pack)
    result: dict[str, Any] = {part: [] for part in PARTS if part in options.only}
    for part, case, work in _work(bench):
        if part in result:
            result[part].append(work(case))
            print(json.dumps(result[part][-1]), file=sys.stderr, flush=True)
    result["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(result) if options.json else table(result))
    return 0


def _work(bench: Bench) -> Iterator[tuple[str, Case, Callable[[Case], dict[str, Any]]]]:
    """Yield part, job and what is to be done with it."""
    yield from (("memory", case, partial(bench.against_script, share=SHARE_OF_MEMORY)) for case in OF_MEMORY)
    yield from (("techniques", case, bench.techniques) for case in OF_TECHNIQUES)
    for case in OF_TEXT:
        # A plan takes longer than all the rest; one length stands for the others.
        yield "text", case, partial(bench.against_script, share=SHARE_OF_TEXT if case.text_rows == PLANNED else None)


@dataclass(frozen=True)
class Technique:
    """One of the lossless ways to take less memory, which can be on or off by itself.

    Attributes:
        on, off: fields of ``Setting`` by the job.
    """

    name: str
    on: Callable[[Ours], dict[str, Any]]
    off: Callable[[Ours], dict[str, Any]]


TECHNIQUES = (
    Technique(
        "weights streamed",
        lambda ours: {"resident": frozenset(), "ring_bytes": ours.ring_bytes},
        lambda ours: {"resident": ours.matrices, "ring_bytes": 0},
    ),
    Technique("blocks recomputed", lambda ours: {"kept": frozenset()}, lambda ours: {"kept": ours.blocks}),
    Technique("feed-forwards in parts", lambda ours: {"chunked": ours.blocks}, lambda ours: {"chunked": frozenset()}),
    Technique("batch in parts", lambda ours: {"micro_batch": 1}, lambda ours: {"micro_batch": 0}),
    Technique(
        "convolutions run again",
        lambda ours: {"keep_convolutions": False},
        lambda ours: {"keep_convolutions": True},
    ),
    Technique("inputs of blocks in RAM", lambda ours: {"inputs_in_ram": True}, lambda ours: {"inputs_in_ram": False}),
    Technique("optimizer in RAM", lambda ours: {"optimizer_in_ram": True}, lambda ours: {"optimizer_in_ram": False}),
)
ALL = tuple(technique.name for technique in TECHNIQUES)


def setting(ours: Ours, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of the setting with the techniques of these names on, all others off."""
    fields: dict[str, Any] = {}
    for technique in TECHNIQUES:
        fields |= technique.on(ours) if technique.name in names else technique.off(ours)
    return fields


class Bench:
    """Counts both sides.

    Args:
        pack: as the host loads it.
        plain: the script's networks by family.
        model: family to the host's MODEL without data.
    """

    def __init__(self, pack: Any, plain: dict[str, Any] | None = None, model: Model = _full_size.model) -> None:
        self._pack, self._core = pack, core_of(pack)
        self._plain, self._model = plain or _plain.PLAIN, model

    def against_script(self, case: Case, share: float | None) -> dict[str, Any]:
        """Return the bytes of both, and how fast ours goes in ``share`` of the script's, if one is given."""
        with opened(self._pack, case, self._model) as ours:
            on, off = (ours.counter(**setting(ours, names)) for names in (ALL, ()))
            space, device = ours.space() if share else (None, None)
            row: dict[str, Any] = {
                "case": asdict(case),
                "label": case.label,
                "ours_mib": {"all techniques": mib(on.peak), "none": mib(off.peak)},
                "scripts": {},
            }
            for name, script in self.scripts(case).items():
                row["scripts"][name] = {
                    **script,
                    "less_with_all": round(1 - mib(on.peak) / script["mib"], 3),
                    "plan": share and _planned(self._core, space, device, int(script["mib"] * (1 << 20)), share),
                }
        return row

    def scripts(self, case: Case) -> dict[str, dict[str, Any]]:
        """Return what the script takes, with and without its checkpointing."""
        plain = self._plain[case.family]
        network = _plain.network(plain, case.rank)
        rows = {}
        for name, checkpointing in (("plain", False), ("checkpointing", True)):
            inputs = plain.inputs(case.batch, case.side, case.text_rows)
            counter = _plain.counted(self._core, network, inputs, checkpointing)
            rows[name] = {"mib": mib(counter.peak), "phase": counter.peak_phase}
        return rows

    def techniques(self, case: Case) -> dict[str, Any]:
        """Return what each technique takes off alone, and what all others together take without it."""
        with opened(self._pack, case, self._model) as ours:

            def peak(names: Sequence[str]) -> float:
                return mib(ours.counter(**setting(ours, names)).peak)

            least, most = peak(ALL), peak(())
            rows = {
                name: {
                    "alone": round(most - peak([name]), 1),
                    "missed": round(peak([other for other in ALL if other != name]) - least, 1),
                }
                for name in ALL
            }
        return {
            "case": asdict(case),
            "label": case.label,
            "script_mib": {name: script["mib"] for name, script in self.scripts(case).items()},
            "none_mib": most,
            "all_mib": least,
            "techniques": rows,
        }


def _planned(core: Any, space: Any, device: Any, script_bytes: int, share: float) -> dict[str, Any]:
    """Return the fastest way in ``share`` of the script's bytes, and its time against the fastest in all of them."""
    peaks = {"as_much": script_bytes, "less": int(script_bytes * share)}
    ways = {name: space.best(LARGE, device.ram, peak) for name, peak in peaks.items()}
    seconds = {
        name: core.memory.pace.pace(space.facts, setting, device.rates).seconds
        for name, setting in ways.items()
        if setting is not None
    }
    row: dict[str, Any] = {"asked_less": round(1 - share, 2), "fits": ways["less"] is not None}
    if ways["less"] is None:
        return row
    return row | {
        "peak_mib": mib(core.memory.footprint.footprint(space.facts, ways["less"]).peak),
        "modelled_time": round(seconds["less"] / seconds["as_much"], 3) if "as_much" in seconds else None,
        "way": _way(space.facts, ways["less"]),
    }


def _way(facts: Any, setting: Any) -> dict[str, Any]:
    """Return what ``setting`` does, in plain numbers."""
    blocks = facts.steps[setting.micro_batch or facts.batch_size].blocks
    return {
        "resident_layers": f"{len(setting.resident)} of {len(facts.layers)}",
        "recomputed_blocks": f"{len(blocks) - len(setting.kept)} of {len(blocks)}",
        "blocks_in_parts": len(setting.chunked),
        "micro_batch": setting.micro_batch or facts.batch_size,
        "inputs_in_ram": setting.inputs_in_ram,
        "optimizer_in_ram": setting.optimizer_in_ram,
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as lines."""
    lines: list[str] = []
    for row in (*result.get("memory", ()), *result.get("text", ())):
        lines += ["", row["label"]]
        lines += [f"  ours, {name:20} {each:10.1f} MiB" for name, each in row["ours_mib"].items()]
        for name, script in row["scripts"].items():
            lines.append(
                f"  script, {name:18} {script['mib']:10.1f} MiB, all techniques {script['less_with_all']:.0%} less"
            )
            lines += [f"    {_less_line(script['plan'])}"] if script["plan"] else []
    for row in result.get("techniques", ()):
        scripts = ", ".join(f"script {name} {each:.1f}" for name, each in row["script_mib"].items())
        lines += ["", f"{row['label']}: none {row['none_mib']:.1f}, all {row['all_mib']:.1f}, {scripts} MiB"]
        lines.append(f"  {'':28}{'alone':>12}{'missed':>12}")
        for name, each in row["techniques"].items():
            lines.append(f"  {name:28}{each['alone']:12.1f}{each['missed']:12.1f}")
    return "\n".join([*lines, f"{result['seconds']:.0f} s"])


def _less_line(plan: dict[str, Any]) -> str:
    asked = f"{plan['asked_less']:.0%} less"
    if not plan["fits"]:
        return f"{asked}: does not fit"
    way = ", ".join(f"{name} {value}" for name, value in plan["way"].items())
    return f"{asked}: {plan['peak_mib']:.1f} MiB, {plan['modelled_time']} times the modelled time ({way})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
