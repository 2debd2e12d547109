"""What a simulated step tells about a job: bytes and work, by layer and block. What a plan is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Device addresses that weights start at in the ring; what the fastest kernels ask for.
ALIGNMENT = 256


def aligned(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class LayerFacts:
    """One layer's weight as it is stored.

    Attributes:
        path: in the network.
        block: path of the block that holds it, or None.
        num_bytes: device bytes of its payload, each tensor aligned.
        read_again: a recomputed block that keeps its convolutions reads it in its second run; frozen convolutions
            are not read there.
        read_backward: the backward pass reads it for its input's gradient; not where the input needs none.
    """

    path: str
    block: str | None
    num_bytes: int
    read_again: bool = True
    read_backward: bool = True


@dataclass(frozen=True, kw_only=True)
class BlockFacts:
    """One block in a step in which every block is recomputed and keeps its convolutions.

    Bytes are those that live beside small parameters, adapters, gradients and optimizer state.

    Attributes:
        path: in the network.
        flops: of one forward run.
        forward_peak: the most live bytes while it runs forward.
        backward_peak: the most live bytes while it runs again and backward.
        activation_bytes: what it would keep from forward to backward were it not recomputed, beyond its inputs.
        input_bytes: what its inputs take up, from forward to backward, that nothing else holds.
        convolution_bytes: the kept outputs of its frozen convolutions; they live from its forward to its backward.
        gradient_bytes: the adapters' gradients that live when its backward pass begins, in a step's first pass.
        writes_in_place: whether it writes over tensors it was given; such a block is always recomputed.
        convolution_flops: the part of ``flops`` that kept convolutions save in the second run.
        backward_flops: of its backward pass, as counted.
        in_parts: the same block with its feed-forward in parts, where that makes a difference.
    """

    path: str
    flops: int
    forward_peak: int
    backward_peak: int
    activation_bytes: int
    input_bytes: int
    convolution_bytes: int
    gradient_bytes: int
    writes_in_place: bool
    convolution_flops: int = 0
    backward_flops: int = 0
    in_parts: BlockFacts | None = None


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """A step at one micro-batch: every block recomputed, no weight resident, no ring.

    Attributes:
        blocks: in forward order.
        other_peak: the most live bytes outside any block, counted as in ``BlockFacts``.
        other_flops: of the forward work outside blocks.
        between_peaks: ``other_peak`` by place: item ``i`` is the most live bytes outside blocks while exactly the
            first ``i`` blocks hold something for the backward pass; one more item than blocks. Empty where it was
            not measured: ``other_peak`` then stands for every place.
    """

    blocks: tuple[BlockFacts, ...]
    other_peak: int
    other_flops: int
    between_peaks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that a plan needs to know about model and data.

    Attributes:
        layers: every matrix, in the order the forward pass fetches them.
        batch_size: samples of the largest batch.
        passes: batches that make a step (gradient accumulation).
        steps: by micro-batch; holds 1 and ``batch_size``.
        small_bytes: the device clones of norms and free parameters.
        adapter_bytes: trained parameters in float32; float32 gradients take as much, AdamW's state twice as much.
        update_bytes: what the optimizer's update holds for a moment beside parameters, gradients and state.
        parts_ring_bytes: a ring of this size copies the weights of a feed-forward in parts no more often than those of
            a whole one.
    """

    layers: tuple[LayerFacts, ...]
    batch_size: int
    passes: int
    steps: Mapping[int, StepFacts]
    small_bytes: int
    adapter_bytes: int
    update_bytes: int = 0
    parts_ring_bytes: int = 0
