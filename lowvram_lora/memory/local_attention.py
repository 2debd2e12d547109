"""Self-attention that sees a window of the picture instead of all of it.

The picture's tokens are cut into windows of one size that do not overlap, by reshaping; no matrix of all tokens against
all tokens is ever made. A token attends to its own window, to every global token (text, and whatever else stands in the
sequence beside the picture), and to one summary of each other window: the mean of its keys and of its values, weighted
by the number of its tokens. Were a window's keys all equal, its summary would stand for it exactly. Global tokens see
everything. Where one window covers the picture, this is full attention.

It is another function than the one a network was made with, close to it only where far tokens matter little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention over ``q, k, v`` ``[B, heads, N, head_dim]`` with a mask that is added to the scores, or None."""


@dataclass(frozen=True)
class Grid:
    """Where the picture's tokens are in a sequence: row by row, from ``start`` on."""

    start: int
    height: int
    width: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the picture."""
        return self.height * self.width

    @property
    def inside(self) -> slice:
        """The picture's tokens."""
        return slice(self.start, self.start + self.num_tokens)

    @property
    def around(self) -> tuple[slice, slice]:
        """What stands before and after them."""
        return slice(0, self.start), slice(self.start + self.num_tokens, None)


@dataclass(frozen=True)
class Windows:
    """How a grid is cut: as evenly as it goes, into windows of at most ``side`` tokens a side.

    Attributes:
        rows, columns: of windows.
        height, width: of each in tokens. The last row and column may reach over the grid's edge.
    """

    grid: Grid
    side: int

    @property
    def rows(self) -> int:
        """Windows one above another."""
        return -(-self.grid.height // self.side)

    @property
    def columns(self) -> int:
        """Windows side by side."""
        return -(-self.grid.width // self.side)

    @property
    def height(self) -> int:
        """Tokens of a window's side."""
        return -(-self.grid.height // self.rows)

    @property
    def width(self) -> int:
        """Tokens of a window's other side."""
        return -(-self.grid.width // self.columns)

    @property
    def num(self) -> int:
        """Windows in all."""
        return self.rows * self.columns

    @property
    def padding(self) -> tuple[int, int]:
        """Rows and columns of tokens that are missing to whole windows."""
        return self.rows * self.height - self.grid.height, self.columns * self.width - self.grid.width

    @cached_property
    def is_padded(self) -> bool:
        """Whether any window reaches over the grid's edge."""
        return any(self.padding)

    def cut(self, tokens: Tensor) -> Tensor:
        """Return ``[B, heads, height * width, D]`` of the grid as ``[B, num, heads, tokens of a window, D]``.

        What is missing to whole windows is 0.
        """
        batch, heads, _, depth = tokens.shape
        picture = tokens.reshape(batch, heads, self.grid.height, self.grid.width, depth)
        if self.is_padded:
            below, right = self.padding
            picture = pad(picture, (0, 0, 0, right, 0, below))
        parts = picture.view(batch, heads, self.rows, self.height, self.columns, self.width, depth)
        return parts.permute(0, 2, 4, 1, 3, 5, 6).reshape(batch, self.num, heads, self.height * self.width, depth)

    def joined(self, windows: Tensor) -> Tensor:
        """Undo ``cut``."""
        batch, _, heads, _, depth = windows.shape
        parts = windows.view(batch, self.rows, self.columns, heads, self.height, self.width, depth)
        whole = parts.permute(0, 3, 1, 4, 2, 5, 6).reshape(
            batch, heads, self.rows * self.height, self.columns * self.width, depth
        )
        return whole[:, :, : self.grid.height, : self.grid.width].flatten(2, 3)

    def is_there(self, device: torch.device) -> Tensor:
        """Return ``[num, tokens of a window]``: which tokens are of the picture."""
        row = torch.arange(self.rows * self.height, device=device).view(self.rows, 1, self.height, 1)
        column = torch.arange(self.columns * self.width, device=device).view(1, self.columns, 1, self.width)
        return ((row < self.grid.height) & (column < self.grid.width)).flatten(2).flatten(0, 1)


def picture_sides(latent_sides: tuple[int, int], scales: Sequence[int]) -> list[tuple[int, int]]:
    """Return the heights and widths in tokens of latents of ``latent_sides`` made smaller by each of ``scales``."""
    height, width = latent_sides
    return [(-(-height // scale), -(-width // scale)) for scale in scales]


def find_grid(
    num_tokens: int, sides: Sequence[tuple[int, int]], num_text: Sequence[int], text_first: bool = True
) -> Grid | None:
    """Return where the picture is in a sequence that attends to itself, or None if that can't be told.

    Args:
        sides: heights and widths in tokens that the picture may have.
        num_text: how many text tokens there may be; a picture alone is always tried first.
        text_first: whether text stands before the picture, where it stands in the same sequence.
    """
    for height, width in sides:
        if height * width == num_tokens and num_tokens not in num_text:
            return Grid(0, height, width)
    for text in num_text:
        for height, width in sides:
            if height * width + text == num_tokens:
                return Grid(text if text_first else 0, height, width)
    return None


def attend_locally(
    q: Tensor, k: Tensor, v: Tensor, windows: Windows, attend: Attend, mask: Tensor | None = None
) -> Tensor:
    """Return self-attention over ``[B, heads, N, head_dim]`` in ``windows``; all else in the sequence is global.

    Memory and work are those of ``N`` queries that each see a window, the global tokens and one summary a window.

    Args:
        mask: ``[B, 1, 1, N]``, added to the scores of keys; 0 for those of the picture.
    """
    grid = windows.grid
    picture = _attend_in_windows(q, k, v, windows, attend, mask)
    before, after = (attend(q[:, :, place], k, v, mask) if q[:, :, place].shape[2] else None for place in grid.around)
    parts = [part for part in (before, picture, after) if part is not None]
    return torch.cat(parts, dim=2) if len(parts) > 1 else picture


def _attend_in_windows(
    q: Tensor, k: Tensor, v: Tensor, windows: Windows, attend: Attend, mask: Tensor | None
) -> Tensor:
    """Return what the picture's tokens gather: each window is a sample of its own."""
    bias = _bias(windows, q, mask)
    queries = windows.cut(q[:, :, windows.grid.inside]).flatten(0, 1)
    out = attend(queries, _seen(k, windows), _seen(v, windows), bias)
    return windows.joined(out.view(q.shape[0], windows.num, *out.shape[1:]))


def _seen(tokens: Tensor, windows: Windows) -> Tensor:
    """Return what each window sees, ``[B * num, heads, global + num + tokens of a window, D]``."""
    own = windows.cut(tokens[:, :, windows.grid.inside])
    everywhere = [tokens[:, :, place] for place in windows.grid.around]
    if windows.num > 1:
        sizes = windows.is_there(own.device).sum(1).to(own.dtype)
        everywhere.append((own.sum(3) / sizes[:, None, None]).transpose(1, 2))
    shared = torch.cat(everywhere, dim=2).unsqueeze(1).expand(-1, windows.num, -1, -1, -1)
    return torch.cat([shared, own], dim=3).flatten(0, 1)


def _bias(windows: Windows, like: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return ``[B * num, 1, 1, keys]`` to add to the scores: summaries count as often as they have tokens."""
    if windows.num == 1 and mask is None:
        return None
    there, batch = windows.is_there(like.device), like.shape[0]
    dtype = torch.promote_types(like.dtype, torch.float32)
    own = torch.zeros(there.shape, dtype=dtype, device=like.device).masked_fill(~there, -math.inf)
    if windows.num > 1:
        summaries = there.sum(1).to(dtype).log().expand(windows.num, -1)
        # A window's own summary would count its tokens a second time.
        itself = torch.eye(windows.num, dtype=torch.bool, device=like.device)
        own = torch.cat([summaries.masked_fill(itself, -math.inf), own], dim=1)
    outside = own.new_zeros(batch, like.shape[2] - windows.grid.num_tokens)
    if mask is not None:
        outside = torch.cat([mask[:, 0, 0, place] for place in windows.grid.around], dim=1).to(dtype)
    spread = (batch, windows.num, -1)
    bias = torch.cat([outside.unsqueeze(1).expand(spread), own.expand(batch, -1, -1)], dim=2)
    return bias.flatten(0, 1)[:, None, None, :].to(like.dtype)
