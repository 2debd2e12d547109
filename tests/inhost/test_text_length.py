"""Captions of different lengths in one batch, padding left out, and what a longer caption costs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
import tiny
import torch
from torch import Tensor

from lowvram_lora.adapters.attach import build
from lowvram_lora.adapters.targets import select
from lowvram_lora.config import AttentionLimit, LoraConfig
from lowvram_lora.data import store
from lowvram_lora.data.cache import STRUCTURE
from lowvram_lora.data.encodings import pack as packed
from lowvram_lora.data.encodings import unpack
from lowvram_lora.events import Noted
from lowvram_lora.ports import Encoding
from lowvram_lora.training.attached import Engine, attached
from lowvram_lora.training.run import run
from tests.toyworld import studio

# Rows of the captions of a batch. In chunks of 7 these are 2, 3 and 1; their least common multiple is 42.
LENGTHS = {"sd15": (14, 21, 7), "sd3": (7, 12, 9), "flux": (7, 12, 9), "qwen": (7, 12, 9)}


def caption(rows: int, seed: int, **more: Any) -> Encoding:
    generator = torch.Generator().manual_seed(seed)
    context = torch.randn(1, rows, tiny.CONTEXT, generator=generator)
    return packed([[context, {"pooled_output": torch.randn(1, tiny.VECTOR, generator=generator), **more}]])


def batch(family: str) -> tuple[Tensor, Tensor, list[Encoding]]:
    """Return noised latents, noise levels and captions of three samples."""
    generator = torch.Generator().manual_seed(5)
    lengths = LENGTHS[family]
    x = torch.randn(len(lengths), *tiny.LATENTS[family], generator=generator)
    return x, torch.tensor([0.3, 0.6, 0.9]), [caption(rows, seed) for seed, rows in enumerate(lengths)]


def trained(denoiser: Any, groups: Iterator[tuple[list[int], Any]], x: Tensor, sigma: Tensor) -> list[Tensor]:
    """Return each sample's estimate, and the adapters' gradients of all."""
    layers = select(denoiser.network, "all linear")
    adapters = build(layers, LoraConfig(rank=4, alpha=7.0), seed=2, device=tiny.CPU)
    generator = torch.Generator().manual_seed(3)
    for layer in adapters.layers.values():
        up = layer.lora_B["default"].weight
        up.data = torch.randn(up.shape, generator=generator) * 0.1
    estimates: dict[int, Tensor] = {}
    with attached(denoiser, layers, adapters, torch.float32, Engine()) as engaged, torch.enable_grad():
        for rows, given in groups:
            engaged.begin()
            out = denoiser.predict_x0(x[rows], sigma[rows], given)
            out.square().sum().backward()
            estimates.update(zip(rows, out.detach(), strict=True))
    grads = [p.grad for p in adapters.parameters() if p.grad is not None]
    return [torch.stack([estimates[row] for row in sorted(estimates)]), *grads]


@pytest.mark.parametrize("family", LENGTHS)
def test_captions_of_different_lengths_go_through_together_and_give_what_each_gives_alone(
    pack: Any, family: str
) -> None:
    denoiser = pack.nodes._models.HostDenoiser(tiny.FAMILIES[family]())
    x, sigma, captions = batch(family)
    together = denoiser.condition(captions, x)
    assert [rows for rows, _ in together] == [[0, 1, 2]]
    assert together[0][1]["c_crossattn"].shape[1] == max(LENGTHS[family])
    alone = [([i], denoiser.condition(captions[i : i + 1], x[i : i + 1])[0][1]) for i in range(3)]
    found, expected = trained(denoiser, iter(together), x, sigma), trained(denoiser, iter(alone), x, sigma)
    assert len(found) == len(expected) > 10
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm()) <= 1e-4 * float(theirs.norm()) + 1e-7
    assert float((found[0][0] - found[0][1]).norm()) > 1e-3


def test_captions_that_divide_the_longest_need_no_mask(pack: Any) -> None:
    """The host repeats them, which changes nothing and leaves attention its fastest kernels."""
    denoiser = pack.nodes._models.HostDenoiser(tiny.sd15())
    x, _, _ = batch("sd15")
    ((rows, given),) = denoiser.condition([caption(7, 0), caption(14, 1), caption(14, 2)], x)
    assert rows == [0, 1, 2] and set(given) == {"c_crossattn"} and given["c_crossattn"].shape[1] == 14
    assert torch.equal(given["c_crossattn"][0, :7], given["c_crossattn"][0, 7:])


@pytest.mark.parametrize("rows, num_groups", [((14, 21), 2), ((7, 14), 1)])
def test_where_a_patch_may_change_captions_none_is_padded(pack: Any, rows: tuple[int, int], num_groups: int) -> None:
    model = tiny.sd15()
    model.set_model_attn2_patch(lambda q, k, v, extra: (q, k, v))
    denoiser = pack.nodes._models.HostDenoiser(model)
    x, _, _ = batch("sd15")
    assert len(denoiser.condition([caption(length, i) for i, length in enumerate(rows)], x[:2])) == num_groups


def test_captions_with_as_many_rows_as_a_level_of_the_picture_are_not_padded(pack: Any) -> None:
    """Attention to the caption could not be told from attention to the picture."""
    denoiser = pack.nodes._models.HostDenoiser(tiny.sd15())
    x, _, _ = batch("sd15")
    assert len(denoiser.condition([caption(10, 0), caption(16, 1)], x[:2])) == 2


@pytest.mark.parametrize("family", ["sd3", "flux", "qwen"])
def test_local_attention_hides_what_pads_captions_too(pack: Any, family: str) -> None:
    denoiser = pack.nodes._models.HostDenoiser(tiny.FAMILIES[family]())
    x, sigma, captions = batch(family)
    limit = AttentionLimit(tokens=1, window=3)
    with denoiser.training(torch.float32), torch.no_grad():
        ((_, given),) = denoiser.condition(captions, x)
        together = denoiser.predict_x0(x, sigma, given, limit)
        for i in range(3):
            ((_, given),) = denoiser.condition(captions[i : i + 1], x[i : i + 1])
            alone = denoiser.predict_x0(x[i : i + 1], sigma[i : i + 1], given, limit)
            torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-4, atol=1e-5)


# What the tokenizers of the host make of a caption of three words: rows and padding of the encoder that pads.
@pytest.mark.parametrize(
    "module, name, expected", [("flux", "FluxTokenizer", 256), ("sd3_clip", "SD3Tokenizer", 77), (None, None, None)]
)
def test_padding_is_what_the_hosts_tokenizer_put_there(
    pack: Any, module: str | None, name: str | None, expected: int | None
) -> None:
    import comfy.sd1_clip

    if module is None:
        tokenizer = comfy.sd1_clip.SD1Tokenizer()
    else:
        tokenizer = getattr(importlib.import_module(f"comfy.text_encoders.{module}"), str(name))()
    found = pack.nodes._text.padding_of(tokenizer, tokenizer.tokenize_with_weights("a red square"))
    if expected is None:
        assert found is None
        return
    own = tokenizer.t5xxl.tokenizer("a red square")["input_ids"]
    assert found == [expected, expected - len(own)]
    long = " ".join(["square"] * 300)
    assert pack.nodes._text.padding_of(tokenizer, tokenizer.tokenize_with_weights(long)) is None


def test_an_encoder_that_is_not_there_pads_nothing(pack: Any) -> None:
    """An SD3 with CLIP-L alone: the host tokenizes for T5 all the same."""
    clip = studio.open_studio().clip
    assert clip.tokenize("a red circle")["t5xxl"]
    [[rows, more]] = unpack(pack.nodes._encoders.HostClip(clip).encode("a red circle"))
    assert rows.shape[1] == 77
    assert pack.nodes._text.PADDING not in more


def padded(pack: Any, rows: int, length: int, padding: int) -> Encoding:
    return caption(rows, 0, **{pack.nodes._text.PADDING: [length, padding]})


@pytest.mark.parametrize(
    "rows, length, padding, expected",
    [
        (256, 256, 200, 64),
        (256, 256, 190, 128),
        (256, 256, 10, 256),
        # SD3: a chunk of CLIP's comes first, and is never cut.
        (154, 77, 70, 77 + 64),
        (154, 77, 3, 154),
    ],
)
def test_padding_the_network_sees_is_left_out_in_steps_and_only_when_asked(
    pack: Any, rows: int, length: int, padding: int, expected: int
) -> None:
    denoiser = pack.nodes._models.HostDenoiser(tiny.flux())
    x = torch.zeros(1, *tiny.LATENTS["flux"])
    encoding = padded(pack, rows, length, padding)
    for cuts, kept in ((False, rows), (True, expected)):
        ((_, given),) = denoiser.condition([encoding], x, cuts)
        assert given["c_crossattn"].shape[1] == kept
        assert torch.equal(given["c_crossattn"], encoding.tensors["t0"][:, :kept])


def test_a_run_with_dynamic_text_says_by_how_much_it_changes_the_network(pack: Any, tmp_path: Path) -> None:
    denoiser = pack.nodes._models.HostDenoiser(tiny.flux())
    told = {}
    for name, padding in (("padded", 200), ("unknown", 0)):
        job = jobs.family_job(tmp_path / name, denoiser, "flux", dynamic_text=True)
        encoding = padded(pack, 256, 256, padding) if padding else caption(256, 0)
        for entry in job.recipe.cache.entries:
            path = store.path_of(job.recipe.cache.root, "text", entry.text_key)
            store.write(path, encoding.tensors, {STRUCTURE: encoding.structure})
        (told[name],) = [event.text for event in run(job) if isinstance(event, Noted)]
    assert "dynamic_text is on" in told["padded"] and "differs by" in told["padded"]
    assert "changes nothing" in told["unknown"]


def ltxv() -> Any:
    """Return a ModelPatcher of an LTX-Video network of two blocks: of those that the host gives a mask to."""
    config = {
        "image_model": "ltxv",
        "in_channels": 128,
        "cross_attention_dim": 64,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "caption_channels": tiny.CONTEXT,
        "num_layers": 2,
        "vae_scale_factors": (8, 32, 32),
    }
    return tiny._model("LTXV", config, torch.float32, 0, True)


def test_padding_behind_a_mask_is_left_out_always_and_changes_nothing(
    pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    denoiser = pack.nodes._models.HostDenoiser(ltxv())
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 128, 1, 4, 4, generator=generator)
    mask = torch.zeros(1, 128, dtype=torch.long)
    mask[:, :40] = 1
    encoding = caption(128, 0, attention_mask=mask)
    sigma = torch.tensor([0.5])
    with denoiser.training(torch.float32), torch.no_grad():
        ((_, cut),) = denoiser.condition([encoding], x)
        found = denoiser.predict_x0(x, sigma, cut)
        monkeypatch.setattr(pack.nodes._models, "without_padding", lambda conditioning, *_: conditioning)
        ((_, whole),) = denoiser.condition([encoding], x)
        expected = denoiser.predict_x0(x, sigma, whole)
        whole["attention_mask"] = torch.ones_like(mask)
        unmasked = denoiser.predict_x0(x, sigma, whole)
    assert (cut["c_crossattn"].shape[1], whole["c_crossattn"].shape[1]) == (64, 128)
    assert cut["attention_mask"].shape[-1] == 64
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(unmasked, expected, rtol=1e-3, atol=1e-3)


def full_size_peaks(pack: Any, family: str, rows: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the device bytes of a step at full size and 512 pixels: with all blocks recomputed, and with none."""
    from tests.bench import _full_size

    core = importlib.import_module(f"{pack.__name__}.lowvram_lora")
    fakes = importlib.import_module(f"{core.__name__}.fakes")
    kind = _full_size.FAMILIES[family]
    monkeypatch.setitem(_full_size.FAMILIES, family, replace(kind, context=(rows, kind.context[1])))
    index = _full_size.cache(pack, family, 512, 1, folder)
    monkeypatch.setitem(_full_size.FAMILIES, family, kind)
    denoiser = pack.nodes._models.HostDenoiser(_full_size.model(family))
    estimate, blocks = core.training.estimate, core.memory.recompute.find_blocks(denoiser.network)
    simulator = estimate.Simulator(
        denoiser=denoiser,
        layers=core.adapters.targets.select(denoiser.network, "attention + feed-forward"),
        config=core.config.TrainConfig(),
        dtype=torch.bfloat16,
        samples=core.training.step.Batches(
            recipe=core.data.batches.BatchRecipe(index, core.config.SamplerConfig()),
            cache=core.data.tiers.TieredCache(index),
            seed=0,
        ),
        batch=(core.data.draw.Draw(0),),
        cancel=fakes.FakeCancel(),
    )
    setting = core.memory.setting.Setting(ring_bytes=estimate.smallest_ring(denoiser))
    first = simulator.step(setting)
    kept = simulator.step(replace(setting, kept=frozenset(blocks)), first.writes_in_place)
    return [first.counter.peak, kept.counter.peak]


@pytest.mark.parametrize("family, rows", [("sd15", 77), ("sd3", 154)])
def test_a_caption_of_twice_the_length_costs_little_device_memory(
    pack: Any, family: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, twice = (full_size_peaks(pack, family, rows * n, tmp_path / str(n), monkeypatch) for n in (1, 2))
    for short, long in zip(once, twice, strict=True):
        assert short < long <= 1.2 * short
