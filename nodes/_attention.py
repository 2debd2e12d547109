"""Attention as training runs it, between the host's call and torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..lowvram_lora.config import AttentionLimit
from ..lowvram_lora.memory.local_attention import Attend, Windows, attend_locally, find_grid, picture_sides


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """What is known of the tokens that a pass through a network attends to.

    Attributes:
        sides: heights and widths in tokens that the picture may have.
        num_text: tokens of the captions, as the network may count them; the first is what it is given.
        text_first: whether text stands before the picture, where both are in one sequence.
        text_rows: of each sample, the tokens that are its own; the rest is hidden. None if all are.
    """

    sides: tuple[tuple[int, int], ...]
    num_text: tuple[int, ...]
    text_first: bool = True
    text_rows: tuple[int, ...] | None = None

    def windows(self, num_tokens: int, limit: AttentionLimit) -> Windows | None:
        """Return how a sequence that attends to itself is cut, or None where it is left whole."""
        grid = find_grid(num_tokens, self.sides, self.num_text, self.text_first)
        if grid is None or grid.num_tokens <= limit.tokens:
            return None
        windows = Windows(grid, limit.window)
        return windows if windows.num > 1 else None

    @property
    def _sizes(self) -> set[int]:
        return {height * width for height, width in self.sides}

    @property
    def can_hide(self) -> bool:
        """Whether it can be told by numbers alone which calls attend to captions, and where these are in them."""
        sizes = self._sizes
        return all(text not in sizes and sizes.isdisjoint(size + text for size in sizes) for text in self.num_text)

    def mask(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Return ``[B, 1, 1, keys]`` to add to the scores, which hides the rows that pad captions.

        Captions are attended to by themselves, or before or behind the picture. None where no caption is.
        """
        if self.text_rows is None:
            return None
        num_keys, num_text = k.shape[2], self.num_text[0]
        if num_keys != num_text and num_keys - num_text not in self._sizes:
            return None
        rows = torch.tensor(self.text_rows, device=k.device)[:, None]
        hidden = torch.arange(num_text, device=k.device)[None, :] >= rows
        start = 0 if self.text_first else num_keys - num_text
        mask = torch.zeros(len(self.text_rows), num_keys, dtype=q.dtype, device=k.device)
        mask[:, start : start + num_text].masked_fill_(hidden, -torch.inf)
        return mask[:, None, None, :]


# A network without patches halves its latents up to three times.
_HALVED = (1, 2, 4, 8)


def attended(
    network: nn.Module, noised: Tensor, num_text: int | None, text_rows: tuple[int, ...] | None = None
) -> Sequence:
    """Return what is known of the tokens that a pass of ``noised`` through ``network`` attends to.

    Args:
        num_text: rows of the captions; None for none.
    """
    step = getattr(network, "pad_tokens_multiple", None)
    text = () if num_text is None else (num_text, -(-num_text // step) * step) if step else (num_text,)
    image_first = any(getattr(module, "flipped_img_txt", False) for module in network.modules())
    patch = getattr(network, "patch_size", None)
    scales = _HALVED if patch is None else (patch if isinstance(patch, int) else patch[-1],)
    height, width = noised.shape[-2:]
    sides = tuple(picture_sides((height, width), scales))
    return Sequence(sides=sides, num_text=text, text_first=not image_first, text_rows=text_rows)


# Networks of the host in which captions act by attention alone, while the picture's positions do not depend on how
# many rows they have. Lumina's do, for one.
_TEXT_ACTS_BY_ATTENTION = {"UNetModel", "OpenAISignatureMMDITWrapper", "Flux", "QwenImageTransformer2DModel"}


def hides_padding(patcher: Any) -> bool:
    """Return whether rows that pad captions have no effect on this MODEL once attention to them is hidden.

    Not where a patch makes captions something else on the way.
    """
    options = patcher.model_options.get("transformer_options", {})
    if any(options.get(key) for key in ("patches", "patches_replace", "wrappers")) or patcher.wrappers:
        return False
    network = patcher.model.diffusion_model
    # Some SD3 networks let captions attend to one another first, in a way that nobody can take part in.
    mixes_text = getattr(network, "context_processor", None) is not None or getattr(network, "register_length", 0)
    is_hosts = type(network).__module__.startswith("comfy.")
    return is_hosts and type(network).__name__ in _TEXT_ACTS_BY_ATTENTION and not mixes_text


def in_hosts_shape(attend: Attend) -> Callable[..., Any]:
    """Return ``attend`` over ``[B, heads, N, head_dim]`` with the arguments the host calls its own with."""

    def override(
        func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, *_: Any, **options: Any
    ) -> Any:
        if not options.get("skip_reshape", False):
            head_dim = q.shape[-1] // heads
            # Heads may be apart already; SD3's values are.
            q, k, v = (each.view(*each.shape[:2], -1, head_dim).transpose(1, 2) for each in (q, k, v))
        out = attend(q, k, v, mask)
        return out if options.get("skip_output_reshape", False) else out.transpose(1, 2).flatten(2)

    return override


def adapted(attend: Attend, sequence: Sequence, limit: AttentionLimit | None) -> Attend:
    """Return ``attend`` with what pads captions hidden, and with self-attention in windows where ``limit`` says so.

    A call in which the host gives a mask of its own is left as it is.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            return attend(q, k, v, mask)
        hidden = sequence.mask(q, k)
        if limit is not None and q.shape[2] == k.shape[2]:
            windows = sequence.windows(q.shape[2], limit)
            if windows is not None:
                return attend_locally(q, k, v, windows, attend, hidden)
        return attend(q, k, v, hidden)

    return attention
