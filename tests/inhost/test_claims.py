"""The bench of the claims: the script it plays is diffusers' own, and what it says of ours holds on tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.bench import _full_size, _plain, _techniques, claims, sparse
from tests.bench._jobs import Case

# Diffusers' networks with few and narrow blocks; what goes in is as at full size.
SMALL = {
    "sdxl": {
        "block_out_channels": (64, 128, 128),
        "transformer_layers_per_block": (1, 1, 1),
        "attention_head_dim": (1, 2, 2),
    },
    "sd3": {"num_layers": 2, "num_attention_heads": 2, "caption_projection_dim": 128},
    "flux": {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2},
}
CASE = Case("sd3", 4, 8, 12, rank=4)


def small(family: str) -> _plain.Plain:
    plain = _plain.PLAIN[family]
    return replace(plain, config=plain.config | SMALL[family])


@pytest.fixture
def bench(pack: Any, monkeypatch: pytest.MonkeyPatch) -> claims.Bench:
    """The bench on a tiny SD3, the host's and diffusers'."""
    kind = _full_size.FAMILIES["sd3"]
    sizes = replace(kind, context=(CASE.text_rows, tiny.CONTEXT), vector=tiny.VECTOR)
    monkeypatch.setitem(_full_size.FAMILIES, "sd3", sizes)
    config = {"joint_attention_dim": tiny.CONTEXT, "pooled_projection_dim": tiny.VECTOR, "pos_embed_max_size": 8}
    plain = replace(small("sd3"), config=small("sd3").config | config | {"sample_size": 8}, inputs=inputs)
    return claims.Bench(pack, {"sd3": plain}, lambda _: tiny.sd3(torch.bfloat16))


def inputs(batch: int, side: int, rows: int) -> dict[str, Any]:
    given = _plain.PLAIN["sd3"].inputs(batch, side, rows)
    widths = {"encoder_hidden_states": tiny.CONTEXT, "pooled_projections": tiny.VECTOR}
    return given | {name: given[name][..., :width] for name, width in widths.items()}


def types_of(made: nn.Module) -> list[tuple[str, Any]]:
    """Return a list that fills with each module's name and the types of what it is given and gives."""
    seen: list[tuple[str, Any]] = []

    def note(name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        seen.append((name, kinds((args, kwargs, out))))

    for name, module in made.named_modules():
        module.register_forward_hook(partial(note, name), with_kwargs=True)
    return seen


def kinds(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, dict):
        return {key: kinds(item) for key, item in value.items()}
    return [kinds(item) for item in value] if isinstance(value, list | tuple) else None


def moved(value: Any, empty: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: moved(item, empty) for key, item in value.items()}
    return empty(value)


def on_card(tensor: Tensor) -> Tensor:
    """Return a tensor like this one on a card that is not there; only inside ``FakeTensorMode``."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")


def put_on_card(made: nn.Module) -> None:
    for module in made.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(on_card(parameter), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = on_card(buffer)


@pytest.fixture
def real_autocast() -> Iterator[None]:
    """What ``torch.autocast("cuda")`` switches on; that itself refuses where there is no card."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.usefixtures("real_autocast")
def test_the_played_autocast_gives_every_module_the_types_that_torchs_own_gives(family: str) -> None:
    given = small(family).inputs(2, 16, 12)
    played, real = (_plain.network(small(family), 4) for _ in range(2))
    ours, theirs = types_of(played), types_of(real)
    with torch.no_grad(), _plain.PlayedAutocast(lambda q, k, v: torch.empty_like(q)):
        played(**given, return_dict=False)
    with torch.no_grad(), FakeTensorMode():
        put_on_card(real)
        real(**moved(given, on_card), return_dict=False)
    assert len(ours) > 50
    assert ours == theirs


@pytest.mark.parametrize("family", SMALL)
def test_the_script_trains_the_network_that_the_host_has(family: str) -> None:
    made = _plain.network(_plain.PLAIN[family], 4)
    script = sum(parameter.numel() for parameter in made.parameters() if not parameter.requires_grad)
    host = sum(parameter.numel() for parameter in _full_size.model(family).model.diffusion_model.parameters())
    assert script == pytest.approx(host, rel=1e-3)


def test_checkpointing_takes_device_bytes_off_the_script_too(bench: claims.Bench) -> None:
    scripts = bench.scripts(CASE)
    assert scripts["checkpointing"]["mib"] < scripts["plain"]["mib"]


def test_a_plan_for_a_share_of_the_scripts_bytes_stays_in_it(bench: claims.Bench) -> None:
    row = bench.against_script(CASE, 0.6)
    assert row["ours_mib"]["all techniques"] < row["ours_mib"]["none"]
    for script in row["scripts"].values():
        assert row["ours_mib"]["all techniques"] < script["mib"]
        assert script["less_with_all"] == pytest.approx(1 - row["ours_mib"]["all techniques"] / script["mib"], abs=1e-3)
        plan = script["plan"]
        assert plan["fits"] and plan["peak_mib"] <= 0.6 * script["mib"] + 0.1
        assert plan["modelled_time"] >= 1


def test_the_steps_of_the_techniques_bench_run_with_and_without_local_attention(pack: Any, bench: claims.Bench) -> None:
    local = {"local_attention_tokens": 1, "local_attention_window": 2}
    rows = [
        _techniques.step(pack, case, lambda _: tiny.sd3(torch.bfloat16)) for case in (CASE, replace(CASE, train=local))
    ]
    assert all(0 < row["recomputed_mib"] <= row["kept_mib"] for row in rows)
    text = sparse.table(
        {
            "full_size": [{"technique": "local attention", "way": "on", "label": CASE.label, **row} for row in rows],
            "latent_bytes": _techniques.encoded(pack.lowvram_lora),
            "seconds": 1.0,
        }
    )
    assert "local attention, on (sd3)" in text and "half" in text


def test_without_a_share_nothing_is_planned(bench: claims.Bench) -> None:
    assert all(script["plan"] is None for script in bench.against_script(CASE, None)["scripts"].values())


def test_each_technique_is_told_apart_from_the_others(bench: claims.Bench) -> None:
    row = bench.techniques(CASE)
    earned = row["techniques"]
    assert tuple(earned) == claims.ALL
    assert row["all_mib"] < row["none_mib"]
    assert all(earned[name]["alone"] > 0 for name in ("weights streamed", "blocks recomputed", "batch in parts"))
    # Both act on blocks that run again; alone there are none.
    assert earned["inputs of blocks in RAM"]["alone"] == earned["convolutions run again"]["alone"] == 0


def test_the_result_is_plain_data_and_a_table(bench: claims.Bench) -> None:
    result = {
        "memory": [bench.against_script(CASE, 0.6)],
        "text": [bench.against_script(CASE, None)],
        "techniques": [bench.techniques(CASE)],
        "seconds": 1.0,
    }
    assert json.loads(json.dumps(result))
    text = claims.table(result)
    assert CASE.label in text and "40% less" in text
    assert all(name in text for name in claims.ALL)
