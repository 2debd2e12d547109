import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from lowvram_lora.config import DataConfig
from lowvram_lora.data.cache import BuildReport, CacheIndex, CachePlan, build, generation, invalidate, num_steps
from lowvram_lora.data.draw import EMPTY_CAPTION, Draw
from lowvram_lora.data.encodings import unpack
from lowvram_lora.data.pixels import to_pixels
from lowvram_lora.data.scan import Dataset, scan
from lowvram_lora.data.store import path_of
from lowvram_lora.data.tiers import TieredCache
from lowvram_lora.errors import CacheMissError, DatasetError, PathError, UnsupportedModelError
from lowvram_lora.fakes import FakeCodec, FakeTextEncoder
from lowvram_lora.ports import EncodedPictures, Encoding

CAPTIONS = {"a.png": "a cat", "b.png": "一只黑猫", "c.png": ""}
LATENT_BYTES = 4 * 8 * 8 * 4


@dataclass
class Spy:
    """Passes on to the fakes and keeps the order of what was asked."""

    fingerprint: str = "spy"
    batch_limit: int = 1
    asked: list[str] = field(default_factory=list)

    def encode(self, value: Tensor | str) -> EncodedPictures | Encoding:
        if isinstance(value, str):
            self.asked.append(f"text {value}")
            return FakeTextEncoder().encode(value)
        assert len(value) <= self.batch_limit
        self.asked.append(f"pixels {tuple(value.shape)}")
        return FakeCodec().encode(value)

    def encode_precisely(self, pixels_BHWC: Tensor) -> EncodedPictures | None:
        return None


def make_images(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, caption) in enumerate(CAPTIONS.items()):
        Image.new("RGB", (64, 64), (40 * number, 100, 200)).save(folder / name)
        (folder / name).with_suffix(".txt").write_text(caption, encoding="utf-8")


def scanned(root: Path, **options: object) -> Dataset:
    return scan(DataConfig(folder="set", resolution=64, **options), [root])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    make_images(tmp_path / "set")
    return tmp_path


def built(
    base: Path, ram_cache_bytes: int = 0, spy: Spy | None = None, plan: CachePlan | None = None, **options: object
) -> tuple[CacheIndex, BuildReport]:
    spy = spy or Spy()
    plan = plan or CachePlan(ram_cache_bytes=ram_cache_bytes)
    return build(scanned(base, **options), spy, spy, base / "cache", lambda *_: None, plan)


def counts(report: BuildReport) -> tuple[int, int, int, int]:
    return report.texts_built, report.texts_read, report.latents_built, report.latents_read


def test_what_was_encoded_comes_back(base: Path) -> None:
    index, _ = built(base)
    cache = TieredCache(index)
    for number, sample in enumerate(scanned(base).samples):
        entry, draw = index.entries[number], Draw(number)
        assert entry.name == sample.name
        data = sample.image.read_bytes()
        expected = FakeCodec().encode(to_pixels(data, sample.image, sample.bucket_px, "#ffffff")[None]).latents[0]
        assert torch.equal(cache.latents(draw), expected)
        assert entry.latent_shape == tuple(expected.shape) == (4, 8, 8)
        tokens, extra = unpack(cache.conditioning(draw))[0]
        wanted_tokens, wanted_extra = unpack(FakeTextEncoder().encode(sample.caption))[0]
        assert torch.equal(tokens, wanted_tokens)
        assert torch.equal(extra["pooled_output"], wanted_extra["pooled_output"])


def test_a_second_build_only_reads(base: Path) -> None:
    first, report = built(base)
    assert counts(report) == (3, 0, 3, 0)  # the blank caption is the empty one
    spy = Spy()
    second, report = built(base, spy=spy)
    assert counts(report) == (0, 3, 0, 3)
    assert spy.asked == []
    assert second == first


def test_one_model_works_at_a_time_and_every_step_is_told(base: Path) -> None:
    spy, told = Spy(), []
    dataset = scanned(base)
    build(dataset, spy, spy, base / "cache", lambda done, total, text: told.append((done, total, bool(text))))
    kinds = [asked.split()[0] for asked in spy.asked]
    assert kinds == ["text"] * 3 + ["pixels"] * 3
    assert told == [(step, num_steps(dataset, CachePlan()), True) for step in range(1, 8)]


