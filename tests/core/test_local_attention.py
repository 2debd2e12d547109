"""Attention in windows: against dense attention with everything written out, and its bytes counted without a device."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowvram_lora.memory.local_attention import Grid, Windows, attend_locally, find_grid, picture_sides
from lowvram_lora.memory.simulate import LiveBytes, fused_attention

HEADS, DEPTH = 2, 4
HEADS_FULL, DEPTH_FULL = 10, 64
BEFORE, AFTER = 3, 2


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)


def drawn(num_tokens: int, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (batch, HEADS, num_tokens, DEPTH)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]


def gradients(function: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """Return the result and the gradients of a loss in which every number of it counts differently."""
    out = function(*given)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), given)]


def window_of(row: int, column: int, windows: Windows) -> int:
    return row // windows.height * windows.columns + column // windows.width


def dense(q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
    """The same function in one softmax over all tokens and all summaries, token by token."""
    grid = windows.grid
    place = {
        grid.start + row * grid.width + column: window_of(row, column, windows)
        for row in range(grid.height)
        for column in range(grid.width)
    }
    members = [[token for token in place if place[token] == window] for window in range(windows.num)]
    keys, values = (torch.cat([t, *(t[:, :, own].mean(2, keepdim=True) for own in members)], 2) for t in (k, v))
    weights = torch.zeros(q.shape[2], keys.shape[2], dtype=q.dtype)
    for token in range(q.shape[2]):
        for other in range(q.shape[2]):
            weights[token, other] = token not in place or other not in place or place[token] == place[other]
        for window, own in enumerate(members):
            weights[token, q.shape[2] + window] = len(own) * (token in place and place[token] != window)
    scores = q @ keys.transpose(-1, -2) / math.sqrt(DEPTH) + weights.log()
    return scores.softmax(-1) @ values


GRIDS = {
    "the window divides it": (4, 6, 2),
    "the window does not divide it": (5, 7, 3),
    "a window as large as the picture": (4, 6, 6),
    "a window larger than the picture": (3, 5, 64),
    "one row": (1, 9, 4),
    "a window of one token": (3, 2, 1),
}


@pytest.mark.parametrize("around", [(0, 0), (BEFORE, 0), (0, AFTER), (BEFORE, AFTER)])
@pytest.mark.parametrize("name", GRIDS)
def test_windows_give_what_dense_attention_over_the_same_tokens_gives(name: str, around: tuple[int, int]) -> None:
    height, width, side = GRIDS[name]
    windows = Windows(Grid(around[0], height, width), side)
    given = drawn(height * width + sum(around))
    found = gradients(lambda q, k, v: attend_locally(q, k, v, windows, attend), given)
    for ours, expected in zip(found, gradients(lambda q, k, v: dense(q, k, v, windows), given), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("around", [(0, 0), (BEFORE, AFTER)])
@pytest.mark.parametrize("side", [6, 7, 64])
def test_a_window_that_covers_the_picture_is_full_attention(side: int, around: tuple[int, int]) -> None:
    windows = Windows(Grid(around[0], 4, 6), side)
    given = drawn(24 + sum(around))
    found = gradients(lambda q, k, v: attend_locally(q, k, v, windows, attend), given)
    for ours, expected in zip(found, gradients(lambda q, k, v: attend(q, k, v, None), given), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


def test_pictures_of_one_colour_a_window_lose_nothing() -> None:
    """Where all keys and values of a window are equal, its summary stands for them exactly."""
    windows = Windows(Grid(0, 6, 6), 3)
    q, k, v = drawn(36)
    flat = torch.tensor([window_of(token // 6, token % 6, windows) for token in range(36)])
    k, v = (tokens.detach()[:, :, :4][:, :, flat] for tokens in (k, v))
    torch.testing.assert_close(attend_locally(q, k, v, windows, attend), attend(q, k, v, None), rtol=1e-11, atol=1e-12)


def test_a_far_token_is_seen_through_its_windows_summary_alone() -> None:
    windows = Windows(Grid(0, 4, 8), 4)
    q, k, v = (tokens.detach() for tokens in drawn(32))
    before = attend_locally(q, k, v, windows, attend)
    swapped = v.clone()
    swapped[:, :, [6, 7]] = v[:, :, [7, 6]]
    keys = k.clone()
    keys[:, :, [6, 7]] = k[:, :, [7, 6]]
    after = attend_locally(q, keys, swapped, windows, attend)
    torch.testing.assert_close(before, after, rtol=1e-11, atol=1e-12)
    swapped[:, :, 7] += 1.0
    assert not torch.allclose(before[:, :, 0], attend_locally(q, keys, swapped, windows, attend)[:, :, 0])


@pytest.mark.parametrize("num_tokens, side", [(4096, 16), (4096, 32), (16384, 16), (16384, 32)])
def test_no_matrix_of_all_tokens_is_held_where_there_is_no_fused_kernel(num_tokens: int, side: int) -> None:
    full, local = counted(num_tokens, None, attend), counted(num_tokens, side, attend)
    width = math.isqrt(num_tokens)
    # A query sees so many keys instead of all; copies of queries, keys and values come on top.
    share = (side * side + (width // side) ** 2) / num_tokens
    copies = 12 * HEADS_FULL * num_tokens * DEPTH_FULL * 2
    assert local < 1.1 * share * full + copies
    assert local < full / 3


@pytest.mark.parametrize("num_tokens", [4096, 16384])
def test_with_a_fused_kernel_it_saves_work_and_no_memory(num_tokens: int) -> None:
    """Full attention holds no matrix there either: windows cost their copies, and pay in work."""
    counters = [LiveBytes("meta"), LiveBytes("meta")]
    sides = (None, 32)
    peaks = [counted(num_tokens, side, fused_attention(c), c) for side, c in zip(sides, counters, strict=True)]
    work = [sum(count.flops for count in counter.counts.values()) for counter in counters]
    assert peaks[0] < peaks[1] < 3 * peaks[0]
    assert work[1] < work[0] / 2


def counted(num_tokens: int, side: int | None, attend: Callable[..., Tensor], counter: LiveBytes | None = None) -> int:
    """Return the peak bytes of a forward and a backward pass; ``side`` None for full attention."""
    counter = counter or LiveBytes("meta")
    width = math.isqrt(num_tokens)
    with counter:
        shape = (1, HEADS_FULL, num_tokens, DEPTH_FULL)
        q, k, v = (torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        if side is None:
            out = attend(q, k, v, None)
        else:
            out = attend_locally(q, k, v, Windows(Grid(0, width, width), side), attend)
        out.sum().backward()  # type: ignore[no-untyped-call]
    return counter.peak


@pytest.mark.parametrize(
    "num_tokens, text, text_first, expected",
    [
        (96 * 128, (77,), True, Grid(0, 96, 128)),
        (48 * 64, (77,), True, Grid(0, 48, 64)),
        (24 * 32, (77,), True, Grid(0, 24, 32)),
        (48 * 64 + 154, (154,), True, Grid(154, 48, 64)),
        (48 * 64 + 154, (154,), False, Grid(0, 48, 64)),
        (48 * 64 + 160, (154, 160), True, Grid(160, 48, 64)),
        (48 * 64 + 155, (154,), True, None),
        (77, (77,), True, None),
        # A caption of as many tokens as the picture: what attends can't be told.
        (48 * 64, (48 * 64,), True, None),
    ],
)
def test_the_picture_is_found_in_the_sequence(
    num_tokens: int, text: tuple[int, ...], text_first: bool, expected: Grid | None
) -> None:
    assert find_grid(num_tokens, picture_sides((96, 128), (1, 2, 4)), text, text_first) == expected


def test_odd_latents_round_up_as_networks_do() -> None:
    sides = picture_sides((25, 33), (1, 2, 4))
    assert find_grid(13 * 17, sides, (77,)) == Grid(0, 13, 17)
    assert find_grid(7 * 9, sides, (77,)) == Grid(0, 7, 9)


@pytest.mark.parametrize("side", range(1, 40))
def test_windows_are_no_larger_than_asked_and_as_even_as_it_goes(side: int) -> None:
    for length in range(1, 70):
        windows = Windows(Grid(0, length, 1), side)
        there = windows.is_there(torch.device("cpu"))
        assert windows.height <= side
        assert there.sum() == length
        assert there.any(1).all()
        assert windows.padding[0] < windows.rows
