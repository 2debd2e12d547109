"""Whether a block writes in place, seen while it runs."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from .frozen import BlockMemory

# Methods that end like in-place ones and write nothing.
_HARMLESS = ("requires_grad_", "detach_")


class InPlaceWatch(TorchFunctionMode):
    """Notices a call that writes into a tensor: ``x += y``, ``x.mul_(y)``, ``x[0] = y``."""

    def __init__(self, memory: BlockMemory) -> None:
        super().__init__()
        self.seen = False
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        is_method = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
        kwargs = kwargs or {}
        is_asked_to = kwargs.get("inplace") is True
        if (is_method or is_asked_to or name == "__setitem__") and not self._memory.is_fetching:
            self.seen = True
        return func(*args, **kwargs)

    def __enter__(self) -> InPlaceWatch:
        self._memory.is_watched = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._memory.is_watched = False
