"""One caption's conditioning, as tensors and plain data that fit in a safetensors file."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Encoding:
    """A text encoder's output in the host's own layout.

    Attributes:
        tensors: by name; CPU.
        structure: JSON text that says where each tensor and each plain value goes.
    """

    tensors: dict[str, Tensor]
    structure: str
