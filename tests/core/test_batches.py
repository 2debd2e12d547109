from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowvram_lora.config import SamplerConfig
from lowvram_lora.data.batches import BatchRecipe
from lowvram_lora.data.cache import CacheEntry, CacheIndex
from lowvram_lora.data.draw import Draw, Epoch
from lowvram_lora.errors import DatasetError

SQUARE, TALL, WIDE = (4, 64, 64), (4, 72, 56), (4, 56, 72)
Indices = tuple[tuple[int, ...], ...]
KINDS = st.lists(st.tuples(st.sampled_from([SQUARE, TALL, WIDE]), st.integers(1, 5)), min_size=1, max_size=12)


def recipe(kinds: list[tuple[tuple[int, ...], int]], **options: object) -> BatchRecipe:
    """Return a recipe over entries of these latent shapes and repeats."""
    entries = tuple(
        replace(CacheEntry.single(f"{i}.png", f"l{i}", f"t{i}", shape, repeats), bucket_px=(shape[1] * 8, shape[2] * 8))
        for i, (shape, repeats) in enumerate(kinds)
    )
    return BatchRecipe(CacheIndex(Path("nowhere"), entries, 0, "empty"), SamplerConfig(**options))


def indices(epoch: Epoch) -> Indices:
    """Return the entries of an epoch's batches, all of them as they are drawn by default."""
    assert all(draw == Draw(draw.entry) for batch in epoch for draw in batch)
    return tuple(tuple(draw.entry for draw in batch) for batch in epoch)


@settings(deadline=None)
@given(KINDS, st.integers(1, 7), st.sampled_from(["shuffle", "ordered"]), st.integers(0, 5), st.integers(0, 3))
def test_every_sample_is_seen_exactly_repeats_times(
    kinds: list[tuple[tuple[int, ...], int]], batch_size: int, strategy: str, seed: int, n: int
) -> None:
    """a26"""
    made = recipe(kinds, batch_size=batch_size, strategy=strategy, seed=seed)
    epoch = indices(made.epoch(n))
    seen = Counter(index for batch in epoch for index in batch)
    assert seen == {index: repeats for index, (_, repeats) in enumerate(kinds)}
    assert all(len({kinds[index][0] for index in batch}) == 1 for batch in epoch)
    assert all(1 <= len(batch) <= batch_size for batch in epoch)
    assert len(epoch) == made.batches_per_epoch


@settings(deadline=None)
@given(KINDS, st.integers(1, 4), st.lists(st.integers(0, 200), min_size=1, max_size=8))
def test_any_batch_can_be_had_at_any_time(
    kinds: list[tuple[tuple[int, ...], int]], batch_size: int, wanted: list[int]
) -> None:
    made = recipe(kinds, batch_size=batch_size, seed=3)
    last = max(wanted) // made.batches_per_epoch
    straight = [batch for n in range(last + 1) for batch in recipe(kinds, batch_size=batch_size, seed=3).epoch(n)]
    assert [made.batch(k) for k in wanted] == [straight[k] for k in wanted]


def test_epochs_and_seeds_differ_and_repeat() -> None:
    kinds = [(SQUARE, 1)] * 20
    first = recipe(kinds, batch_size=4, seed=1)
    assert first.epoch(0) == recipe(kinds, batch_size=4, seed=1).epoch(0)
    assert first.epoch(0) != first.epoch(1)
    assert first.epoch(0) != recipe(kinds, batch_size=4, seed=2).epoch(0)


def test_the_order_of_a_seed_never_changes() -> None:
    """A finished run's fingerprint stands for this order; other numbers would need a new fingerprint."""
    made = recipe([(SQUARE, 1)] * 3 + [(TALL, 2)] * 2, batch_size=2, seed=7)
    assert indices(made.epoch(0)) == ((2, 1), (3, 4), (0,), (4, 3))


def test_repeats_fill_a_batch_with_different_images_first() -> None:
    made = recipe([(SQUARE, 10)] * 4, batch_size=4, seed=5)
    assert all(sorted(batch) == [0, 1, 2, 3] for batch in indices(made.epoch(0)))


def test_shuffle_mixes_buckets_over_the_epoch() -> None:
    made = recipe([(SQUARE, 1)] * 10 + [(TALL, 1)] * 10, batch_size=1, seed=0)
    kinds = [batch[0] < 10 for batch in indices(made.epoch(0))]
    assert kinds != sorted(kinds)
    assert kinds != sorted(kinds, reverse=True)


def test_ordered_keeps_the_folders_order() -> None:
    made = recipe([(SQUARE, 1), (TALL, 2), (SQUARE, 2), (TALL, 1)], batch_size=2, strategy="ordered", seed=9)
    assert indices(made.epoch(0)) == ((0, 2), (2,), (1, 3), (1,))
    assert made.epoch(5) == made.epoch(0)


def test_a_batch_larger_than_the_data_is_explained() -> None:
    """a25"""
    made = recipe([(SQUARE, 1)] * 3, batch_size=4)
    assert [len(batch) for batch in made.epoch(0)] == [3]
    assert "batch_size 4, but bucket 512x512 holds only 3 images: its batches hold 3" in made.report()


def test_five_shapes_give_five_batches() -> None:
    """a26"""
    made = recipe([((4, 8 * i, 64), 1) for i in range(1, 6)], batch_size=3)
    assert sorted(indices(made.epoch(0))) == [(0,), (1,), (2,), (3,), (4,)]
    assert made.report().count("its batches hold 1") == 5


def test_the_number_of_batches_is_stated() -> None:
    """a27: 18 images of 7 shapes in batches of 18 are 7 batches, not 1."""
    made = recipe([((4, 8 * (1 + i % 7), 64), 1) for i in range(18)], batch_size=18)
    assert made.batches_per_epoch == 7
    assert "7 batches an epoch" in made.report()


def test_full_buckets_need_no_explanation() -> None:
    text = recipe([(SQUARE, 4)], batch_size=4).report()
    assert "but bucket" not in text
    assert "512x512: 1 image, 4 draws, 1 batch of 4" in text


def test_the_fingerprint_covers_the_settings() -> None:
    plain = recipe([(SQUARE, 1)] * 2)
    prints = {plain.fingerprint}
    prints |= {
        recipe([(SQUARE, 1)] * 2, **o).fingerprint for o in ({"seed": 1}, {"batch_size": 2}, {"strategy": "ordered"})
    }
    prints.add(recipe([(SQUARE, 1)] * 3).fingerprint)
    assert len(prints) == 5
    assert recipe([(SQUARE, 1)] * 2).fingerprint == plain.fingerprint


def test_an_empty_cache_is_refused() -> None:
    with pytest.raises(DatasetError):
        recipe([])
