"""``python3 dev.py bench data --json`` at a tiny size: every number is there and possible, however long it took."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from lowvram_lora.data import precision
from lowvram_lora.data.epochs import PlannedStrategy
from tests.bench import data
from tests.harness import photos

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--pictures", "3,5", "--others", "2", "--build", "2", "--side", "64", "--rounds", "1", "--samples", "40")


def run(*arguments: str) -> str:
    """Run it as ``dev.py`` does, in a process of its own: it enters the host."""
    command = [sys.executable, "-m", "tests.bench.data", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = photos.make_dataset(tmp_path_factory.mktemp("照片 of stones"), photos.PHOTOS[-2:]) / "photos"
    found: dict[str, Any] = json.loads(run(*TINY, "--photos", str(folder), "--json"))
    return found


def numbers(found: Any) -> Iterator[float]:
    """Yield every number in ``found``, wherever it is."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        for each in found:
            yield from numbers(each)
    elif isinstance(found, int | float):
        yield found


def test_it_is_one_object_with_every_part_and_no_impossible_number(result: dict[str, Any]) -> None:
    assert set(result) == {*data.PARTS, "claims"}
    # The gain of a plan is a difference from the batch's own, so it may be anything finite.
    assert all(math.isfinite(number) for number in numbers(result))
    parts = {name: part for name, part in result.items() if name not in ("planning", "claims", "build")}
    assert all(number >= 0 for number in numbers(parts))


def test_each_number_of_pictures_is_scanned_and_scored_in_a_process_of_its_own(result: dict[str, Any]) -> None:
    rows = result["scan"]
    assert [(row["kind"], row["pictures"]) for row in rows] == [
        ("jpeg, 1024 px", 3),
        ("jpeg, 1024 px", 5),
        ("png, 1024 px", 2),
        ("jpeg, 12 megapixels", 2),
    ]
    for row in rows:
        assert min(row[f"{step}_per_s"] for step in ("scan", "examine", "score", "score_all", "load_dataset")) > 0
        assert 0 < row["start_mib"] <= row["scan_peak_mib"] <= row["peak_mib"] < 4096
        assert {"second_scan_s", "second_examine_s", "score_after_examine_s"} <= set(row)


def test_the_build_is_held_to_a_bare_loop_and_to_the_node_of_the_host(result: dict[str, Any]) -> None:
    build = result["build"]
    ways = ("bare_loop", "read_and_loop", "build", "host_node", "read_and_host_node", "captioned_build", "second_build")
    assert min(build[f"{way}_ms"] for way in ways) > 0
    assert build["build_over_bare_loop"] == pytest.approx(build["build_ms"] / build["bare_loop_ms"])
    ratio = build["captioned_build_ms"] / build["host_node_ms"]
    assert build["captioned_build_over_host_node"] == pytest.approx(ratio)
    assert build["second_build_s"] == pytest.approx(build["second_build_ms"] * build["pictures"] / 1000)


def test_every_encoding_has_its_bytes_and_its_error(result: dict[str, Any]) -> None:
    for rows in result["encodings"].values():
        by_name = {row["name"]: row for row in rows}
        assert set(precision.NAMES) <= set(by_name)
        full = by_name["full"]
        assert full["max_error"] == 0.0
        for name in set(precision.NAMES) - {"full"}:
            assert 0 < by_name[name]["bytes_per_sample"] < full["bytes_per_sample"]
            assert by_name[name]["rms_error"] <= by_name[name]["max_error"] < 1.0


def test_every_strategy_plans_an_epoch(result: dict[str, Any]) -> None:
    planning = result["planning"]
    assert planning["samples"] == 40
    assert {row["strategy"] for row in planning["rows"]} == set(get_args(PlannedStrategy))
    for row in planning["rows"]:
        assert row["batches"] >= 1 and row["mean_tokens"] <= row["max_tokens"]
        assert row["prepare_wall_s"] + row["first_epoch_wall_s"] <= planning["slowest_epoch_s"]


def test_a_claim_holds_where_what_was_found_is_no_more_than_it_says(result: dict[str, Any]) -> None:
    assert len(result["claims"]) == 7
    for claim in result["claims"]:
        assert claim["holds"] == (claim["found"] <= claim["at_most"])


def test_one_part_alone_is_a_table() -> None:
    shown = run("--only", "planning", "--samples", "20")
    assert all(strategy in shown for strategy in get_args(PlannedStrategy))
    assert "encodings" not in shown


@pytest.mark.parametrize("wrong", [("--pictures", "ten"), ("--build", "0"), ("--vae", "nowhere")])
def test_an_option_that_makes_no_sense_is_refused_before_anything_is_made(
    wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        data.parse([*wrong])
    assert refused.value.code == 2
    assert wrong[0].removeprefix("--") in capsys.readouterr().err
