"""AdamW as torch's own, its state in RAM or in fewer bits, and what a step may not cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram_lora.config import OptimConfig
from lowvram_lora.memory.setting import Setting
from lowvram_lora.training import moments
from lowvram_lora.training.lowbit import RoundedAdamW, round_stochastically_
from lowvram_lora.training.optim import Optimizer, build_optimizer, build_schedule, place_state

CONFIG = OptimConfig(learning_rate=0.01, weight_decay=0.1, schedule="cosine")
SHAPES = ((3, 5), (7,), (4, 4, 3), (1, 1), (129, 3))
IN_RAM, LOW = Setting(optimizer_in_ram=True), Setting(optimizer_dtype=torch.bfloat16)


class Copies:
    """``Transfers`` that spoil what they were given, and take back once what they gave.

    Attributes:
        in_ram: bytes that wait there.
        visiting: the most bytes that were on their way through the device at one time.
    """

    def __init__(self) -> None:
        self.in_ram = self.visiting = 0
        self._on_device = 0

    def to_ram(self, tensor: Tensor) -> Any:
        kept = tensor.clone()
        tensor.fill_(torch.nan)
        self.in_ram += kept.nbytes
        self._on_device -= kept.nbytes
        return [kept]

    def from_ram(self, kept: Any, room: Tensor | None = None) -> Tensor:
        tensor: Tensor = kept.pop()
        self.in_ram -= tensor.nbytes
        self._on_device += tensor.nbytes
        self.visiting = max(self.visiting, self._on_device)
        return tensor if room is None else room.copy_(tensor)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "CHUNK_ELEMENTS", 60)


def fresh(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def fill_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """The second parameter gets its first gradient in the third step, the fourth none."""
    generator = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(parameters):
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.grad = None if number == 3 or (number == 1 and step < 2) else drawn


def trajectory(
    parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, before: Callable[[int], None] = lambda step: None
) -> list[Tensor]:
    schedule = build_schedule(optimizer, CONFIG, 6)
    seen = []
    for step in range(6):
        before(step)
        fill_gradients(parameters, step)
        optimizer.step()
        schedule.step()
        seen += [p.detach().clone() for p in parameters]
    return seen


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def torchs_own(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    parameters = fresh(dtype)
    return trajectory(parameters, torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("setting", [Setting(), IN_RAM], ids=["device", "ram"])
def test_every_step_is_bit_for_bit_that_of_torchs_adamw(setting: Setting, dtype: torch.dtype) -> None:
    parameters = fresh(dtype)
    transfers: Any = Copies()
    assert_equal(
        trajectory(parameters, build_optimizer(parameters, CONFIG, setting, transfers=transfers)), torchs_own(dtype)
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor) and t.ndim]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(("setting", "width"), [(Setting(), 4), (LOW, 2)], ids=["float32", "bfloat16"])
def test_all_state_is_there_before_the_first_step_and_has_two_numbers_a_parameter(setting: Setting, width: int) -> None:
    parameters = fresh()
    optimizer = build_optimizer(parameters, CONFIG, setting)
    num_bytes = 2 * width * sum(p.numel() for p in parameters)
    tensors = {name: entry[name] for entry in optimizer.state.values() for name in entry if name != "step"}
    assert state_bytes(optimizer) == num_bytes
    fill_gradients(parameters, 5)
    optimizer.step()
    assert state_bytes(optimizer) == num_bytes
    assert all(optimizer.state[parameters[-1]][name] is tensor for name, tensor in tensors.items())


@pytest.mark.parametrize(("setting", "width"), [(Setting(), 4), (LOW, 2)], ids=["float32", "bfloat16"])
def test_a_state_that_waits_in_ram_is_on_the_device_in_parts_and_only_during_a_step(
    setting: Setting, width: int
) -> None:
    parameters = fresh()
    transfers: Any = Copies()
    optimizer = build_optimizer(parameters, CONFIG, setting)
    num_bytes = state_bytes(optimizer)
    place_state(optimizer, IN_RAM, transfers)
    transfers._on_device = 0
    for step in range(2):
        assert (state_bytes(optimizer), transfers.in_ram) == (0, num_bytes)
        fill_gradients(parameters, step)
        optimizer.step()
    # The last parameter has more elements than a chunk, and no other comes with it.
    assert transfers.visiting == 2 * width * parameters[-1].numel() < num_bytes
    optimizer.moments.keep_on_device()
    assert (state_bytes(optimizer), transfers.in_ram) == (num_bytes, 0)


@pytest.mark.parametrize("setting", [Setting(), LOW], ids=["float32", "bfloat16"])
def test_moving_the_state_between_steps_changes_no_number(setting: Setting) -> None:
    expected = trajectory(parameters := fresh(), build_optimizer(parameters, CONFIG, setting))
    optimizer = build_optimizer(parameters := fresh(), CONFIG, setting)
    first: Any = Copies()
    second: Any = Copies()
    places = {1: (IN_RAM, first), 2: (IN_RAM, second), 4: (Setting(), None), 5: (IN_RAM, first)}

    def move(step: int) -> None:
        if step in places:
            place_state(optimizer, *places[step])

    assert_equal(trajectory(parameters, optimizer, move), expected)
    assert second.in_ram == 0


@pytest.mark.parametrize(("setting", "at"), [(Setting(), 1), (LOW, 1), (LOW, 2)])
def test_a_step_that_finds_no_room_can_be_repeated(setting: Setting, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it asks the device for, it asks before it changes a number."""
    expected = trajectory(parameters := fresh(), build_optimizer(parameters, CONFIG, setting))
    optimizer = build_optimizer(parameters := fresh(), CONFIG, setting)
    place_state(optimizer, IN_RAM, Copies())  # type: ignore[arg-type]
    empty, left = torch.empty, [0]

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("no room")
        return empty(*args, **kwargs)

    def fail(step: int) -> None:
        fill_gradients(parameters, step)
        left[0] = at
        before = [p.detach().clone() for p in parameters]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", refuse)
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.step()
        assert_equal([p.detach() for p in parameters], before)
        assert state_bytes(optimizer) == 0

    assert_equal(trajectory(parameters, optimizer, fail), expected)


