"""The encodings of latents: what they cost, how exact they are, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from lowvram_lora.data import bands, precision
from lowvram_lora.data.channels import all_finite
from lowvram_lora.errors import ConfigError, UnsupportedModelError

LOSSY = ("bands", "half", "int8", "float8")
LARGEST = torch.finfo(torch.float32).max
LEAST = 2.0**-149


def like_a_vaes(seed: int, shape: tuple[int, ...] = (4, 24, 17)) -> Tensor:
    """Smooth gradients with edges and noise, each channel with a mean and a spread of its own."""
    rng = torch.Generator().manual_seed(seed)
    height, width = shape[-2:]
    rows = torch.linspace(-1, 1, height)[:, None] if height > 1 else torch.zeros(1, 1)
    columns = torch.linspace(-1, 1, width)[None]
    slopes = torch.randn(4, shape[0], generator=rng)
    channels = []
    for a, b, mean, spread in slopes.T.tolist():
        smooth = a * rows + b * columns + 2.0 * ((rows * a + columns) > b).float()
        noise = 0.3 * torch.randn(*shape[1:-2], height, width, generator=rng)
        channels.append(3.0 * mean + math.exp(spread) * (smooth + noise))
    return torch.stack(channels).reshape(shape)


def round_trip(latents: Tensor, name: str) -> Tensor:
    """Encode, put through the bytes of a file, decode."""
    tensors, metadata = precision.encode(latents, name)
    return precision.decode(load(save(tensors, metadata)), metadata)


def channelwise(reduced: Tensor, latents: Tensor) -> Tensor:
    return reduced.double().reshape(-1, *(1,) * (latents.ndim - 1)).expand(latents.shape)


def bound(latents: Tensor, name: str) -> Tensor:
    """The error that the docstrings allow each number, in float64."""
    exact = latents.double()
    flat = exact.flatten(1)
    peak = channelwise(flat.abs().amax(1), exact)
    size = exact.abs()
    if name == "half":
        allowed = torch.maximum(size / 2**11, peak / 2**39)
    elif name == "float8":
        allowed = torch.maximum(size / 2**4, peak / 2**17)
    elif name == "int8":
        allowed = channelwise(flat.amax(1) - flat.amin(1), exact) / 509 + peak / 2**22
    else:
        detail = channelwise((exact - block_means(exact)).abs().flatten(1).amax(1), exact)
        allowed = (detail + peak / 2048) / 65500 + size / 2**24
    return allowed + 2.0**-126


def block_means(exact: Tensor) -> Tensor:
    means = torch.empty_like(exact)
    for top in range(0, exact.shape[-2], bands.BLOCK):
        for left in range(0, exact.shape[-1], bands.BLOCK):
            block = (..., slice(top, top + bands.BLOCK), slice(left, left + bands.BLOCK))
            means[block] = exact[block].mean((-2, -1), keepdim=True)
    return means


CASES: dict[str, Callable[[], Tensor]] = {
    "smooth with edges and noise": lambda: like_a_vaes(0),
    "one frame of a video model": lambda: like_a_vaes(1, (16, 1, 12, 9)),
    "several frames": lambda: like_a_vaes(2, (3, 5, 9, 16)),
    "one pixel": lambda: like_a_vaes(3, (16, 1, 1)),
    "one row": lambda: like_a_vaes(4, (2, 1, 33)),
    "zeros": lambda: torch.zeros(4, 9, 9),
    "constant channels": lambda: torch.tensor([0.1, -7.3, 1e30, 3e-39])[:, None, None].expand(4, 10, 3),
    "one channel constant": lambda: torch.cat([like_a_vaes(5, (1, 8, 8)), torch.full((1, 8, 8), 0.7)]),
    "huge": lambda: like_a_vaes(6) * 1e36,
    "the largest there are": lambda: torch.tensor([LARGEST, -LARGEST, 0.0, 1.0]).reshape(1, 2, 2),
    "tiny": lambda: like_a_vaes(7) * 1e-37,
    "the least there are": lambda: torch.tensor([LEAST, -LEAST, 0.0, 5 * LEAST]).reshape(1, 2, 2),
    "far from 0 with little spread": lambda: 1000.0 + 1e-3 * like_a_vaes(8),
    "one outlier": lambda: like_a_vaes(9).index_put_(
        (torch.tensor(0), torch.tensor(3), torch.tensor(3)), torch.tensor(9e4)
    ),
    "channels of very unlike scales": lambda: like_a_vaes(10) * torch.tensor([1e-20, 1.0, 1e5, 1e20])[:, None, None],
}


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("case", CASES)
def test_each_encoding_keeps_its_promised_error(case: str, name: str) -> None:
    latents = CASES[case]()
    decoded = round_trip(latents, name)
    assert decoded.shape == latents.shape
    assert decoded.dtype == torch.float32
    assert bool(decoded.isfinite().all())
    error = (decoded.double() - latents.double()).abs()
    assert bool((error <= bound(latents, name)).all()), (error - bound(latents, name)).max()


@pytest.mark.parametrize("name", LOSSY)
@given(
    seed=st.integers(0, 10_000),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 20)),
    exponent=st.integers(-40, 37),
)
@settings(max_examples=60, deadline=None)
def test_the_promise_holds_for_any_latents(name: str, seed: int, shape: tuple[int, int, int], exponent: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape, generator=rng, dtype=torch.float64) * torch.exp2(
        torch.randint(-12, 3, shape, generator=rng).double()
    )
    latents = (spread * 10.0**exponent).float()
    error = (round_trip(latents, name).double() - latents.double()).abs()
    assert bool((error <= bound(latents, name)).all())


@pytest.mark.parametrize("case", CASES)
def test_full_keeps_every_bit(case: str) -> None:
    latents = CASES[case]()
    assert round_trip(latents, "full").view(torch.int32).equal(latents.contiguous().view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_keeps_every_bit_of_a_vae_that_computed_in_half_precision(dtype: torch.dtype) -> None:
    latents = like_a_vaes(11, (16, 40, 40)).to(dtype)
    assert torch.equal(round_trip(latents, "half"), latents.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nothing_is_lost_by_the_smallest_exact_encoding(dtype: torch.dtype) -> None:
    latents = like_a_vaes(11)
    assert precision.smallest_exact(latents) == "full"
    assert precision.smallest_exact(latents.to(dtype)) == "half"
    assert precision.smallest_exact(latents.to(dtype).float()) == "half"
    one_more_bit = latents.to(dtype).float()
    one_more_bit[2, 5, 5] = 1.0 + 2.0**-20
    assert precision.smallest_exact(one_more_bit) == "full"


@pytest.mark.parametrize("name", precision.NAMES)
def test_constant_latents_and_zeros_come_back_as_they_were(name: str) -> None:
    latents = torch.tensor([0.0, 1.0, -0.25])[:, None, None].repeat(1, 9, 11)
    assert torch.equal(round_trip(latents, name), latents)


def test_int8_keeps_any_constant_channel_exactly() -> None:
    latents = torch.tensor([0.1, -7.3, 1e30, LARGEST])[:, None, None].repeat(1, 5, 5)
    assert torch.equal(round_trip(latents, "int8"), latents)


def test_the_order_of_the_names_is_that_of_their_errors_on_latents_like_a_vaes() -> None:
    latents = [like_a_vaes(seed, (16, 32, 48)) for seed in range(8)]
    rms = {}
    for name in precision.NAMES:
        errors = torch.cat([((round_trip(x, name) - x) / x.std()).flatten() for x in latents])
        rms[name] = float(errors.pow(2).mean().sqrt())
    assert sorted(rms, key=lambda name: rms[name]) == list(precision.NAMES)


def test_bands_are_smaller_than_full_and_more_exact_than_half() -> None:
    for seed in range(8):
        latents = like_a_vaes(seed, (16, 32, 48))
        worst = {name: float((round_trip(latents, name) - latents).abs().max()) for name in ("bands", "half")}
        assert worst["bands"] < worst["half"] / 4
    assert precision.num_bytes("bands", (16, 128, 128)) / precision.num_bytes("full", (16, 128, 128)) < 0.51
    assert bands.low_shape((16, 128, 121)) == (16, 16, 16)


@pytest.mark.parametrize("name", precision.NAMES)
@pytest.mark.parametrize("shape", [(4, 64, 64), (16, 1, 1), (16, 1, 37, 56), (3, 5, 9, 16)])
def test_bytes_are_known_without_encoding(name: str, shape: tuple[int, ...]) -> None:
    tensors, _ = precision.encode(like_a_vaes(0, shape), name)
    assert precision.num_bytes(name, shape) == sum(each.numel() * each.element_size() for each in tensors.values())
    assert tensors[precision.LATENTS].shape == shape


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_decoded_is_exact_arithmetic_on_what_is_stored(name: str) -> None:
    """Nothing is left to the machine: fractions give the same float32."""
    from fractions import Fraction

    tensors, metadata = precision.encode(like_a_vaes(12, (2, 9, 10)), name)
    decoded = precision.decode(tensors, metadata)
    plain = {part: tensor.double() for part, tensor in tensors.items()}

    def stored(part: str, *place: int) -> Fraction:
        return Fraction(plain[part][place].item())

    for c in range(2):
        for y in range(9):
            for x in range(10):
                number = stored("latents", c, y, x) * stored("step" if "step" in plain else "scale", c)
                if name == "int8":
                    number += stored("middle", c)
                if name == "bands":
                    number += stored("low", c, y // bands.BLOCK, x // bands.BLOCK) * stored("scale", c)
                assert torch.tensor(float(number), dtype=torch.float64).float() == decoded[c, y, x]


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("case", CASES)
def test_no_scale_is_0_or_so_small_that_a_machine_may_take_it_for_0(case: str, name: str) -> None:
    tensors, _ = precision.encode(CASES[case](), name)
    for part in tensors.keys() & {"scale", "step"}:
        assert float(tensors[part].min()) >= torch.finfo(torch.float32).smallest_normal


@pytest.mark.parametrize("name", precision.NAMES)
def test_encoding_is_repeatable_and_leaves_its_input_alone(name: str) -> None:
    latents = like_a_vaes(13)
    before = latents.clone()
    one, other = precision.encode(latents, name), precision.encode(latents, name)
    assert save(*one) == save(*other)
    one[0][precision.LATENTS].zero_()
    assert torch.equal(latents, before)


def test_latents_made_in_inference_mode_or_not_contiguous_or_with_a_gradient_are_taken() -> None:
    with torch.inference_mode():
        latents = like_a_vaes(14).double()
    turned = latents.clone().transpose(1, 2).requires_grad_()
    for name in precision.NAMES:
        assert torch.equal(round_trip(turned, name), round_trip(turned.detach().float().contiguous(), name))
        assert not round_trip(latents, name).is_inference()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", precision.NAMES)
def test_latents_come_in_the_compute_precision(name: str, dtype: torch.dtype) -> None:
    tensors, metadata = precision.encode(like_a_vaes(15), name)
    assert torch.equal(precision.decode(tensors, metadata, dtype), precision.decode(tensors, metadata).to(dtype))


def test_what_the_compute_precision_cannot_hold_is_refused() -> None:
    tensors, metadata = precision.encode(torch.full((1, 2, 2), 1e6), "half")
    assert float(precision.decode(tensors, metadata, torch.bfloat16).max()) == pytest.approx(1e6, rel=0.01)
    with pytest.raises(UnsupportedModelError, match=r"1e\+06.*bf16"):
        precision.decode(tensors, metadata, torch.float16)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", precision.NAMES)
def test_what_is_not_finite_is_refused(name: str, value: float) -> None:
    latents = like_a_vaes(16)
    latents[1, 2, 3] = value
    with pytest.raises(UnsupportedModelError, match="1 of 1632 numbers that are not finite"):
        precision.encode(latents, name)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_seen_wherever_it_stands(value: float) -> None:
    latents = like_a_vaes(16)
    assert all_finite(latents)
    for place in range(latents.numel()):
        wrong = latents.clone()
        wrong.view(-1)[place] = value
        assert not all_finite(wrong)


def test_what_float32_cannot_hold_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="not finite"):
        precision.encode(torch.full((1, 1, 1), 1e39, dtype=torch.float64), "full")


@pytest.mark.parametrize("shape", [(4,), (4, 4), (1, 2, 3, 4, 5), (4, 0, 8)])
def test_a_shape_that_is_no_pictures_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedModelError, match="shape"):
        precision.encode(torch.zeros(shape), "half")
    with pytest.raises(UnsupportedModelError, match="shape"):
        precision.num_bytes("half", shape)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    for refused in (
        lambda: precision.encode(torch.zeros(1, 1, 1), "int4"),
        lambda: precision.num_bytes("int4", (1, 1, 1)),
        lambda: precision.less_exact("int4", "half"),
    ):
        with pytest.raises(ConfigError, match=r"int4.*bands"):
            refused()
    with pytest.raises(ConfigError, match=r"'low'.*'moderate'"):
        precision.on_disk("low")


@pytest.mark.parametrize("name", LOSSY)
def test_damaged_tensors_are_a_value_error_and_never_latents(name: str) -> None:
    tensors, metadata = precision.encode(like_a_vaes(17), name)
    damaged = [{}, {part: each for part, each in tensors.items() if part == precision.LATENTS}]
    for part, each in tensors.items():
        damaged.append({**tensors, part: each.double()})
        damaged.append({**tensors, part: each.flatten()[1:]})
    for part in tensors.keys() & {"scale", "step", "middle"}:
        damaged.append({**tensors, part: torch.full_like(tensors[part], math.nan)})
    for broken in damaged:
        with pytest.raises(ValueError, match="damaged"):
            precision.decode(broken, metadata)
    with pytest.raises(ValueError, match="damaged"):
        precision.decode(tensors, {precision.PRECISION: "int4"})
    with pytest.raises(ValueError, match="damaged"):
        precision.decode(tensors, {})


def test_a_file_without_a_name_holds_full_latents() -> None:
    latents = like_a_vaes(18)
    assert torch.equal(precision.decode({"latents": latents}, {}), latents)


@pytest.mark.parametrize("wanted", precision.NAMES)
@pytest.mark.parametrize("kept", precision.NAMES)
def test_kept_latents_become_less_exact_on_request_and_never_more(kept: str, wanted: str) -> None:
    latents = like_a_vaes(19)
    tensors, metadata = precision.encode(latents, kept)
    converted = precision.convert(tensors, metadata, wanted)
    less = precision.less_exact(kept, wanted)
    assert converted[1][precision.PRECISION] == less
    assert precision.NAMES.index(less) == max(precision.NAMES.index(kept), precision.NAMES.index(wanted))
    if less == kept:
        assert converted[0] is tensors
    elif kept == "full":
        assert torch.equal(precision.decode(*converted), round_trip(latents, wanted))


def test_more_compression_takes_fewer_bytes() -> None:
    sizes = [precision.num_bytes(precision.on_disk(each), (16, 128, 128)) for each in ("none", "moderate", "high")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] / sizes[0] == pytest.approx(0.5, abs=0.001)
    assert sizes[2] / sizes[0] == pytest.approx(0.25, abs=0.001)
