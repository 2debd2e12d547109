"""Feed-forward in parts: a block's feed-forward runs on slices of its tokens, one after the other.

In a transformer block the feed-forward holds most of the peak: it widens every token fourfold or more, and keeps what
it made for the backward pass. But it acts on each token by itself. Here it runs without gradients, part by part, into
one output; in the backward pass each part runs again and backward before the next. So over the block only its input
and its output live. The price is one more forward run of the feed-forward in a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .frozen import is_linear, is_matrix

# Tokens of a part. With fewer a device's units lie idle. SDXL's largest block comes down by 84 MiB at 1024²; half as
# many tokens would save it only 16 more.
PART_ROWS = 1024

_NAME = re.compile(r"(ff|ffn|feed_forward|\w*mlp)\w*")


def find_feed_forwards(network: nn.Module, blocks: Collection[str]) -> dict[str, nn.Module]:
    """Return by path the feed-forwards inside ``blocks`` that act on each token by itself and draw nothing."""
    found: dict[str, nn.Module] = {}
    for block in blocks:
        _collect(network.get_submodule(block), block, found)
    return found


def _collect(module: nn.Module, prefix: str, found: dict[str, nn.Module]) -> None:
    for name, child in module.named_children():
        path = f"{prefix}.{name}"
        if _NAME.fullmatch(name) and _acts_on_tokens(child):
            found[path] = child
        else:
            _collect(child, path, found)


def _acts_on_tokens(module: nn.Module) -> bool:
    """Return whether nothing in ``module`` could mix tokens: two linear layers or more, and nothing with numbers."""
    num_linear = 0
    for part in module.modules():
        if is_linear(part):
            num_linear += 1
        elif is_matrix(part) or any(True for _ in (*part.parameters(False), *part.buffers(False))):
            return False
        elif getattr(part, "inplace", False) or (isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0):
            # Parts would draw other numbers than the whole does.
            return False
    return num_linear >= 2


@dataclass(frozen=True)
class Chunked:
    """The forward that stands in for a feed-forward's own while a run lasts.

    Attributes:
        forward: the feed-forward's own.
        anchor: requires a gradient, so that adapters get theirs where the input needs none.
        trains: whether the feed-forward holds adapters.
        part_rows: tokens of a part, at most.
    """

    forward: Callable[..., Tensor]
    anchor: Tensor
    trains: bool
    part_rows: int

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the feed-forward's own forward returns."""
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or x.shape[:-1].numel() <= self.part_rows:
            return self.forward(*args, **kwargs)
        if torch.is_grad_enabled() and (self.trains or x.requires_grad):
            out: Tensor = _InParts.apply(x, self.anchor, self)
            return out
        with torch.no_grad():
            return self.in_parts(x)

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the parts of ``x [..., C]``, each ``[1, rows, C]`` and about as large."""
        rows = x.reshape(1, -1, x.shape[-1])
        number = -(-rows.shape[1] // self.part_rows)
        size = -(-rows.shape[1] // number)
        return (rows[:, start : start + size] for start in range(0, rows.shape[1], size))

    def in_parts(self, x: Tensor) -> Tensor:
        """Return the output, made part by part; without gradients."""
        out, start = None, 0
        for part in self.parts(x):
            made = self.forward(part)
            if out is None:
                out = made.new_empty(*x.shape[:-1], made.shape[-1])
            end = start + made.shape[1]
            # Not in place by its name: a block that writes in place is recomputed in another way.
            torch.cat((made,), dim=1, out=out.view(1, -1, out.shape[-1])[:, start:end])
            start = end
            del made
        assert out is not None
        return out


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, chunked: Chunked) -> Tensor:
        ctx.chunked = chunked
        ctx.save_for_backward(x)
        return chunked.in_parts(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,), (grad,), chunked = ctx.saved_tensors, grads, ctx.chunked
        needs_x = ctx.needs_input_grad[0]
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        places: Any = iter(()) if grad_x is None else chunked.parts(grad_x)
        for part, grad_part in zip(chunked.parts(x), chunked.parts(grad), strict=True):
            given = part.detach().requires_grad_(needs_x)
            with torch.enable_grad():
                made = chunked.forward(given)
            torch.autograd.backward(made, grad_part)
            del made
            if needs_x:
                next(places).copy_(given.grad)
        return grad_x, None, None


def chunked_forwards(
    network: nn.Module,
    blocks: Collection[str],
    trained: Collection[str],
    anchor: Tensor,
    part_rows: int = PART_ROWS,
) -> dict[nn.Module, Callable[..., Any]]:
    """Return a stand-in for the forward of every feed-forward inside ``blocks``.

    Args:
        trained: paths of the adapted layers.
        anchor: as for ``Chunked``.
    """
    return {
        module: Chunked(module.forward, anchor, any(layer.startswith(f"{path}.") for layer in trained), part_rows)
        for path, module in find_feed_forwards(network, blocks).items()
    }
