"""The plan for each of several budgets, at full size: no GPU, no weights."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench import memory


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="dev.py bench plan", description=__doc__)
    parser.add_argument("--model", choices=("sd15", "sdxl", "sd3", "flux"), required=True)
    parser.add_argument("--budget-gb", default="1,2,4,6,8,12,24", help="GiB, comma between")
    parser.add_argument("--resolution", type=int, help="pixels a side; 512 for sd15 and 1024 for the others by default")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", choices=tuple(memory.TARGETS), default="attn-ff")
    parser.add_argument("--allow-lossy", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    options.resolution = options.resolution or memory.usual_resolution(options.model)
    try:
        options.budgets = [float(value) for value in options.budget_gb.split(",")]
    except ValueError:
        parser.error(f"--budget-gb is {options.budget_gb!r}; it must be numbers with commas between, such as 1,2,4")
    if min(options.budgets) <= 0:
        parser.error("--budget-gb: every budget must be above 0")
    options.budget_gb = 0.0
    return options


def main(arguments: list[str]) -> int:
    """Plan for every budget and print a row for each."""
    from tests.bench import _full_size

    options = parse(arguments)
    pack = _full_size.enter_host()
    with tempfile.TemporaryDirectory() as folder:
        job = memory.full_size_job(pack, options.model, options, Path(folder))
        rows = plan_rows(pack, job, options)
    print(json.dumps({"model": options.model, "rows": rows}) if options.json else table(rows))
    return 0


def plan_rows(pack: Any, job: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row a budget; a refusal is a row as well."""
    core = pack.lowvram_lora
    layers = core.adapters.targets.select(job.denoiser.network, job.config.lora.targets)
    prepare = core.training.prepare
    device = prepare.device_facts(job)
    facts, facts_for = prepare.facts_of(job, layers, "bf16", device)
    wishes = prepare.wishes_of(replace(job.config, allow_lossy=options.allow_lossy), "bf16")
    plan_for = core.memory.plan.make_plan
    fastest = plan_for(facts, wishes, device).pace.seconds
    rows = []
    for budget in options.budgets:
        try:
            plan = plan_for(facts, replace(wishes, vram_budget_gb=budget), device, facts_for)
        except core.errors.BudgetError as refused:
            rows.append({"budget_gb": budget, "refused": str(refused)})
        else:
            rows.append({**core.memory.table.plan_row(plan, fastest), "budget_gb": budget})
    return rows


# What fits a line; --json has everything.
COLUMNS = (
    "budget_gb",
    "peak_mib",
    "margin_mib",
    "resident_mib",
    "activations_mib",
    "ram_mib",
    "recomputed_blocks",
    "copied_mib_per_step",
    "relative_time",
)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as aligned text, and each refusal below."""
    lines = [list(COLUMNS), *([str(row.get(name, "-")) for name in COLUMNS] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*text, *(f"{row['budget_gb']:g} GiB: {row['refused']}" for row in rows if row.get("refused"))])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
