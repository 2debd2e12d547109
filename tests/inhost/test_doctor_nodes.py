"""The dataset doctor where the host runs it: what Load Dataset says when it is told of the training to come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
import numpy as np
import pytest
import torch
from PIL import Image

from tests.harness.checkpoint import cached_sd15

LONG = "a red bicycle on a wall " * 14 + "sks"


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("user", "temp", "input"):
        monkeypatch.setattr(folder_paths, f"{name}_directory", str(tmp_path / name))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "input" / "my 猫"
    folder.mkdir(parents=True)
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"图{number}.png")
        caption = LONG if number == 1 else f"number {number}"
        (folder / f"图{number}.txt").write_text(caption, encoding="utf-8")
    return folder


@pytest.fixture
def checkpoint() -> tuple[Any, Any]:
    import comfy.sd

    with torch.inference_mode():
        _, clip, vae, *_ = comfy.sd.load_checkpoint_guess_config(str(cached_sd15()), output_model=False)
    return clip, vae


def loaded(pack: Any, folder: Path, **more: Any) -> Any:
    widgets = {"folder": folder.name, "resolution": 64, "trigger_word": "", "caption_extension": "auto", **more}
    with torch.inference_mode():
        return pack.nodes.dataset.LoadDataset.PREPARE_CLASS_CLONE({}).EXECUTE_NORMALIZED(**widgets)


def test_load_dataset_knows_nothing_of_the_training_unless_it_is_told(pack: Any, folder: Path) -> None:
    _, report, _ = loaded(pack, folder).args
    assert "captions too long" not in report and "batch larger" not in report and "for the steps" not in report


def test_load_dataset_names_what_the_planned_training_can_not_do(
    pack: Any, folder: Path, checkpoint: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clip, _ = checkpoint
    monkeypatch.setattr(clip, "load_model", None)  # only the tokenizer is asked
    output = loaded(pack, folder, clip=clip, planned_steps=1000, planned_batch_size=4)
    dataset, report, _ = output.args
    assert output.ui["text"] == (report,)
    assert "captions too long: 1 caption" in report and "sks'" in report and "图1.png" in report
    assert "batch larger than a bucket: batch_size 4 is more than the 3 draws" in report
    assert "too few images for the steps: 1000 steps of 3 draws each" in report
    few = loaded(pack, folder, planned_steps=1, planned_batch_size=2).args
    assert "too many images for the steps: 1 step of 1.5 draws each" in few[1]
    assert few[0].fingerprint == dataset.fingerprint  # plans change no training


def test_build_tiered_cache_names_captions_beyond_the_window_of_its_clip(
    pack: Any, folder: Path, checkpoint: tuple[Any, Any]
) -> None:
    clip, vae = checkpoint
    node = pack.nodes.cache.BuildTieredCache.PREPARE_CLASS_CLONE({})
    dataset = loaded(pack, folder).args[0]
    with torch.inference_mode():
        _, report = node.EXECUTE_NORMALIZED(
            dataset=dataset, vae=vae, clip=clip, ram_cache_mb=-1, profile="balanced"
        ).args
    assert "captions too long: 1 caption" in report and "图1.png" in report and "sks'" in report
    assert "图0.png" not in report