class Full(Copies):
    """Has no room on the device for the ``at``-th tensor that comes back to stay."""

    at = 0

    def from_ram(self, kept: Any, room: Tensor | None = None) -> Tensor:
        self.at -= room is None
        if self.at == 0:
            self.at = -1
            raise torch.OutOfMemoryError("no room")
        return super().from_ram(kept, room)


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("setting", [Setting(), LOW], ids=["float32", "bfloat16"])
def test_a_state_that_finds_no_room_to_stay_on_the_device_stays_in_ram(setting: Setting, at: int) -> None:
    expected = trajectory(parameters := fresh(), build_optimizer(parameters, CONFIG, setting))
    optimizer = build_optimizer(parameters := fresh(), CONFIG, setting)
    transfers: Any = Full()
    place_state(optimizer, IN_RAM, transfers)

    def fail(step: int) -> None:
        transfers.at = at
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.moments.keep_on_device()
        assert state_bytes(optimizer) == 0

    assert_equal(trajectory(parameters, optimizer, fail), expected)


def test_an_error_in_an_update_leaves_the_state_in_ram_and_the_optimizer_whole() -> None:
    transfers: Any = Copies()
    optimizer = build_optimizer(parameters := fresh(), CONFIG, IN_RAM, transfers=transfers)
    in_ram = transfers.in_ram

    def stop(chunk: moments.Chunk) -> None:
        assert state_bytes(optimizer) > 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.moments.each(stop)
    assert (transfers.in_ram, state_bytes(optimizer)) == (in_ram, 0)
    assert_equal(trajectory(parameters, optimizer), torchs_own())
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in parameters]


@pytest.mark.parametrize("setting", [Setting(), LOW], ids=["float32", "bfloat16"])
def test_a_step_runs_without_data(setting: Setting) -> None:
    class Shapes(Copies):
        def to_ram(self, tensor: Tensor) -> Any:
            return tensor.shape, tensor.dtype

        def from_ram(self, kept: Any, room: Tensor | None = None) -> Tensor:
            return torch.empty(kept[0], dtype=kept[1], device="meta") if room is None else room

    transfers: Any = Shapes()
    for dtype in {torch.float32, setting.optimizer_dtype}:
        parameters = fresh(dtype, "meta")
        optimizer = build_optimizer(parameters, CONFIG, setting)
        place_state(optimizer, IN_RAM, transfers)
        trajectory(parameters, optimizer)
        assert all("exp_avg" not in state for state in optimizer.state.values())


