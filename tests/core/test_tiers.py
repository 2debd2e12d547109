"""Reading a cache: precision, scales, variants, masks, reading ahead, and what is counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lowvram_lora.config import DataConfig, SamplerConfig
from lowvram_lora.data import precision
from lowvram_lora.data.augment import variants_of
from lowvram_lora.data.batches import BatchRecipe
from lowvram_lora.data.cache import BuildReport, CacheIndex, CachePlan, build, num_steps
from lowvram_lora.data.dataset import Dataset
from lowvram_lora.data.draw import Draw
from lowvram_lora.data.pixels import to_pixels
from lowvram_lora.data.scan import scan
from lowvram_lora.data.schedule import PrecisionSchedule
from lowvram_lora.data.store import path_of
from lowvram_lora.data.tiers import TieredCache, describe
from lowvram_lora.errors import CacheMissError
from lowvram_lora.fakes import FakeCodec, FakeTextEncoder
from lowvram_lora.ports import EncodedPictures
from lowvram_lora.training.step import Batches

NUM = 6


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    source = np.random.default_rng(3)
    for number in range(NUM):
        values = source.integers(0, 256, (128, 128, 3), dtype=np.uint8)
        Image.fromarray(values).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"caption {number}", encoding="utf-8")
    return tmp_path


def scanned(base: Path, **options: object) -> Dataset:
    return scan(DataConfig(**{"folder": "set", "resolution": 128, "bucket_step": 32, **options}), [base])


def built(base: Path, dataset: Dataset | None = None, **options: object) -> tuple[CacheIndex, BuildReport]:
    dataset = dataset or scanned(base)
    return build(dataset, FakeCodec(), FakeTextEncoder(), base / "cache", lambda *_: None, CachePlan(**options))


def encoded(dataset: Dataset, number: int, size_px: tuple[int, int], variant: int = 0) -> torch.Tensor:
    sample = dataset.samples[number]
    chosen = variants_of(sample.image_digest, dataset.config)[variant]
    pixels = to_pixels(sample.image.read_bytes(), sample.image, size_px, dataset.config.background, chosen)
    return FakeCodec().encode(pixels[None]).latents[0]


def test_every_scale_that_is_told_is_encoded_listed_and_read(base: Path) -> None:
    dataset = scanned(base)
    index, _ = built(base, dataset, scales=(1.0, 0.75, 0.5))
    assert index.scales == (1.0, 0.75, 0.5)
    cache = TieredCache(index)
    for scale, side in ((1.0, 128), (0.75, 96), (0.5, 64)):
        latents = cache.latents(Draw(2, scale=scale))
        assert latents.shape == index.entries[2].at(scale).latent_shape == (4, side // 8, side // 8)
        assert torch.equal(latents, encoded(dataset, 2, (side, side)))


def test_a_scale_that_was_not_encoded_is_not_listed_and_not_to_be_had(base: Path) -> None:
    index, _ = built(base)
    assert index.scales == (1.0,)
    with pytest.raises(KeyError):
        TieredCache(index).latents(Draw(0, scale=0.5))


def test_scales_stay_multiples_of_the_buckets_step_and_equal_sizes_are_one(base: Path) -> None:
    index, _ = built(base, scanned(base, bucket_step=64), scales=(1.0, 0.75, 0.5))
    assert [encoded.latent_shape for encoded in index.entries[0].scales] == [(4, 16, 16), (4, 8, 8)]


def test_more_scales_leave_what_is_encoded_as_it_is(base: Path) -> None:
    first, _ = built(base)
    second, report = built(base, scales=(1.0, 0.5))
    assert (report.latents_built, report.latents_read) == (NUM, NUM)
    assert second.entries[0].latents_key == first.entries[0].latents_key


def test_variants_are_pictures_of_their_own_at_every_scale(base: Path) -> None:
    dataset = scanned(base, image_variants=2, flip=True)
    index, _ = built(base, dataset, scales=(1.0, 0.5))
    assert {entry.num_images for entry in index.entries} == {2}
    cache = TieredCache(index)
    for variant in range(2):
        for scale, side in ((1.0, 128), (0.5, 64)):
            found = cache.latents(Draw(1, scale=scale, image=variant))
            assert torch.equal(found, encoded(dataset, 1, (side, side), variant))
    assert not torch.equal(cache.latents(Draw(1)), cache.latents(Draw(1, image=1)))


def test_every_caption_variant_is_encoded_and_read(base: Path) -> None:
    (base / "set" / "0.txt").write_text("red, green, blue, black, white", encoding="utf-8")
    dataset = scanned(base, caption_variants=3, shuffle_tags=True)
    index, _ = built(base, dataset)
    captions = dataset.samples[0].captions
    assert len(captions) == len(index.entries[0].text_keys) == 3
    for number, caption in enumerate(captions):
        tensors = TieredCache(index).conditioning(Draw(0, caption=number)).tensors
        assert torch.equal(tensors["t0"], FakeTextEncoder().encode(caption).tensors["t0"])


def test_masks_come_at_the_latents_size_at_every_scale(base: Path) -> None:
    (base / "set" / "masks").mkdir()
    mask = Image.new("L", (128, 128), 0)
    mask.paste(255, (0, 0, 64, 128))
    mask.save(base / "set" / "masks" / "0.png")
    dataset = scanned(base, masks="folder", image_variants=2, flip=True)
    index, report = built(base, dataset, scales=(1.0, 0.5))
    cache = TieredCache(index)
    assert cache.mask(Draw(1)) is None
    for scale, side in ((1.0, 16), (0.5, 8)):
        left = cache.mask(Draw(0, scale=scale))
        assert left is not None and left.shape == (1, side, side)
        assert left[:, :, : side // 2 - 1].min() > 0.99 and left[:, :, side // 2 + 1 :].max() < 0.01
        right = cache.mask(Draw(0, scale=scale, image=1))
        assert right is not None and torch.allclose(right.flip(-1), left, atol=1e-3)
    assert report.latents_built == NUM * 4
    assert built(base, dataset, scales=(1.0, 0.5))[0] == index


def test_every_step_is_told_with_scales_variants_and_masks(base: Path) -> None:
    (base / "set" / "masks").mkdir()
    Image.new("L", (128, 128), 200).save(base / "set" / "masks" / "3.png")
    dataset = scanned(base, masks="folder", image_variants=2, flip=True, validation_share=0.2)
    plan, told = CachePlan(scales=(1.0, 0.5)), []
    for _ in range(2):
        told.clear()
        build(
            dataset,
            FakeCodec(),
            FakeTextEncoder(),
            base / "cache",
            lambda done, total, _: told.append((done, total)),
            plan,
        )
        total = num_steps(dataset, plan)
        assert told == [(step, total) for step in range(1, total + 1)]


def test_samples_that_are_held_out_are_encoded_and_never_drawn(base: Path) -> None:
    dataset = scanned(base, validation_share=0.34, image_variants=2, flip=True)
    index, _ = built(base, dataset, scales=(1.0, 0.5))
    held = [sample.name for sample in dataset.samples if sample.is_validation]
    assert held and [entry.name for entry in index.held_out] == held
    assert not {entry.name for entry in index.entries} & set(held)
    assert all(entry.is_single for entry in index.held_out)
    number = next(i for i, sample in enumerate(dataset.samples) if sample.is_validation)
    assert torch.equal(TieredCache(index.validation).latents(Draw(0)), encoded(dataset, number, (128, 128)))
    assert replace(index, held_out=()).fingerprint == index.fingerprint


@pytest.mark.parametrize(("compression", "share"), [("moderate", 0.52), ("high", 0.27)])
def test_compression_keeps_fewer_bytes_and_gives_what_its_encoding_gives(
    base: Path, compression: str, share: float
) -> None:
    name = precision.on_disk(compression)
    dataset = scanned(base)
    index, report = built(base, dataset, encoding=name, ram_cache_bytes=1 << 20)
    cache = TieredCache(index)
    for number in range(NUM):
        expected = precision.decode(*precision.encode(encoded(dataset, number, (128, 128)), name))
        assert torch.equal(cache.latents(Draw(number)), expected)
        assert torch.equal(cache.latents(Draw(number)), expected)
    full = NUM * 4 * 16 * 16 * 4
    assert cache.counters.ram_bytes <= share * full
    assert name in str(report)


def test_another_compression_reads_what_is_there_in_full_and_encodes_nothing(base: Path) -> None:
    built(base)
    index, report = built(base, encoding="half")
    assert report.latents_built == 0
    dataset = scanned(base)
    expected = precision.decode(*precision.encode(encoded(dataset, 0, (128, 128)), "half"))
    assert torch.equal(TieredCache(index).latents(Draw(0)), expected)


def test_a_draws_precision_is_what_its_latents_pass_through(base: Path) -> None:
    dataset = scanned(base)
    index, _ = built(base, dataset, ram_cache_bytes=1 << 20)
    cache = TieredCache(index)
    plain = encoded(dataset, 0, (128, 128))
    for _ in range(2):
        for name in ("half", "full", "int8", "bands"):
            expected = precision.decode(*precision.encode(plain, name))
            assert torch.equal(cache.latents(Draw(0, precision=name)), expected)
    assert cache.counters.hits == 4


def test_dynamic_precision_follows_the_run(base: Path) -> None:
    index, _ = built(base, schedule=PrecisionSchedule())
    scores = (0.1, 0.25, 0.5, 0.9, None, 0.25)
    entries = tuple(replace(e, complexity_score=s) for e, s in zip(index.entries, scores, strict=True))
    index = replace(index, entries=entries)
    recipe = BatchRecipe(index, SamplerConfig(batch_size=NUM, strategy="ordered"))
    samples = Batches(recipe=recipe, cache=TieredCache(index), seed=0, steps=10)

    def at(step: int) -> list[str]:
        return [draw.precision for draw in samples.window(step, 1)[0]]

    assert at(0) == at(1) == ["half", "half", "full", "full", "full", "half"]
    assert at(2) == at(7) == ["half", "bands", "bands", "full", "full", "bands"]
    assert at(8) == at(9) == ["full"] * NUM
    assert replace(index, schedule=None).fingerprint != index.fingerprint


@pytest.fixture
def ahead(base: Path) -> Iterator[Batches]:
    index, _ = built(base, predictive=True)
    recipe = BatchRecipe(index, SamplerConfig(batch_size=2, strategy="ordered"))
    samples = Batches(recipe=recipe, cache=TieredCache(index), seed=0, steps=3)
    yield samples
    samples.close()


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "read_ahead" in thread.name]


def take(samples: Batches, step: int) -> list[torch.Tensor]:
    return [samples.latents(draw) for batch in samples.window(step, 1) for draw in batch]


def test_the_next_batch_is_read_by_one_thread_that_ends_with_the_run(base: Path, ahead: Batches) -> None:
    dataset = scanned(base)
    take(ahead, 0)
    assert len(readers()) == 1
    cache = ahead.cache
    for file in list(cache._ahead.values()):
        file.result()
    # What the next step takes is in RAM: it is there without its file.
    for draw in ahead.recipe.batch(1):
        path_of(base / "cache", "latents", ahead.recipe.cache.latents_key(draw)).unlink()
    found = take(ahead, 1)
    assert all(torch.equal(one, encoded(dataset, 2 + i, (128, 128))) for i, one in enumerate(found))
    ahead.close()
    assert readers() == []


def test_what_goes_wrong_in_the_thread_shows_when_the_sample_is_asked_for(base: Path, ahead: Batches) -> None:
    path = path_of(base / "cache", "latents", ahead.recipe.cache.entries[3].latents_key)
    path.write_bytes(path.read_bytes()[:-5])
    take(ahead, 0)
    with pytest.raises(CacheMissError, match=r"3\.png"):
        take(ahead, 1)
    assert built(base)[1].latents_built == 1


def test_reading_ahead_changes_nothing_and_stops_at_the_last_step(base: Path, ahead: Batches) -> None:
    plain = replace(ahead, cache=TieredCache(replace(ahead.recipe.cache, predictive=False)))
    for step in range(3):
        for one, other in zip(take(ahead, step), take(plain, step), strict=True):
            assert torch.equal(one, other)
    assert ahead.cache.counters.disk_reads == plain.cache.counters.disk_reads == NUM
    assert {kind for kind, _ in ahead.cache._ahead} <= {"text"}


def test_a_step_that_is_repeated_is_read_again(ahead: Batches) -> None:
    first = take(ahead, 1)
    assert all(torch.equal(one, other) for one, other in zip(first, take(ahead, 1), strict=True))


def test_the_counters_tell_hits_misses_and_bytes_by_tier(base: Path) -> None:
    index, _ = built(base, ram_cache_bytes=1 << 20)
    recipe = BatchRecipe(index, SamplerConfig(batch_size=2))
    samples = Batches(recipe=recipe, cache=TieredCache(index), seed=0)
    for _ in range(2):
        take(samples, 0)
    samples.sent(300)
    counters = samples.cache.counters
    assert (counters.hits, counters.misses, counters.disk_reads, counters.evictions) == (2, 2, 2, 0)
    assert counters.disk_bytes == counters.ram_bytes == 2 * 4 * 16 * 16 * 4
    assert (counters.device_transfers, counters.device_bytes) == (1, 300)
    text = "\n".join(describe(counters, index.ram_cache_bytes))
    assert "2 of 4 reads from RAM (50%)" in text and "2 files" in text and "0 evictions" in text
    assert "to the device: 1 (300 B)" in text


def test_pictures_of_one_size_are_encoded_in_batches_and_give_the_same(base: Path) -> None:
    sizes: list[int] = []

    class Wide(FakeCodec):
        def encode(self, pixels_BHWC: torch.Tensor) -> EncodedPictures:
            sizes.append(len(pixels_BHWC))
            return super().encode(pixels_BHWC)

    dataset = scanned(base)
    codec = Wide(batch_limit=4)
    index, _ = build(dataset, codec, FakeTextEncoder(), base / "cache", lambda *_: None, CachePlan(scales=(1.0, 0.5)))
    assert sizes == [4, 2, 4, 2]
    cache = TieredCache(index)
    for number in range(NUM):
        assert torch.equal(cache.latents(Draw(number)), encoded(dataset, number, (128, 128)))


def test_a_retried_picture_is_named_and_the_others_are_not_encoded_again(base: Path) -> None:
    class Overflowing(FakeCodec):
        def encode(self, pixels_BHWC: torch.Tensor) -> EncodedPictures:
            latents = super().encode(pixels_BHWC).latents
            latents[1] = float("inf")
            return EncodedPictures(latents)

        def encode_precisely(self, pixels_BHWC: torch.Tensor) -> EncodedPictures | None:
            assert len(pixels_BHWC) == 1
            return FakeCodec().encode(pixels_BHWC)

    dataset = scanned(base)
    codec = Overflowing(batch_limit=NUM)
    index, report = build(dataset, codec, FakeTextEncoder(), base / "cache", lambda *_: None)
    assert report.incidents.retried == ["1.png"]
    assert torch.equal(TieredCache(index).latents(Draw(1)), encoded(dataset, 1, (128, 128)))
