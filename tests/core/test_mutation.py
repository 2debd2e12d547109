"""Writes in place over what autograd saved: gradients, memory, and what is left behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lowvram_lora.memory.mutation import MutationGuard


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def views(x: Tensor, y: Tensor) -> Tensor:
    """The same numbers are saved as they are, flat, as a slice and transposed; then written over, twice."""
    a = x * 1.0
    total = (a * y).sum() + (a.view(-1) * y.reshape(-1).sin()).sum() + (a[:, 1:3] ** 2).sum() + (a.t() @ y).sum()
    a[:, :2] *= 0.5
    total = total + (a**3).sum()
    a.add_(y)
    return total + (a * a).sum()


def results(x: Tensor, y: Tensor) -> Tensor:
    """Operations that save what they return, some of them in place."""
    a = x.exp()
    b = a.tanh()
    a += y
    b.sigmoid_()
    c = b.clone()
    b.mul_(c * y)
    return (a * b).sum() + c.sum()


def lists_and_out(x: Tensor, y: Tensor) -> Tensor:
    """Writes into the tensors of a list, and through ``out``."""
    a, b = x * 2.0, y * 3.0
    total = (a * b).sum() + (a**2).sum() + (b**2).sum()
    with torch.no_grad():
        torch._foreach_mul_([a, b], 2.0)
        torch.sub(x, y, out=a)
    return total


def aliases(x: Tensor, y: Tensor) -> Tensor:
    """A tensor that is changed by a part of itself, which is saved for it; and one with gaps."""
    a = x * y
    a[0] *= a[1]
    strided = a[::2, ::2]
    total = (strided**2).sum()
    strided.neg_()
    return total + a.pow(3).sum()


@pytest.mark.parametrize("function", [views, results, lists_and_out, aliases], ids=lambda f: f.__name__)
def test_gradients_are_those_found_by_differences(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    def guarded(x: Tensor, y: Tensor) -> Tensor:
        # The backward pass runs after the guard is down.
        with MutationGuard().guarding():
            return function(x, y)

    assert torch.autograd.gradcheck(guarded, (drawn(0, 4, 4), drawn(1, 4, 4)))


def test_gradients_are_those_of_torchs_own_guard() -> None:
    x, y, u, v = drawn(0, 4, 4), drawn(1, 4, 4), drawn(0, 4, 4), drawn(1, 4, 4)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        results(u, v).backward()
    with MutationGuard().guarding():
        results(x, y).backward()
    assert torch.equal(x.grad, u.grad)
    assert torch.equal(y.grad, v.grad)


def test_without_a_guard_autograd_refuses_the_same_writes() -> None:
    with pytest.raises(RuntimeError, match="inplace operation"):
        views(drawn(0, 4, 4), drawn(1, 4, 4)).backward()


def test_a_guard_inside_a_guard_protects_to_the_end_of_the_outer_one() -> None:
    guard, x = MutationGuard(), drawn(0, 3)
    with guard.guarding():
        a = x * 1.0
        with guard.guarding():
            total = (a**2).sum()
        a.zero_()
        total = total + (a * x).sum()
    total.backward()
    assert torch.equal(x.grad, 2 * x.detach())


@pytest.mark.parametrize("runs_backward", [True, False])
def test_nothing_saved_outlives_its_graph(runs_backward: bool) -> None:
    guard, x = MutationGuard(), drawn(0, 3)
    gc.disable()
    try:
        with guard.guarding():
            a = x.exp()
            output, saved = weakref.ref(a), StorageWeakRef(a.untyped_storage())
            b = a.sin()
            a.zero_()
            loss = (a + b).sum()
        del a, b
        if runs_backward:
            loss.backward()
        del loss
        assert output() is None
        assert saved.expired()
    finally:
        gc.enable()


class Copies(TorchDispatchMode):
    """Counts the numbers in tensors that are cloned."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.clone:
            self.numbers += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_each_number_is_copied_once_until_it_is_saved_again() -> None:
    x = drawn(0, 4, 4)
    with Copies() as copies, MutationGuard().guarding():
        a = x * 1.0
        total = (a**2).sum() + (a.view(-1) ** 2).sum() + (a.t() ** 2).sum()
        a.add_(1.0)
        a.add_(1.0)
        assert copies.numbers == 16
        total = total + (a**2).sum()
        a.add_(1.0)
    assert copies.numbers == 32


def test_what_is_saved_of_a_copy_is_found_in_the_original() -> None:
    x = drawn(0, 4, 4)
    copy = x.clone()
    with Copies() as copies, MutationGuard().guarding([(copy, x)]):
        total = (copy**2).sum() + (copy[:, 1:] ** 3).sum()
        copy.zero_()
    total.backward()
    assert copies.numbers == 0
    expected = 2 * x.detach()
    expected[:, 1:] += 3 * x.detach()[:, 1:] ** 2
    torch.testing.assert_close(x.grad, expected)