def test_rounding_by_chance_is_right_on_average_and_never_further_than_the_next_number() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.randn(200, generator=generator), torch.tensor([0.0, 1.0, -1.5, 1e-30, -3e30])])
    draws = 4000
    drawn = values.repeat(draws, 1)
    rounded = round_stochastically_(drawn.clone(), torch.empty(drawn.shape, dtype=torch.int32), generator)
    assert torch.equal(rounded.bfloat16().float(), rounded)
    step = values.abs() * 2.0**-7
    assert bool(((rounded - values).abs() <= step).all())
    exact = values.bfloat16().float() == values
    assert torch.equal(rounded[:, exact], drawn[:, exact])
    # Five standard deviations of a mean whose single draws differ by at most one step.
    assert bool(((rounded.double().mean(0) - values).abs() <= 5 * step / 2 / draws**0.5 + 1e-12 * step).all())


def regression(optimizer_of: Callable[[list[nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype) -> float:
    """Train a linear map for 600 small steps; return its loss in float32."""
    generator = torch.Generator().manual_seed(3)
    inputs, target = torch.randn(256, 8, generator=generator), torch.randn(8, 4, generator=generator)
    weight = nn.Parameter((target + 0.3 * torch.randn(8, 4, generator=generator)).to(dtype))
    optimizer = optimizer_of([weight])
    for _ in range(600):
        optimizer.zero_grad()
        loss = (inputs @ weight.float() - inputs @ target).square().mean()
        loss.backward()
        optimizer.step()
    return float((inputs @ weight.detach().float() - inputs @ target).square().mean())


def test_bfloat16_with_rounding_by_chance_trains_where_rounding_to_the_nearest_stalls() -> None:
    rate = 1e-3
    exact = regression(lambda p: torch.optim.AdamW(p, lr=rate, weight_decay=0.0), torch.float32)
    nearest = regression(lambda p: torch.optim.AdamW(p, lr=rate, weight_decay=0.0), torch.bfloat16)
    low_state = regression(lambda p: RoundedAdamW(p, lr=rate, weight_decay=0.0), torch.float32)
    low_both = regression(lambda p: RoundedAdamW(p, lr=rate, weight_decay=0.0), torch.bfloat16)
    assert nearest > 4 * exact
    assert low_state == pytest.approx(exact, rel=0.05) and low_both == pytest.approx(exact, rel=0.05)


def test_with_moments_in_float32_it_is_adamw() -> None:
    parameters = fresh()
    optimizer = RoundedAdamW(parameters, lr=0.01, weight_decay=0.1, dtype=torch.float32)
    for ours, theirs in zip(trajectory(parameters, optimizer), torchs_own(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_seed_decides_the_rounding_and_the_global_generator_is_left_alone() -> None:
    def run(seed: int) -> list[Tensor]:
        parameters = fresh(torch.bfloat16)
        return trajectory(parameters, build_optimizer(parameters, CONFIG, LOW, seed=seed))

    before = torch.random.get_rng_state()
    first, second, third = run(1), run(1), run(2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert_equal(first, second)
    assert not all(torch.equal(a, b) for a, b in zip(first, third, strict=True))


def test_a_low_bit_step_without_room_to_work_in_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = build_optimizer(parameters := fresh(torch.bfloat16), CONFIG, LOW, seed=4)

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    def fail(step: int) -> None:
        fill_gradients(parameters, step)
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(torch, "empty", refuse)
            optimizer.step()

    expected = trajectory(plain := fresh(torch.bfloat16), build_optimizer(plain, CONFIG, LOW, seed=4))
    assert_equal(trajectory(parameters, optimizer, fail), expected)


@pytest.mark.parametrize("setting", [Setting(), LOW, IN_RAM], ids=["float32", "bfloat16", "ram"])
def test_a_gradient_scaler_skips_an_overflow_and_takes_the_next_step(setting: Setting) -> None:
    dtype = setting.optimizer_dtype
    optimizer: Optimizer = build_optimizer(
        parameters := fresh(dtype),
        CONFIG,
        setting,
        transfers=Copies(),  # type: ignore[arg-type]
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    build_schedule(optimizer, CONFIG, 3)
    before = [p.detach().clone() for p in parameters]
    for gradient in (torch.inf, 1.0):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, gradient)
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        changed = [not torch.equal(a, b) for a, b in zip(before, parameters, strict=True)]
        assert all(changed) if gradient == 1.0 else not any(changed)
