"""What a step reads, and that batches of several shapes are one weighted batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram_lora import fakes
from lowvram_lora.config import OptimConfig, SamplerConfig
from lowvram_lora.data import store
from lowvram_lora.data.batches import BatchRecipe
from lowvram_lora.data.cache import LATENTS, STRUCTURE, CacheEntry, CacheIndex, EncodedScale
from lowvram_lora.data.draw import EMPTY_CAPTION, Batch, Draw
from lowvram_lora.data.groups import heaviest
from lowvram_lora.data.tiers import TieredCache
from lowvram_lora.memory.meter import Meter
from lowvram_lora.ports import Encoding
from lowvram_lora.training import objective
from lowvram_lora.training.optim import build_optimizer, build_schedule
from lowvram_lora.training.step import Batches, Stepper

SHAPES = {1.0: (4, 8, 16), 0.5: (4, 4, 8)}
SEED = 7


class Network(nn.Module):
    """A network that plain autograd can go through, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Conv2d(4, 4, 3, padding=1)
        self.text = nn.Linear(16, 4)
        self.double()

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        shift = self.text(context.double().squeeze(1))
        return torch.tanh(self.picture(x.double()) + shift[:, :, None, None])


class Double(fakes.FakeDenoiser):
    """The fake with that network."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.network = Network()


@dataclass(frozen=True, kw_only=True)
class Given(Batches):
    """The samples of a cache in batches that a test names."""

    batches: tuple[Batch, ...]
    log: list[str] = field(default_factory=list)

    def window(self, step: int, accumulation: int) -> list[Batch]:
        return list(self.batches)

    def latents(self, draw: Draw) -> Tensor:
        self.log.append(f"latents {draw.entry}")
        return super().latents(draw)

    def conditioning(self, draw: Draw) -> Encoding:
        self.log.append(f"text {draw.entry} {draw.caption}")
        return super().conditioning(draw)


def write_latents(root: Path, kind: store.Kind, key: str, tensor: Tensor) -> None:
    store.write(store.path_of(root, kind, key), {LATENTS: tensor}, {})


@pytest.fixture
def index(tmp_path: Path) -> CacheIndex:
    """Four samples at two scales; each has two variants of its picture and of its caption."""
    generator = torch.Generator().manual_seed(2)
    for key in ("text empty", *(f"text {i} {v}" for i in range(4) for v in range(2))):
        encoding = fakes.FakeTextEncoder().encode(key)
        store.write(store.path_of(tmp_path, "text", key), encoding.tensors, {STRUCTURE: encoding.structure})
    entries = []
    for number in range(4):
        scales = []
        for scale, shape in SHAPES.items():
            keys = tuple(f"image {number} {scale} {variant}" for variant in range(2))
            for key in keys:
                write_latents(tmp_path, "latents", key, torch.randn(shape, generator=generator))
            scales.append(EncodedScale(scale, shape, keys))
        texts = tuple(f"text {number} {variant}" for variant in range(2))
        entries.append(CacheEntry(f"{number}.png", tuple(scales), texts, 1))
    return CacheIndex(tmp_path, tuple(entries), 0, "text empty")


def stepper(index: CacheIndex, batches: tuple[Batch, ...], denoiser: Any, micro_batch: int = 0) -> Stepper:
    recipe = BatchRecipe(index, SamplerConfig())
    config = OptimConfig(accumulation=len(batches))
    parameters = list(denoiser.network.parameters())
    optimizer = build_optimizer(parameters, config)
    return Stepper(
        denoiser=denoiser,
        batches=Given(recipe=recipe, cache=TieredCache(index), seed=SEED, batches=batches),
        parameters=parameters,
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config, 1),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        config=config,
        cancel=fakes.FakeCancel(),
        watch=Meter(fakes.FakeHardware()),
        begin=lambda: None,
        micro_batch=micro_batch,
    )


def gradients(
    index: CacheIndex, batches: tuple[Batch, ...], step: int = 3, micro_batch: int = 0
) -> tuple[float, list[Tensor]]:
    made = stepper(index, batches, Double(), micro_batch)
    loss, _ = made.gradients(step)
    return loss, [parameter.grad.clone() for parameter in made.parameters if parameter.grad is not None]


MIXED = (Draw(0), Draw(1, scale=0.5), Draw(2, scale=0.5, image=1), Draw(3, caption=1), Draw(0, caption=EMPTY_CAPTION))


# Of unequal sizes, as memory makes them; each of several shapes.
UNEQUAL = (MIXED, (Draw(1), Draw(2, scale=0.5)), (Draw(3, scale=0.5), Draw(0, scale=0.5), Draw(2)))


@pytest.mark.parametrize("batches", [(MIXED,), UNEQUAL])
@pytest.mark.parametrize("micro_batch", [0, 1, 2])
def test_a_step_of_several_shapes_has_the_gradient_of_one_weighted_batch(
    index: CacheIndex, micro_batch: int, batches: tuple[Batch, ...]
) -> None:
    loss, found = gradients(index, batches, micro_batch=micro_batch)
    denoiser, tiers, step = Double(), TieredCache(index), 3
    losses = []
    for position, place, draw in (
        (n, place, draw) for n, batch in enumerate(batches) for place, draw in enumerate(batch)
    ):
        generator = objective.generator_for(SEED, step, position)
        sigmas = objective.draw_sigmas(denoiser.sigmas, len(batches[position]), generator)
        latents = denoiser.scale_latents(tiers.latents(draw)).unsqueeze(0)
        noise = torch.randn(latents.shape, generator=objective.generator_for(SEED, step, position, place))
        sigma = sigmas[place : place + 1]
        ((_, conditioning),) = denoiser.condition([tiers.conditioning(draw)], noise)
        x0 = denoiser.predict_x0(denoiser.add_noise(latents, noise, sigma), sigma, conditioning)
        losses.append(((x0 - latents.double()) ** 2).mean() * denoiser.loss_weight(sigma).double())
    total = torch.stack(losses).mean()
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-12)
    expected = [parameter.grad for parameter in denoiser.network.parameters()]
    for one, other in zip(found, expected, strict=True):
        assert other.norm() > 0 and (one - other).norm() <= 1e-12 * other.norm()


def test_how_a_batch_falls_into_parts_changes_no_gradient(index: CacheIndex) -> None:
    whole, *others = (gradients(index, (MIXED,), micro_batch=size)[1] for size in (0, 1, 2))
    for found in others:
        for one, other in zip(found, whole, strict=True):
            assert (one - other).norm() <= 1e-12 * other.norm()


def test_noise_depends_on_seed_step_and_place_and_not_on_the_other_shapes(index: CacheIndex) -> None:
    seen: list[Tensor] = []

    class Noted(Double):
        def add_noise(self, latents: Tensor, noise: Tensor, sigma_B: Tensor) -> Tensor:
            seen.extend(zip(noise, sigma_B, strict=True))
            return super().add_noise(latents, noise, sigma_B)

    def last(first: Draw, step: int) -> tuple[Tensor, Tensor]:
        seen.clear()
        stepper(index, ((first, Draw(1, scale=0.5), Draw(2)),), Noted()).gradients(step)
        return next(pair for pair in seen[::-1] if pair[0].shape == SHAPES[1.0])

    (noise, sigma), (same, same_sigma), (later, _) = last(Draw(0), 5), last(Draw(0, scale=0.5), 5), last(Draw(0), 6)
    assert torch.equal(noise, same) and torch.equal(sigma, same_sigma)
    assert not torch.equal(noise, later)


def test_noise_of_one_shape_is_drawn_at_once(index: CacheIndex) -> None:
    """Runs of jobs with one size and one variant stay what they were."""
    seen: list[Tensor] = []

    class Noted(Double):
        def add_noise(self, latents: Tensor, noise: Tensor, sigma_B: Tensor) -> Tensor:
            seen.append(noise)
            return super().add_noise(latents, noise, sigma_B)

    stepper(index, ((Draw(0), Draw(1), Draw(2)),), Noted()).gradients(4)
    generator = objective.generator_for(SEED, 4, 0)
    objective.draw_sigmas(Double().sigmas, 3, generator)
    assert torch.equal(seen[0], torch.randn(3, *SHAPES[1.0], generator=generator))


def test_no_batch_is_read_before_the_one_ahead_of_it_is_done(index: CacheIndex) -> None:
    class Noted(Double):
        def predict_x0(self, noised: Tensor, sigma_B: Tensor, conditioning: dict[str, Any]) -> Tensor:
            made.batches.log.append("network")
            return super().predict_x0(noised, sigma_B, conditioning)

    made = stepper(index, ((Draw(0), Draw(1, scale=0.5)), (Draw(2),)), Noted())
    made.gradients(0)
    reads = [line.rsplit(" ", 1)[0] if line.startswith("text") else line for line in made.batches.log]
    assert reads == [
        f"{what}{number}" if what != "network" else what
        for number in range(3)
        for what in ("latents ", "text ", "network")
    ]


def test_a_mask_weighs_the_places_of_its_own_sample(index: CacheIndex) -> None:
    mask = torch.zeros(1, 8, 16)
    mask[:, :, :4] = 1.0
    write_latents(index.root, "mask", "mask 0", mask)
    first = index.entries[0]
    masked_scale = replace(first.scales[0], mask_keys=("mask 0", "mask 0"))
    masked = replace(index, entries=(replace(first, scales=(masked_scale,)), *index.entries[1:]))
    seen: list[Tensor] = []

    class Noted(Double):
        def predict_x0(self, noised: Tensor, sigma_B: Tensor, conditioning: dict[str, Any]) -> Tensor:
            seen.append(super().predict_x0(noised, sigma_B, conditioning))
            return seen[-1]

    made = stepper(masked, ((Draw(0), Draw(1)),), Noted())
    loss, _ = made.gradients(0)
    (x0,) = seen
    sigmas = objective.draw_sigmas(made.denoiser.sigmas, 2, objective.generator_for(SEED, 0, 0))
    tiers = TieredCache(masked)
    latents = [made.denoiser.scale_latents(tiers.latents(Draw(number))) for number in range(2)]
    inside = (x0[0] - latents[0])[:, :, :4].square().mean() / sigmas[0] ** 2
    plain = (x0[1] - latents[1]).square().mean() / sigmas[1] ** 2
    assert loss == pytest.approx((inside + plain).item() / 2, rel=1e-6)


@pytest.mark.parametrize("value", [1.0, 0.25])
def test_a_mask_of_one_value_changes_nothing(value: float) -> None:
    x0, latents = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)
    weight = torch.tensor([0.5, 3.0])
    plain = objective.loss_per_sample(x0, latents, weight)
    torch.testing.assert_close(objective.loss_per_sample(x0, latents, weight, torch.full((2, 1, 8, 8), value)), plain)


def test_a_sample_whose_mask_is_nothing_has_no_loss() -> None:
    x0 = torch.randn(1, 4, 8, 8, requires_grad=True)
    loss = objective.loss_per_sample(x0, torch.randn(1, 4, 8, 8), torch.ones(1), torch.zeros(1, 1, 8, 8))
    loss.sum().backward()
    assert loss.item() == 0.0
    assert x0.grad is not None and not x0.grad.any()


def test_about_half_the_reads_are_of_the_empty_caption_at_a_dropout_of_half(index: CacheIndex) -> None:
    """b03"""
    recipe = BatchRecipe(replace(index, caption_dropout=0.5), SamplerConfig(batch_size=4, seed=3))
    samples = Batches(recipe=recipe, cache=TieredCache(index), seed=0)
    draws = [draw for step in range(100) for (batch,) in [samples.window(step, 1)] for draw in batch]
    empty = [draw for draw in draws if draw.caption == EMPTY_CAPTION]
    assert 0.4 < len(empty) / len(draws) < 0.6
    expected = TieredCache(index).conditioning(Draw(0, caption=EMPTY_CAPTION)).tensors
    assert all(torch.equal(samples.conditioning(draw).tensors["t0"], expected["t0"]) for draw in empty[:3])
    again = Batches(recipe=BatchRecipe(recipe.cache, recipe.config), cache=TieredCache(index), seed=0)
    assert again.window(57, 1) == samples.window(57, 1)


def test_variants_are_drawn_from_seed_and_place_and_all_of_them_come(index: CacheIndex) -> None:
    recipe = BatchRecipe(index, SamplerConfig(batch_size=4, seed=3))
    draws = [draw for k in range(30) for draw in recipe.batch(k)]
    assert {(draw.image, draw.caption) for draw in draws} == {(i, c) for i in range(2) for c in range(2)}
    dropping = BatchRecipe(replace(index, caption_dropout=0.3), recipe.config)
    assert [draw.image for k in range(30) for draw in dropping.batch(k)] == [draw.image for draw in draws]
    other = BatchRecipe(index, replace(recipe.config, seed=4))
    assert [draw.image for k in range(30) for draw in other.batch(k)] != [draw.image for draw in draws]


def test_caption_dropout_is_part_of_what_a_run_is_known_by(index: CacheIndex) -> None:
    prints = {replace(index, caption_dropout=share).fingerprint for share in (0.0, 0.1, 0.2)}
    assert len(prints) == 3


def test_of_a_batch_of_several_shapes_the_heaviest_that_goes_together_is_planned_for(index: CacheIndex) -> None:
    many = tuple(Draw(number % 4, scale=0.5) for number in range(5))
    batches = ((Draw(0), *many), (Draw(1), Draw(2, scale=0.5)), (Draw(3), Draw(1)))
    # Five at half the sides have 5 / 4 of the latents of one at full size, and two of these have more.
    assert heaviest(index, batches[:2]) == many
    assert heaviest(index, batches) == batches[2]