def test_a_changed_pixel_rebuilds_exactly_one_entry(base: Path) -> None:
    """a17"""
    before, _ = built(base)
    with Image.open(base / "set" / "b.png") as image:
        image.load()
    image.putpixel((5, 5), (255, 255, 255))
    image.save(base / "set" / "b.png")
    after, report = built(base)
    assert counts(report) == (0, 3, 1, 2)
    changed = [a.latents_key != b.latents_key for a, b in zip(before.entries, after.entries, strict=True)]
    assert changed == [False, True, False]
    assert after.fingerprint != before.fingerprint


def test_an_edited_caption_rebuilds_exactly_one_text(base: Path) -> None:
    built(base)
    (base / "set" / "a.txt").write_text("two cats", encoding="utf-8")
    _, report = built(base)
    assert counts(report) == (1, 2, 0, 3)


def test_names_with_dots_have_two_entries(base: Path) -> None:
    """a15"""
    Image.new("RGB", (64, 64), (255, 0, 0)).save(base / "set" / "aaa.bbb.png")
    Image.new("RGB", (64, 64), (0, 0, 255)).save(base / "set" / "aaa.ccc.png")
    index, _ = built(base)
    cache = TieredCache(index)
    by_name = {entry.name: cache.latents(Draw(number)) for number, entry in enumerate(index.entries)}
    assert by_name["aaa.bbb.png"][0, 0, 0] == 1.0
    assert by_name["aaa.ccc.png"][0, 0, 0] == -1.0


@pytest.mark.parametrize(
    ("options", "spy", "expected"),
    [
        ({"background": "#000000"}, Spy(), (0, 3)),
        ({"bucket_step": 8}, Spy(), (0, 0)),
        ({}, Spy("other weights"), (3, 3)),
    ],
)
def test_the_address_covers_what_the_encoding_depends_on(
    base: Path, options: dict[str, object], spy: Spy, expected: tuple[int, int]
) -> None:
    built(base)
    _, report = built(base, spy=spy, **options)
    assert (report.texts_built, report.latents_built) == expected


def test_another_bucket_is_another_entry(base: Path) -> None:
    first, _ = built(base)
    dataset = scan(DataConfig(folder="set", resolution=128), [base])
    second, _ = build(dataset, Spy(), Spy(), base / "cache", lambda *_: None)
    assert second.entries[0].latent_shape == (4, 16, 16)
    assert second.entries[0].latents_key != first.entries[0].latents_key


@pytest.mark.parametrize("damage", [b"", b"rubbish", None])
def test_a_damaged_file_is_rebuilt(base: Path, damage: bytes | None) -> None:
    index, _ = built(base)
    for kind, key in (("latents", index.entries[0].latents_key), ("text", index.entries[0].text_key)):
        path = path_of(index.root, kind, key)
        path.write_bytes(path.read_bytes()[:-7] if damage is None else damage)
    again, report = built(base)
    assert counts(report) == (1, 2, 1, 2)
    assert TieredCache(again).latents(Draw(0)).shape == (4, 8, 8)


def test_the_empty_caption_is_encoded_too(base: Path) -> None:
    """b03"""
    (base / "set" / "c.txt").write_text("a dog", encoding="utf-8")
    index, report = built(base)
    assert report.texts_built == 4
    assert index.empty_text_key not in {entry.text_key for entry in index.entries}
    tokens = unpack(TieredCache(index).conditioning(Draw(0, caption=EMPTY_CAPTION)))[0][0]
    assert torch.equal(tokens, unpack(FakeTextEncoder().encode(""))[0][0])


