from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lowvram_lora import fakes
from lowvram_lora.config import DataConfig, LoraConfig, SamplerConfig, TrainConfig
from lowvram_lora.data import store
from lowvram_lora.data.batches import BatchRecipe
from lowvram_lora.data.cache import CachePlan, build
from lowvram_lora.data.groups import by_shape
from lowvram_lora.data.index import CacheIndex
from lowvram_lora.data.scan import scan
from lowvram_lora.data.tiers import TieredCache
from lowvram_lora.errors import ConfigError
from lowvram_lora.fakes import FakeCodec, FakeTextEncoder
from lowvram_lora.training.record import RunStore
from lowvram_lora.training.run import Job, run

PLANNED = ["sparse", "bucketed", "sequential", "random", "curriculum"]


def index_of(root: Path, **options: object) -> CacheIndex:
    """Return the cache of ten pictures of two shapes, at two scales."""
    folder = root / "集"
    folder.mkdir(exist_ok=True)
    for number in range(10):
        pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        size = (256, 256) if number % 3 else (256, 128)
        Image.fromarray(pixels).resize(size).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"图 {number} of {'many ' * number}", encoding="utf-8")
    dataset = scan(DataConfig(folder=str(folder), resolution=256, upscale=False, **options), [root])
    plan = CachePlan(scales=(1.0, 0.5))
    return build(dataset, FakeCodec(), FakeTextEncoder(), root / "cache", lambda *_: None, plan)[0]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> CacheIndex:
    made = index_of(tmp_path_factory.mktemp("planned"), repeats=2)
    entries = tuple(replace(entry, complexity_score=number / 10) for number, entry in enumerate(made.entries))
    return replace(made, entries=entries)


def recipe(index: CacheIndex, strategy: str, **options: object) -> BatchRecipe:
    return BatchRecipe(index, SamplerConfig(**{"batch_size": 3, "strategy": strategy, "seed": 5, **options}))


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("strategy", PLANNED)
def test_every_strategy_shows_each_sample_as_often_as_its_repeats(
    index: CacheIndex, strategy: str, adaptive: bool
) -> None:
    made = recipe(index, strategy, adaptive_batch=adaptive)
    for number in range(3):
        seen = Counter(draw.entry for batch in made.epoch(number) for draw in batch)
        assert seen == dict.fromkeys(range(10), 2)
    assert "Counted: each of 10 samples is seen 2 times, exactly" in made.report()


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("strategy", PLANNED)
def test_no_batch_needs_more_than_the_largest(index: CacheIndex, strategy: str, adaptive: bool) -> None:
    made = recipe(index, strategy, adaptive_batch=adaptive)
    (largest,) = by_shape(index, made.planner.largest()).items()
    most = len(largest[1]) * np.prod(largest[0])
    groups = [by_shape(index, batch) for number in range(4) for batch in made.epoch(number)]
    assert all(len(group) * np.prod(shape) <= most for each in groups for shape, group in each.items())


def test_a_planned_batch_is_read_like_any_other(index: CacheIndex) -> None:
    made, cache = recipe(index, "sparse"), TieredCache(index)
    for draw in (draw for k in range(made.batches_per_epoch) for draw in made.batch(k)):
        assert tuple(cache.latents(draw).shape) == index.image_of(draw).latent_shape


def test_planning_reads_no_file(index: CacheIndex) -> None:
    nowhere = replace(index, root=Path("nowhere"))
    assert recipe(nowhere, "sparse").epoch(1) == recipe(index, "sparse").epoch(1)


def test_a_curriculum_goes_from_simple_to_hard(index: CacheIndex) -> None:
    drawn = [draw.entry for batch in recipe(index, "curriculum", batch_size=1).epoch(0) for draw in batch]
    assert drawn == [*range(10), *range(10)]


def test_smaller_samples_fill_larger_batches(index: CacheIndex) -> None:
    sizes = [len(batch) for batch in recipe(index, "bucketed", batch_size=2, adaptive_batch=True).epoch(0)]
    assert 2 < max(sizes) <= 8


def test_ordered_can_not_count_tokens() -> None:
    with pytest.raises(ConfigError, match="sequential"):
        SamplerConfig(strategy="ordered", adaptive_batch=True)


def test_only_sparse_tells_its_gain(index: CacheIndex) -> None:
    assert "Information gain in a batch" in recipe(index, "sparse").report()
    assert "Information gain" not in recipe(index, "random").report()


def test_a_run_is_known_by_what_decides_its_batches(index: CacheIndex) -> None:
    harder = replace(index, entries=(replace(index.entries[0], complexity_score=0.95), *index.entries[1:]))
    for strategy, is_decided in (("sparse", True), ("curriculum", True), ("random", False), ("shuffle", False)):
        assert (recipe(index, strategy).fingerprint != recipe(harder, strategy).fingerprint) == is_decided
    other = replace(index, entries=(replace(index.entries[0], visual=index.entries[1].visual), *index.entries[1:]))
    assert recipe(index, "sparse").fingerprint != recipe(other, "sparse").fingerprint
    assert recipe(index, "random").fingerprint == recipe(other, "random").fingerprint
    assert recipe(index, "random").fingerprint != recipe(index, "random", adaptive_batch=True).fingerprint


def test_what_is_held_out_is_never_drawn(tmp_path: Path) -> None:
    made = index_of(tmp_path, validation_share=0.3)
    held = {entry.name for entry in made.held_out}
    drawn = {made.entries[draw.entry].name for batch in recipe(made, "sparse").epoch(0) for draw in batch}
    assert len(held) == 3 and len(drawn) == 7 and not held & drawn


def test_a_cache_of_an_older_version_gives_the_same_plan(tmp_path: Path) -> None:
    before = index_of(tmp_path)
    for entry in before.entries:
        path = store.path_of(before.root, "latents", entry.latents_key)
        store.write(path, store.read(path).tensors, {})
    after = index_of(tmp_path)
    assert after == before
    assert all(entry.visual and entry.textual and entry.text_tokens == 8 for entry in after.entries)
    assert recipe(after, "sparse").fingerprint == recipe(before, "sparse").fingerprint


@pytest.mark.parametrize("adaptive", [False, True])
def test_sparse_batches_of_several_sizes_train_and_repeat_bit_for_bit(
    index: CacheIndex, tmp_path: Path, adaptive: bool
) -> None:
    made = recipe(index, "sparse", adaptive_batch=adaptive)
    assert any(len(by_shape(index, batch)) > 1 for batch in made.epoch(0))
    losses = []
    for name in ("one", "two"):
        job = Job(
            denoiser=fakes.FakeDenoiser(),
            recipe=made,
            config=TrainConfig(steps=made.batches_per_epoch + 1, lora=LoraConfig(rank=2)),
            hardware=fakes.FakeHardware(),
            cancel=fakes.FakeCancel(),
            loras_root=tmp_path / name,
            store=RunStore(tmp_path / f"{name} runs"),
        )
        *_, finished = run(job)
        losses.append(finished.record.losses)
    assert losses[0] == losses[1] and len(losses[0]) == made.batches_per_epoch + 1
