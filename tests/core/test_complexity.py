from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from scipy.stats import percentileofscore
from skimage.measure import shannon_entropy

from lowvram_lora.config import ComplexityConfig, DataConfig
from lowvram_lora.data.complexity import count_words, extremes, grey_entropy, report, score
from lowvram_lora.data.histogram import bars
from lowvram_lora.data.overview import overview
from lowvram_lora.data.scan import Dataset, scan
from lowvram_lora.errors import ConfigError, PathError


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
    assert "Simplest: flat.png" in text
    assert "Hardest: noise.png" in text


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


def dataset_of(folder: Path, values: list[int]) -> Dataset:
    """Pictures of 64 x 64 noise within ``value`` greys of the middle: the more, the harder."""
    source = np.random.default_rng(3)
    for number, value in enumerate(values):
        greys = source.integers(128 - value, 128 + value + 1, (64, 64), dtype=np.uint8)
        Image.fromarray(greys).save(folder / f"{number}.png")
    return scan(DataConfig(folder=str(folder), bucket_step=8), [folder])


def scores_of(dataset: Dataset) -> list[float]:
    return [sample.complexity.score for sample in dataset.samples]


def test_the_weights_need_not_add_up_to_one(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [1, 20, 120])
    (tmp_path / "0.txt").write_text("a cat", encoding="utf-8")
    dataset = scan(dataset.config, [tmp_path])
    sevenths = scores_of(score(dataset, ComplexityConfig(image_weight=0.7, text_weight=0.3)))
    tenfold = scores_of(score(dataset, ComplexityConfig(image_weight=7.0, text_weight=3.0)))
    alone = score(dataset, ComplexityConfig(image_weight=0.2, text_weight=0.0))
    assert tenfold == pytest.approx(sevenths)
    assert scores_of(alone) == pytest.approx([sample.complexity.entropy for sample in alone.samples])


@settings(max_examples=20, deadline=None)
@given(weights=st.lists(st.floats(0.0, 1e6), min_size=5, max_size=5).filter(any), percentile=st.booleans())
def test_every_score_is_between_zero_and_one(weights: list[float], percentile: bool, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("data")
    image, text, frequency, edge, colour = weights
    config = ComplexityConfig(
        image_weight=image,
        text_weight=text,
        frequency_weight=frequency,
        edge_weight=edge,
        colour_weight=colour,
        percentile=percentile,
    )
    scored = score(scan(DataConfig(folder=str(make_folder(folder)), bucket_step=8), [folder]), config)
    assert all(0.0 <= value <= 1.0 for value in scores_of(scored))


@pytest.mark.parametrize("name", ["frequency_weight", "edge_weight", "colour_weight"])
def test_a_detail_measure_counts_once_it_has_a_weight(name: str, tmp_path: Path) -> None:
    dataset = scan(DataConfig(folder=str(make_folder(tmp_path)), bucket_step=8), [tmp_path])
    config = ComplexityConfig(**{"image_weight": 0.0, "text_weight": 0.0, name: 1.0})
    by_name = {sample.name: sample.complexity.score for sample in score(dataset, config).samples}
    assert by_name["flat.png"] == 0.0
    assert by_name["noise.png"] > 0.3


def test_percentiles_spread_scores_that_are_close(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [50, 51, 52, 53, 54, 54])
    plain = score(dataset, ComplexityConfig(text_weight=0.0))
    spread = score(dataset, ComplexityConfig(text_weight=0.0, percentile=True))
    assert max(scores_of(plain)) - min(scores_of(plain)) < 0.05
    expected = [percentileofscore(scores_of(plain), value, kind="mean") / 100 for value in scores_of(plain)]
    assert scores_of(spread) == pytest.approx(expected)
    assert np.argsort(scores_of(spread)).tolist() == np.argsort(scores_of(plain)).tolist()


def test_scores_that_differ_by_rounding_alone_are_all_the_same() -> None:
    assert list(bars([0.5, float(np.nextafter(0.5, 1))])) == ["  0.500: all of them"]


def test_a_negative_is_as_rich_as_its_picture(tmp_path: Path) -> None:
    dataset_of(tmp_path, [60])
    with Image.open(tmp_path / "0.png") as image:
        ImageOps.invert(image).save(tmp_path / "negative.png")
    scored = score(scan(DataConfig(folder=str(tmp_path), bucket_step=8), [tmp_path]), ComplexityConfig())
    assert "all of them" in report(scored)


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_a_weight_that_is_no_weight_is_refused_by_name(weight: float) -> None:
    with pytest.raises(ConfigError, match="edge_weight"):
        ComplexityConfig(edge_weight=weight)


def test_weights_that_are_all_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        ComplexityConfig(image_weight=0.0, text_weight=0.0)
    ComplexityConfig(image_weight=0.0, text_weight=0.0, colour_weight=0.1)


def test_skip_reads_no_picture_and_gives_all_the_same_score(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [1, 120])
    for path in tmp_path.glob("*.png"):
        path.unlink()
    assert scores_of(score(dataset, ComplexityConfig(skip=True))) == [0.5, 0.5]


def test_a_caption_in_chinese_is_as_long_as_its_characters(tmp_path: Path) -> None:
    folder = tmp_path / "数据 set"
    folder.mkdir()
    dataset_of(folder, [9, 9])
    (folder / "0.txt").write_text("一只红色的猫坐在垫子上", encoding="utf-8")
    (folder / "1.txt").write_text("a red cat sits on the mat", encoding="utf-8")
    scored = score(scan(DataConfig(folder=str(folder), bucket_step=8), [tmp_path]), ComplexityConfig())
    assert [sample.complexity.caption_length for sample in scored.samples] == pytest.approx([1.0, 7 / 11])


def test_no_sample_is_named_both_simple_and_hard(tmp_path: Path) -> None:
    scored = score(dataset_of(tmp_path, [1, 10, 60, 110, 120]), ComplexityConfig())
    simplest, hardest = extremes(scored)
    assert [sample.name for sample in simplest] == ["0.png", "1.png"]
    assert [sample.name for sample in hardest] == ["4.png", "3.png"]


def test_the_picture_shows_the_spread_and_the_named_samples(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [1, 10, 60, 110])
    Image.new("RGB", (64, 64), (250, 0, 0)).save(tmp_path / "0.png")
    scored = score(scan(dataset.config, [tmp_path]), ComplexityConfig(text_weight=0.0))
    picture = overview(scored)
    same = overview(score(dataset, ComplexityConfig(skip=True)))
    assert picture.dtype == np.uint8
    assert picture.shape[1:] == same.shape[1:] == (picture.shape[1], 3)
    assert len(picture) > len(same)
    # The simplest sample is the red one; it is shown once, whole.
    assert (picture == (250, 0, 0)).all(axis=2).sum() == 64 * 64


def test_a_picture_gone_after_scoring_is_crossed_out(tmp_path: Path) -> None:
    scored = score(dataset_of(tmp_path, [1, 120]), ComplexityConfig())
    before = overview(scored)
    (tmp_path / "0.png").unlink()
    after = overview(scored)
    assert after.shape == before.shape
    assert (after != before).any()