def test_stopping_keeps_what_is_done_and_leaves_no_part_files(base: Path) -> None:
    def stop(done: int, _total: int, _text: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(scanned(base), Spy(), Spy(), base / "cache", stop)
    assert not list((base / "cache").rglob("*.tmp"))
    assert counts(built(base)[1]) == (0, 3, 2, 1)


def test_ram_is_capped_in_counted_bytes(base: Path) -> None:
    index, _ = built(base, ram_cache_bytes=2 * LATENT_BYTES)
    cache = TieredCache(index)
    for number in (0, 1, 0, 2, 0, 1, 2, 2, 2):
        cache.latents(Draw(number))
        assert cache.counters.ram_bytes <= 2 * LATENT_BYTES
    counters = cache.counters
    assert counters.hits + counters.misses == 9
    assert counters.hits >= 3
    assert counters.ram_bytes == 2 * LATENT_BYTES
    assert (counters.disk_reads, counters.disk_bytes) == (counters.misses, counters.misses * LATENT_BYTES)


def test_without_ram_every_read_goes_to_disk(base: Path) -> None:
    index, _ = built(base)
    cache = TieredCache(index)
    for _ in range(3):
        cache.latents(Draw(0))
        cache.conditioning(Draw(0))
    assert (cache.counters.hits, cache.counters.misses, cache.counters.ram_bytes) == (0, 6, 0)


def test_ram_and_disk_give_the_same(base: Path) -> None:
    index, _ = built(base, ram_cache_bytes=1 << 20)
    cache = TieredCache(index)
    first = cache.latents(Draw(1))
    again = cache.latents(Draw(1))
    assert cache.counters.hits == 1
    assert torch.equal(first, again)
    assert torch.equal(first, TieredCache(replace(index, ram_cache_bytes=0)).latents(Draw(1)))


@pytest.mark.parametrize("damage", [None, b"rubbish"])
@pytest.mark.parametrize("kind", ["latents", "text"])
def test_a_lost_file_is_named_and_the_next_build_heals(base: Path, kind: str, damage: bytes | None) -> None:
    index, _ = built(base)
    entry = index.entries[0]
    path = path_of(index.root, kind, entry.latents_key if kind == "latents" else entry.text_key)
    latents, before = TieredCache(index).latents(Draw(0)), generation(index.root)
    path.unlink() if damage is None else path.write_bytes(damage)
    cache = TieredCache(index)
    with pytest.raises(CacheMissError) as caught:
        cache.latents(Draw(0)) if kind == "latents" else cache.conditioning(Draw(0))
    assert caught.value.name == entry.name
    assert generation(index.root) != before
    healed, report = built(base)
    assert report.texts_built + report.latents_built == 1
    assert torch.equal(TieredCache(healed).latents(Draw(0)), latents)
    assert TieredCache(healed).conditioning(Draw(0)).tensors.keys() == {"t0", "t1"}


def test_generation_changes_only_when_the_cache_was_lost(base: Path) -> None:
    root = base / "new folder" / "cache"
    first = generation(root)
    assert len(first) == 32
    assert generation(root) == first
    build(scanned(base), Spy(), Spy(), root, lambda *_: None)
    assert generation(root) == first
    assert invalidate(root) == generation(root) != first
    second = generation(root)
    shutil.rmtree(root)
    assert generation(root) not in (first, second)


def test_latents_that_are_not_numbers_are_refused_by_name(base: Path) -> None:
    class Broken(FakeCodec):
        def encode(self, pixels_BHWC: Tensor) -> EncodedPictures:
            return EncodedPictures(super().encode(pixels_BHWC).latents * float("nan"))

    with pytest.raises(UnsupportedModelError, match=r"a\.png"):
        build(scanned(base), Broken(), Spy(), base / "cache", lambda *_: None)
    assert not list((base / "cache" / "latents").rglob("*.safetensors"))


def test_a_picture_changed_since_the_scan_never_enters_the_cache(base: Path) -> None:
    dataset = scanned(base)
    Image.new("RGB", (64, 64), (1, 1, 1)).save(base / "set" / "a.png")
    with pytest.raises(DatasetError, match=r"a\.png"):
        build(dataset, Spy(), Spy(), base / "cache", lambda *_: None)
    (base / "set" / "a.png").unlink()
    with pytest.raises(PathError, match=r"a\.png"):
        build(dataset, Spy(), Spy(), base / "cache", lambda *_: None)


def test_works_inside_the_hosts_inference_mode(base: Path) -> None:
    with torch.inference_mode():
        index, _ = built(base)
    latents = TieredCache(index).latents(Draw(0))
    assert not latents.is_inference()


def test_fingerprint_ignores_names_and_place(base: Path, tmp_path: Path) -> None:
    index, _ = built(base)
    renamed = tuple(replace(entry, name="other", complexity_score=0.5) for entry in index.entries)
    assert replace(index, root=tmp_path, entries=renamed, ram_cache_bytes=5).fingerprint == index.fingerprint
    assert replace(index, entries=index.entries[::-1]).fingerprint != index.fingerprint
    more = (replace(index.entries[0], repeats=2), *index.entries[1:])
    assert replace(index, entries=more).fingerprint != index.fingerprint


def test_the_report_says_what_was_done(base: Path) -> None:
    text = str(built(base, ram_cache_bytes=1 << 20)[1])
    assert "Latents: 3 encoded, 0 already on disk" in text
    assert "Captions: 3 encoded, 0 already on disk" in text
    assert "1.00 MiB in RAM" in text
