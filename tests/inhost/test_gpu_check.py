"""The checks for a GPU, rehearsed: the script runs here to its end on CPU memory that plays a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ("tests/gpu/check.py",)
MODULE = ("-m", "tests.gpu.check")
TINY = ["cap", "copies", "gradients sd15", "same losses sd15", "gradients flux", "same losses flux", "precisions"]
PEAKS = ["largest", "middle", "smallest"]
FULL_SIZE = [
    name
    for family, others in (("sd15", ["ladder sd15", "speed sd15"]), ("sdxl", ["speed sdxl", "share sdxl"]))
    for name in (f"network {family}", *(f"peak {family} {budget}" for budget in PEAKS), *others)
]


def called(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", check=False
    )


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def rehearsed() -> subprocess.CompletedProcess[str]:
    return called(*SCRIPT, "--rehearse")


@pytest.fixture(scope="module")
def rows(rehearsed: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert rehearsed.returncode == 0, rehearsed.stdout + rehearsed.stderr
    return {row["name"]: row for row in result_of(rehearsed)["checks"]}


def test_a_rehearsal_does_every_check_and_all_pass(
    rehearsed: subprocess.CompletedProcess[str], rows: dict[str, dict[str, Any]]
) -> None:
    assert list(rows) == TINY + FULL_SIZE
    assert all(row["ok"] is True and row["seconds"] >= 0 for row in rows.values())
    result = result_of(rehearsed)
    assert result["torch"] == torch.__version__ and result["host"] and result["device"]
    table = rehearsed.stdout.splitlines()[:-1]
    assert [line for line in table if line.startswith("peak sdxl middle") and " ok " in line]


@pytest.mark.parametrize("budget", PEAKS)
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_real_peaks_are_the_simulated_ones(family: str, budget: str, rows: dict[str, dict[str, Any]]) -> None:
    row = rows[f"peak {family} {budget}"]
    more = row["real_mib"] - row["simulated_mib"]
    # What stands in for RAM is counted here as well: samples, the last good adapters, two states on the way.
    copies = row["adapters_mib"] * (5 if row["optimizer_in_ram"] else 1)
    assert -0.1 <= more <= copies + rows[f"network {family}"]["samples_mib"] + 0.1
    assert row["real_mib"] <= row["budget_mib"]
    assert row["error_pct"] == pytest.approx(100 * more / row["simulated_mib"], abs=2)
    assert len(row["losses"]) == 3


# In bfloat16, where parts of a feed-forward give their gradients one after the other.
ALIKE = 1e-2


def test_a_share_of_the_memory_is_kept_to_and_its_time_told(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["share sdxl"]
    assert row["share_mib"] < row["whole_mib"] and row["share_mib"] <= row["share_budget_mib"]
    assert row["share_s"] > 0 and row["time_ratio"] == pytest.approx(row["share_s"] / row["whole_s"], abs=0.01)


def test_budgets_lead_to_different_runs_with_the_same_losses(rows: dict[str, dict[str, Any]]) -> None:
    for family in ("sd15", "sdxl"):
        runs = [rows[f"peak {family} {budget}"] for budget in PEAKS]
        assert runs[0]["real_mib"] > runs[1]["real_mib"] and runs[0]["budget_mib"] > runs[2]["budget_mib"]
        assert runs[0]["ring_mib"] == 0 < runs[2]["ring_mib"]
        assert runs[1]["losses"] == pytest.approx(runs[0]["losses"], rel=ALIKE)
        assert runs[2]["losses"] == pytest.approx(runs[0]["losses"], rel=ALIKE)


def test_the_ladder_is_gone_down_and_the_run_finished(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["ladder sd15"]
    assert row["rungs"] >= 1 and "out of memory" in row["causes"][0]
    assert row["real_mib"] <= row["ceiling_mib"] < row["planned_mib"]
    assert row["losses"] == pytest.approx(rows["peak sd15 largest"]["losses"], rel=ALIKE)


def test_a_ceiling_is_held_and_numbers_are_right(rows: dict[str, dict[str, Any]]) -> None:
    cap = rows["cap"]
    assert cap["allocated_mib"] <= cap["limit_mib"] < cap["refused_at_mib"] <= cap["afterwards_mib"]
    assert max(rows[f"gradients {family}"]["worst_error"] for family in ("sd15", "flux")) < 1e-6
    assert [rows["precisions"][f"{name}_ran_in"] for name in ("fp32", "bf16", "fp16")] == ["fp32", "bf16", "fp16"]


def test_speeds_say_what_was_copied(rows: dict[str, dict[str, Any]]) -> None:
    for family in ("sd15", "sdxl"):
        speed, network = rows[f"speed {family}"], rows[f"network {family}"]
        assert min(speed["resident_s"], speed["layer_s"], speed["block_s"], speed["unstaged_s"]) > 0
        # Forward and backward at the least, each weight once.
        assert speed["layer_copied_mib"] >= speed["block_copied_mib"] > network["weights_mib"]
        assert isinstance(speed["overlapped"], bool)


def test_checks_that_come_too_late_are_skipped_by_name() -> None:
    done = called(*MODULE, "--rehearse", "--deadline", "0")
    assert done.returncode == 0, done.stderr
    rows = result_of(done)["checks"]
    assert [row["name"] for row in rows] == TINY + FULL_SIZE
    assert all(row["ok"] is None and row["skipped"] == "the time is up" for row in rows)


FAILING = """
import argparse, json
from tests.gpu import check, machine, outcome

def bad(numbers):
    numbers["seen"] = 1
    raise KeyError("the third")

def impossible(numbers):
    raise outcome.SkippedError("too small")

named = [("a", bad), ("b", impossible), ("c", lambda numbers: numbers.update(found=2))]
options = argparse.Namespace(only=[], deadline=600.0)
rows = check.run_all(named, machine.Rehearsal(None), options)
print(check.table({"device": "none", "checks": rows}))
print(json.dumps({"checks": rows}))
"""


def test_a_check_that_fails_stops_no_other() -> None:
    done = called("-c", FAILING)
    assert done.returncode == 0, done.stderr
    first, second, third = result_of(done)["checks"]
    assert first["ok"] is False and first["seen"] == 1
    assert "Traceback" in first["error"] and "the third" in first["error"]
    assert second["ok"] is None and second["skipped"] == "too small"
    assert third["ok"] is True and third["found"] == 2
    assert "KeyError: 'the third'" in done.stdout and "too small" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_the_script_says_so() -> None:
    done = called(*SCRIPT)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr and "--rehearse" in done.stderr
