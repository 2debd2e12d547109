"""Local attention in the host's networks: what is limited, its gradients, and whole runs with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
import test_more_archs as archs
import test_simulate
import tiny
import torch
from torch import Tensor

from lowvram_lora.config import AttentionLimit
from lowvram_lora.events import Finished, Noted, Stepped
from lowvram_lora.memory.setting import Setting
from lowvram_lora.training.estimate import META
from lowvram_lora.training.run import run

FAMILIES = ("sd15", "sd3", "flux", "qwen")
NUM_TEXT = 7
# Neither divides the pictures of all families' levels.
LIMIT = AttentionLimit(tokens=15, window=3)
COVERING = AttentionLimit(tokens=1, window=8)

Call = tuple[int, int]


def loss_with(limit: AttentionLimit, calls: list[Call]) -> Callable[[Any, Any, str], Tensor]:
    """Return a loss like that of ``archs``, of a network whose attention is limited.

    Args:
        calls: gets queries and keys of each call that torch's attention is asked for in the end.
    """

    def loss(pack: Any, network: Any, family: str) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        x = archs.drawn(generator, 2, *tiny.LATENTS[family])
        t = torch.tensor([3.0, 700.0] if family == "sd15" else [0.3, 0.9], dtype=archs.DTYPE)
        attention = pack.nodes._attention

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
            calls.append((q.shape[2], k.shape[2]))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)

        override = attention.in_hosts_shape(attention.adapted(attend, attention.attended(network, x, NUM_TEXT), limit))
        options = {"optimized_attention_override": override}
        out: Tensor = network(x, t, **archs.conditioning(family, generator), transformer_options=options)
        return out.square().mean()

    return loss


@pytest.mark.parametrize("way", ["recompute", "frozen layers alone"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_plain_autograd_with_the_same_attention(
    pack: Any, family: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = archs.plain(pack, family, "all linear")
    monkeypatch.setattr(archs, "loss", loss_with(LIMIT, []))
    expected = archs.plain.__wrapped__(pack, family, "all linear")
    found = archs.ours(pack, family, "all linear", pack.nodes._models.HostWeights(), archs.WAYS[way])
    archs.compare(found[:2], expected)
    assert expected[0] != pytest.approx(full[0], rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_that_covers_the_picture_gives_the_gradients_of_full_attention(
    pack: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = archs.plain(pack, family, "all linear")
    monkeypatch.setattr(archs, "loss", loss_with(COVERING, []))
    # Its windows are not taken for what they are: the way through them is gone.
    monkeypatch.setattr(pack.nodes._attention.Sequence, "windows", always_windows(pack))
    found = archs.ours(pack, family, "all linear", pack.nodes._models.HostWeights(), archs.WAYS["recompute"])
    archs.compare(found[:2], full)


def always_windows(pack: Any) -> Callable[..., Any]:
    """Return a ``Sequence.windows`` that cuts even where one window is all."""
    attention = pack.nodes._attention

    def windows(self: Any, num_tokens: int, limit: Any) -> Any:
        grid = attention.find_grid(num_tokens, self.sides, self.num_text, self.text_first)
        return None if grid is None else attention.Windows(grid, limit.window)

    return windows


# Queries and keys, of the two samples' windows together: of the picture, of text; keys are text, summaries, a window.
SEEN: dict[str, set[Call]] = {
    # 8 x 8 in 9 windows and 4 x 4 in 4; captions from outside, all of them.
    "sd15": {(9, 9 + 9), (4, 4 + 4), (64, NUM_TEXT), (16, NUM_TEXT)},
    # The joint blocks, and one that attends to the picture alone as well.
    "sd3": {(4, NUM_TEXT + 4 + 4), (NUM_TEXT, NUM_TEXT + 16), (4, 4 + 4)},
    "flux": {(4, NUM_TEXT + 4 + 4), (NUM_TEXT, NUM_TEXT + 16)},
    "qwen": {(4, NUM_TEXT + 4 + 4), (NUM_TEXT, NUM_TEXT + 16)},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_text_sees_everything_and_everything_sees_text(pack: Any, family: str) -> None:
    calls: list[Call] = []
    network = tiny.FAMILIES[family](inference=False).model.diffusion_model.double()
    with torch.no_grad():
        loss_with(LIMIT, calls)(pack, network, family)
    assert set(calls) == SEEN[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_of_no_more_tokens_than_allowed_is_seen_whole(pack: Any, family: str) -> None:
    calls: list[Call] = []
    network = tiny.FAMILIES[family](inference=False).model.diffusion_model.double()
    with torch.no_grad():
        loss_with(AttentionLimit(tokens=64, window=1), calls)(pack, network, family)
    assert not any(call in calls for call in SEEN[family] if call[0] in (4, 9))


def events(pack: Any, folder: Path, family: str, **changes: Any) -> list[Any]:
    denoiser = pack.nodes._models.HostDenoiser(tiny.FAMILIES[family]())
    return list(run(jobs.family_job(folder, denoiser, family, **changes)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_with_it_trains_and_says_by_how_much_it_changes_the_network(
    pack: Any, family: str, tmp_path: Path
) -> None:
    full = events(pack, tmp_path / "full", family)
    local = events(pack, tmp_path / "local", family, local_attention_tokens=15, local_attention_window=2)
    assert not any(isinstance(event, Noted) for event in full)
    (note,) = [event.text for event in local if isinstance(event, Noted)]
    assert "full attention" in note and "differs by" in note and "0.00%" not in note
    kinds = [type(event) for event in local]
    assert kinds.index(Noted) < kinds.index(Stepped)
    assert jobs.losses(local) != jobs.losses(full)
    lora = local[-1].record.lora
    assert isinstance(local[-1], Finished) and all(tensor.isfinite().all() for tensor in lora.values())


def test_a_run_in_which_nothing_is_limited_says_so_and_is_the_same_run(pack: Any, tmp_path: Path) -> None:
    full = events(pack, tmp_path / "full", "sd3")
    local = events(pack, tmp_path / "local", "sd3", local_attention_tokens=16)
    (note,) = [event.text for event in local if isinstance(event, Noted)]
    assert "changes nothing" in note
    assert jobs.losses(local) == jobs.losses(full)


def test_where_full_attention_does_not_fit_the_run_goes_on(
    pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    denoiser_class = pack.nodes._models.HostDenoiser
    predict = denoiser_class.predict_x0

    def limited_alone(self: Any, *args: Any) -> Any:
        if len(args) == 3:
            raise torch.OutOfMemoryError("no room for all tokens against all tokens")
        return predict(self, *args)

    monkeypatch.setattr(denoiser_class, "predict_x0", limited_alone)
    local = events(pack, tmp_path, "sd15", local_attention_tokens=15, local_attention_window=2)
    (note,) = [event.text for event in local if isinstance(event, Noted)]
    assert "could not be measured" in note and "no room" in note
    assert len(jobs.losses(local)) == 3


@pytest.mark.parametrize("family", ["sd15", "sd3", "flux"])
def test_its_bytes_without_data_are_those_with_data(
    pack: Any, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_simulate.same_way_on_the_cpu.__wrapped__(monkeypatch)
    simulators = [
        replace(one, config=replace(one.config, local_attention_tokens=15, local_attention_window=3))
        for one in (test_simulate.simulator(pack, tmp_path, family, device) for device in (META, torch.device("cpu")))
    ]
    setting = test_simulate.with_ring(simulators[0], Setting())
    found, expected = (one.step(setting) for one in simulators)
    assert test_simulate.counted(found) == test_simulate.counted(expected)
