"""Score Complexity as the host runs it: what it gives, what it shows, what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
import numpy as np
import pytest
import torch
from PIL import Image


@pytest.fixture
def node(pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(folder_paths, "user_directory", str(tmp_path / "user"))
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path / "temp"))
    return pack.nodes.complexity.ScoreComplexity.PREPARE_CLASS_CLONE({})


@pytest.fixture
def dataset(pack: Any, tmp_path: Path) -> Any:
    folder = tmp_path / "my 猫"
    folder.mkdir()
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 50 * number + 2, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"图{number}.png")
    data = pack.nodes.dataset
    return data.scan(data.DataConfig(folder=str(folder), resolution=64), [tmp_path])


def run(node: Any, dataset: Any, **widgets: Any) -> Any:
    with torch.inference_mode():
        return node.EXECUTE_NORMALIZED(dataset=dataset, **{"image_weight": 0.7, "text_weight": 0.3, **widgets})


def test_a_workflow_saved_with_the_two_weights_alone_still_runs(node: Any, dataset: Any) -> None:
    scored, report, _ = run(node, dataset).args
    assert len({sample.complexity.score for sample in scored.samples}) == 5
    assert "图0.png" in report


def test_the_picture_is_an_image_and_the_node_shows_it_beside_the_report(node: Any, dataset: Any) -> None:
    output = run(node, dataset)
    _, report, picture = output.args
    assert picture.ndim == 4 and picture.shape[0] == 1 and picture.shape[3] == 3
    assert picture.dtype == torch.float32 and picture.device.type == "cpu"
    assert 0.0 <= float(picture.min()) < float(picture.max()) <= 1.0
    (shown,) = output.ui["images"]
    with Image.open(Path(folder_paths.get_temp_directory()) / shown["subfolder"] / shown["filename"]) as file:
        assert np.array_equal(np.asarray(file), (picture[0] * 255).round().byte().numpy())
    assert output.ui["text"] == (report,)


def test_pictures_are_measured_once(node: Any, dataset: Any) -> None:
    before = run(node, dataset).args[0]
    for sample in dataset.samples:
        sample.image.unlink()
    assert run(node, dataset).args[0] == before


def test_skip_gives_all_the_same_score(node: Any, dataset: Any) -> None:
    scored = run(node, dataset, skip=True).args[0]
    assert {sample.complexity.score for sample in scored.samples} == {0.5}


def test_the_outputs_that_saved_workflows_use_are_where_they_were(node: Any) -> None:
    names = [output.display_name for output in node.define_schema().outputs]
    assert names == ["dataset", "report", "picture"]
