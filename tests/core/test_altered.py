"""Settings that change what the network computes: what a run is known by, and what is said about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowvram_lora import fakes
from lowvram_lora.config import AttentionLimit, SamplerConfig, TrainConfig
from lowvram_lora.data import store
from lowvram_lora.data.batches import BatchRecipe
from lowvram_lora.data.cache import LATENTS, STRUCTURE, CacheEntry, CacheIndex
from lowvram_lora.data.tiers import TieredCache
from lowvram_lora.errors import ConfigError
from lowvram_lora.training.altered import altered, differences, relative_difference
from lowvram_lora.training.step import Batches

LIMIT = AttentionLimit(tokens=4096, window=32)


class Scaled(fakes.FakeDenoiser):
    """Gives estimates a fifth larger where attention is limited, and a tenth larger where padding is cut."""

    def condition(self, encodings: Any, noise: Tensor, cuts_padding: bool = False) -> Any:
        return [
            (rows, {**given, "factor": 1.1 if cuts_padding else 1.0})
            for rows, given in super().condition(encodings, noise)
        ]

    def predict_x0(self, noised: Tensor, sigma_B: Tensor, conditioning: Any, limit: Any = None) -> Tensor:
        given = dict(conditioning)
        factor = given.pop("factor") * (1.2 if limit else 1.0)
        return super().predict_x0(noised, sigma_B, given) * factor


@pytest.fixture
def samples(tmp_path: Path) -> Batches:
    encoding = fakes.FakeTextEncoder().encode("一只猫")
    generator = torch.Generator().manual_seed(0)
    entries = []
    for number in range(3):
        store.write(
            store.path_of(tmp_path, "latents", f"a{number}"), {LATENTS: torch.randn(4, 8, 8, generator=generator)}, {}
        )
        entries.append(CacheEntry.single(f"猫 {number}", f"a{number}", "bb", (4, 8, 8), 1))
    store.write(store.path_of(tmp_path, "text", "bb"), encoding.tensors, {STRUCTURE: encoding.structure})
    index = CacheIndex(tmp_path, tuple(entries), 1 << 20, "bb")
    return Batches(recipe=BatchRecipe(index, SamplerConfig(batch_size=3)), cache=TieredCache(index), seed=1)


def test_what_is_off_leaves_a_run_what_it_was() -> None:
    plain = TrainConfig().determining()
    assert not {"local_attention_tokens", "local_attention_window", "dynamic_text"} & plain.keys()
    assert TrainConfig(local_attention_window=8).determining() == plain


@pytest.mark.parametrize(
    "change",
    [{"local_attention_tokens": 1}, {"local_attention_tokens": 1, "local_attention_window": 8}, {"dynamic_text": True}],
)
def test_what_is_on_makes_another_run(change: dict[str, Any]) -> None:
    assert TrainConfig(**change).determining() == {**TrainConfig().determining(), **_asked(change)}


def _asked(change: dict[str, Any]) -> dict[str, Any]:
    return {"local_attention_window": 32, **change} if "local_attention_tokens" in change else change


@pytest.mark.parametrize("change", [{"local_attention_tokens": -1}, {"local_attention_window": 0}])
def test_impossible_windows_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        TrainConfig(**change)


def test_nothing_changed_is_the_same_denoiser() -> None:
    denoiser = fakes.FakeDenoiser()
    assert altered(denoiser) is denoiser


def test_the_difference_is_relative_to_the_networks_own_estimate(samples: Batches) -> None:
    denoiser = Scaled()
    begun: list[int] = []
    found = relative_difference(denoiser, altered(denoiser, LIMIT), samples, lambda: begun.append(0))
    assert found == pytest.approx(0.2, rel=1e-5)
    # Two passes for each sample of the first batch.
    assert len(begun) == 6


def test_each_change_is_told_by_itself(samples: Batches) -> None:
    config = TrainConfig(local_attention_tokens=4096, dynamic_text=True)
    attention, text = differences(Scaled(), config, samples, lambda: None)
    assert "20.00%" in attention and "above 4096 tokens" in attention and "32 x 32" in attention
    assert "10.00%" in text and "dynamic_text" in text


def test_where_nothing_is_limited_that_is_what_is_told(samples: Batches) -> None:
    config = TrainConfig(local_attention_tokens=4096, dynamic_text=True)
    told = list(differences(fakes.FakeDenoiser(), config, samples, lambda: None))
    assert len(told) == 2 and all("changes nothing here" in text for text in told)


def test_with_all_off_nothing_is_told_and_nothing_is_run(samples: Batches) -> None:
    def begin() -> None:
        raise AssertionError

    assert list(differences(fakes.FakeDenoiser(), TrainConfig(), samples, begin)) == []
