from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from skimage.measure import shannon_entropy

from lowvram_lora.config import ComplexityConfig, DataConfig
from lowvram_lora.data.complexity import count_words, grey_entropy, report, score
from lowvram_lora.data.scan import scan
from lowvram_lora.errors import PathError


def make_folder(folder: Path) -> Path:
    values = np.random.default_rng(0).normal(128, 30, (96, 64, 3)).clip(0, 255).astype(np.uint8)
    Image.fromarray(values).save(folder / "noise.png")
    Image.new("RGB", (64, 64), (9, 9, 9)).save(folder / "flat.png")
    Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).save(folder / "ramp.png")
    (folder / "noise.txt").write_text("a red cat on a mat", encoding="utf-8")
    (folder / "flat.txt").write_text("一只红猫", encoding="utf-8")
    return folder


def test_entropy_agrees_with_scikit_image(tmp_path: Path) -> None:
    make_folder(tmp_path)
    for name in ("noise.png", "ramp.png", "flat.png"):
        with Image.open(tmp_path / name) as image:
            expected = shannon_entropy(np.asarray(image.convert("L")), base=2) / 8
            assert grey_entropy(image) == pytest.approx(expected, abs=1e-12)


def test_scores_weigh_entropy_and_caption_length(tmp_path: Path) -> None:
    dataset = scan(DataConfig(folder=str(make_folder(tmp_path)), bucket_step=8), [tmp_path])
    scored = score(dataset, ComplexityConfig(image_weight=0.7, text_weight=0.3))
    by_name = {sample.name: sample.complexity for sample in scored.samples}
    assert by_name["ramp.png"].entropy == pytest.approx(1.0)
    assert by_name["ramp.png"].score == pytest.approx(0.7)
    assert by_name["flat.png"].entropy == 0.0
    assert by_name["flat.png"].caption_length == pytest.approx(4 / 6)
    assert by_name["flat.png"].score == pytest.approx(0.3 * 4 / 6)
    assert by_name["noise.png"].caption_length == 1.0
    assert all(sample.complexity is None for sample in dataset.samples)
    assert scored.fingerprint == dataset.fingerprint


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("", 0),
        ("a cat", 2),
        ("don't, well-known", 2),
        ("一只猫", 3),
        ("sks一只猫 girl", 5),
        ("ねこ", 2),
        ("고양이 한 마리", 3),
    ],
)
def test_words(caption: str, words: int) -> None:
    assert count_words(caption) == words


def test_report_shows_the_spread(tmp_path: Path) -> None:
    dataset = scan(DataConfig(folder=str(make_folder(tmp_path)), bucket_step=8), [tmp_path])
    scored = score(dataset, ComplexityConfig())
    text = report(scored)
    scores = sorted(sample.complexity.score for sample in scored.samples)
    for word, value in (("min", scores[0]), ("median", scores[1]), ("max", scores[2])):
        assert f"{word} {value:.3f}" in text
    bars = [line for line in text.splitlines() if " to " in line]
    assert sum(int(line.split()[-1]) for line in bars) == 3
    assert "flat.png" in text.splitlines()[-1]


def test_no_captions_score_zero_for_text(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    scored = score(scan(DataConfig(folder=str(tmp_path)), [tmp_path]), ComplexityConfig())
    assert scored.samples[0].complexity.score == 0.0
    assert "all of them" in report(scored)


def test_a_picture_gone_since_the_scan_is_named(tmp_path: Path) -> None:
    dataset = scan(DataConfig(folder=str(make_folder(tmp_path)), bucket_step=8), [tmp_path])
    (tmp_path / "ramp.png").unlink()
    with pytest.raises(PathError, match=r"ramp\.png"):
        score(dataset, ComplexityConfig())
