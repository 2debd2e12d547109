"""Convolution and its input gradient with a weight that is used once.

On the CPU the library lays a convolution's weight out anew at every call. Where the picture is smaller than the weight
that costs more than the sum itself, so there the convolution is written as one matrix product over patches
(Chellapilla et al., High Performance Convolutional Neural Networks for Document Processing, 2006).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Measured on two CPU cores in bf16: at 16 x 16 the two ways are about even, at 8 x 8 the product takes half the time.
SMALL_PICTURE = 256


def geometry(module: Any) -> dict[str, Any]:
    """Return a convolution layer's settings as torch's general convolution takes them."""
    return {
        "stride": module.stride,
        "padding": module.padding,
        "dilation": module.dilation,
        "transposed": module.transposed,
        "output_padding": module.output_padding,
        "groups": module.groups,
    }


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, module: Any) -> Tensor:
    """Return ``module``'s output for ``x`` ``[B, C, ...]`` with ``weight`` and ``bias`` in place of its own."""
    if not _is_small(x.shape, weight, module, x.device):
        return torch.convolution(x, weight, bias, **geometry(module))
    # The result must own its storage, as a frozen layer's does.
    out = x.new_empty(x.shape[0], weight.shape[0], *_output_size(x.shape, weight, module))
    patches = F.unfold(x, **_patches(weight, module))
    torch.matmul(weight.reshape(weight.shape[0], -1), patches, out=out.view(*out.shape[:2], -1))
    if bias is not None:
        # Not in place by its name: a block that writes in place is recomputed in another way.
        torch.add(out, bias.view(-1, 1, 1), out=out)
    return out


def input_gradient(grad: Tensor, shape: torch.Size, weight: Tensor, module: Any) -> Tensor:
    """Return the gradient of ``module``'s input of ``shape``, given that of its output."""
    if _is_small(shape, weight, module, grad.device):
        patches = torch.matmul(weight.reshape(weight.shape[0], -1).t(), grad.flatten(2))
        return F.fold(patches, shape[2:], **_patches(weight, module))
    # Only the input's shape is needed for its gradient, so one number stands for all of it.
    stand_in = grad.new_empty(1).expand(shape)
    gradient, _, _ = torch.ops.aten.convolution_backward(
        grad, stand_in, weight, None, **geometry(module), output_mask=(True, False, False)
    )
    return gradient  # type: ignore[no-any-return]


def _is_small(shape: torch.Size, weight: Tensor, module: Any, device: torch.device) -> bool:
    is_plain = weight.ndim == 4 and module.groups == 1 and not module.transposed
    return device.type == "cpu" and is_plain and shape[0] * shape[2] * shape[3] <= SMALL_PICTURE


def _patches(weight: Tensor, module: Any) -> dict[str, Any]:
    return {
        "kernel_size": weight.shape[2:],
        "stride": module.stride,
        "padding": module.padding,
        "dilation": module.dilation,
    }


def _output_size(shape: torch.Size, weight: Tensor, module: Any) -> list[int]:
    axes = zip(shape[2:], weight.shape[2:], module.stride, module.padding, module.dilation, strict=True)
    return [(size + 2 * pad - step * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, pad, step in axes]
