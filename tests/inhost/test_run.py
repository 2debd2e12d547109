"""Whole runs on a tiny model: what comes out, what is left behind, what a cancel and an error leave."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
import tiny
import torch
from safetensors.torch import load_file

from lowvram_lora.adapters.attach import Adapters
from lowvram_lora.adapters.targets import select
from lowvram_lora.data.draw import Draw
from lowvram_lora.data.tiers import TieredCache
from lowvram_lora.errors import DivergedError, PreflightError, UnsupportedModelError
from lowvram_lora.events import Finished, Saved, Stepped
from lowvram_lora.fakes import FakeCancel
from lowvram_lora.memory.recompute import find_blocks
from lowvram_lora.memory.setting import Setting
from lowvram_lora.training import run as run_module
from lowvram_lora.training.attached import Engine, attached
from lowvram_lora.training.job import Job
from lowvram_lora.training.objective import loss_per_sample
from lowvram_lora.training.run import run


@pytest.fixture(autouse=True)
def host_mode() -> Iterator[None]:
    """The mode LoRA Train runs its loop in: out of the inference mode that models are loaded in."""
    with torch.inference_mode(), torch.inference_mode(False), torch.no_grad():
        yield


@pytest.fixture
def model() -> Any:
    return tiny.sd15()


@pytest.fixture
def denoiser(pack: Any, model: Any) -> Any:
    return pack.nodes._models.HostDenoiser(model)


def finish(job: Job) -> Finished:
    *_, last = run(job)
    assert isinstance(last, Finished)
    return last


def noised(job: Job, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[Any], torch.Tensor]:
    """Return what the network is asked in training for these cache entries: latents, sigma, captions, noise."""
    tiers, draws = TieredCache(job.recipe.cache), [Draw(row) for row in rows]
    latents = job.denoiser.scale_latents(torch.stack([tiers.latents(draw) for draw in draws]))
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(4))
    sigma = torch.linspace(0.5, 3.0, len(rows))
    return job.denoiser.add_noise(latents, noise, sigma), sigma, [tiers.conditioning(draw) for draw in draws], noise


def predict(job: Job, rows: list[int]) -> torch.Tensor:
    """Return the host's x0 prediction for these entries, as training asks for it."""
    x, sigma, captions, noise = noised(job, rows)
    ((_, conditioning),) = job.denoiser.condition(captions, noise)
    return job.denoiser.predict_x0(x, sigma, conditioning)


def host_state(model: Any) -> dict[str, Any]:
    """Return everything a run may not change, by name: objects by id, numbers by value."""
    base = model.model
    state: dict[str, Any] = {"dtype": base.manual_cast_dtype, "patcher": base.current_patcher}
    for path, module in base.named_modules():
        attributes = {k: id(v) for k, v in module.__dict__.items() if not k.startswith("_")}
        state[path] = (id(module), attributes, sorted(module._modules), module.training)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                state[f"{path}.{name}"] = (id(parameter), parameter.requires_grad, parameter.tolist())
    return state


def keeping_all(denoiser: Any) -> Engine:
    """Return the engine that recomputes no block."""
    return Engine(setting=Setting(kept=frozenset(find_blocks(denoiser.network))))


def test_the_file_holds_the_targets_and_gives_what_was_trained(
    denoiser: Any, model: Any, pack: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    job = jobs.job(tmp_path, denoiser)
    trained: dict[str, Adapters] = {}
    build = run_module.build
    monkeypatch.setattr(run_module, "build", lambda *args, **more: trained.setdefault("adapters", build(*args, **more)))
    finished = finish(job)

    file = load_file(finished.path)
    layers = select(denoiser.network, "attention + feed-forward")
    names = {key.split(".")[0] for key in file}
    assert names == {denoiser.file_name(path) for path in layers}
    for name in names:
        delta = file[f"{name}.lora_up.weight"] @ file[f"{name}.lora_down.weight"]
        assert delta.isfinite().all() and delta.abs().max() > 0
        assert file[f"{name}.alpha"] == 7.0

    with attached(denoiser, layers, trained["adapters"], torch.float32, keeping_all(denoiser)):
        in_memory = predict(job, [0, 1, 2])
    caplog.clear()
    with torch.inference_mode():
        patched = pack.nodes._models.with_lora(model, file)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(patched.patches) == len(layers)
    from_file = pack.nodes._models.HostDenoiser(patched)
    with from_file.training(torch.float32):
        loaded = predict(replace(job, denoiser=from_file), [0, 1, 2])
    with denoiser.training(torch.float32):
        base = predict(job, [0, 1, 2])
    assert (loaded - base).norm() > 1e-3 * base.norm()
    torch.testing.assert_close(loaded, in_memory, rtol=1e-4, atol=1e-4 * float(base.abs().max()))


def test_a_fresh_lora_changes_nothing(denoiser: Any, tmp_path: Path) -> None:
    job = jobs.job(tmp_path, denoiser)
    layers = select(denoiser.network, "all linear + conv")
    adapters = run_module.build(layers, job.config.lora, 0, tiny.CPU)
    with attached(denoiser, layers, adapters, torch.float32, keeping_all(denoiser)):
        fresh = predict(job, [0, 1])
    for layer in adapters.layers.values():
        layer.lora_A["default"].weight.data.zero_()
    with attached(denoiser, layers, adapters, torch.float32, keeping_all(denoiser)):
        base = predict(job, [0, 1])
    assert torch.equal(fresh, base)


def test_captions_stay_with_their_samples(denoiser: Any, tmp_path: Path) -> None:
    job = jobs.job(tmp_path, denoiser)
    x, sigma, captions, noise = noised(job, [0, 1])
    ((rows, together),) = denoiser.condition(captions, noise)
    assert rows == [0, 1]
    with denoiser.training(torch.float32):
        both = denoiser.predict_x0(x, sigma, together)
        for i in range(2):
            ((_, alone),) = denoiser.condition(captions[i : i + 1], noise[i : i + 1])
            single = denoiser.predict_x0(x[i : i + 1], sigma[i : i + 1], alone)
            torch.testing.assert_close(both[i : i + 1], single, rtol=1e-5, atol=1e-5)
        ((_, swapped),) = denoiser.condition(captions[::-1], noise)
        assert (denoiser.predict_x0(x, sigma, swapped) - both).abs().max() > 1e-3


def test_latents_reach_the_network_scaled(denoiser: Any, tmp_path: Path, monkeypatch: Any) -> None:
    job = jobs.job(tmp_path, denoiser)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(
        type(denoiser), "add_noise", lambda self, latents, noise, sigma: seen.append(latents) or latents
    )
    next(event for event in run(job) if isinstance(event, Stepped))
    raw = TieredCache(job.recipe.cache).latents(job.recipe.batch(0)[0])
    torch.testing.assert_close(seen[0][0], raw * 0.18215)


def test_the_loss_is_the_usual_epsilon_loss(denoiser: Any, tmp_path: Path) -> None:
    job = jobs.job(tmp_path, denoiser)
    x, sigma, captions, noise = noised(job, [0, 1])
    ((_, conditioning),) = denoiser.condition(captions, noise)
    with denoiser.training(torch.float32):
        x0 = denoiser.predict_x0(x, sigma, conditioning)
    epsilon = (x - x0) / sigma.view(-1, 1, 1, 1)
    latents = x - noise * sigma.view(-1, 1, 1, 1)
    ours = loss_per_sample(x0, latents, denoiser.loss_weight(sigma))
    torch.testing.assert_close(ours, (epsilon - noise).square().flatten(1).mean(1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_seed_repeats_a_run_bit_for_bit(denoiser: Any, tmp_path: Path, precision: Any) -> None:
    first = finish(jobs.job(tmp_path / "1", denoiser, precision=precision))
    torch.randn(7)  # the global generator plays no part
    second = finish(jobs.job(tmp_path / "2", denoiser, precision=precision))
    assert first.record.losses == second.record.losses
    for key, tensor in first.record.lora.items():
        assert torch.equal(tensor, second.record.lora[key]), key
    other = finish(jobs.job(tmp_path / "3", denoiser, precision=precision, seed=6))
    assert first.record.losses != other.record.losses


def test_recompute_does_not_change_the_numbers(denoiser: Any, tmp_path: Path) -> None:
    on = finish(jobs.job(tmp_path / "on", denoiser, recompute=True, batch_size=2, steps=4))
    off = finish(jobs.job(tmp_path / "off", denoiser, recompute=False, batch_size=2, steps=4))
    # To the last bit: whichever way a block runs, its gradients are summed in one order.
    assert on.record.losses == off.record.losses
    assert all(torch.equal(tensor, off.record.lora[name]) for name, tensor in on.record.lora.items())


def test_accumulation_weighs_every_sample_the_same(denoiser: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Three pictures in batches of two make a batch of two and one of one; a step over both is their mean."""
    same = lambda seed, step, batch: torch.Generator().manual_seed(9)  # noqa: E731
    monkeypatch.setattr("lowvram_lora.training.objective.generator_for", same)
    apart = jobs.job(tmp_path / "apart", denoiser, steps=2, batch_size=2, learning_rate=1e-12)
    losses = finish(apart).record.losses
    sizes = [len(apart.recipe.batch(k)) for k in range(2)]
    optim = replace(apart.config.optim, accumulation=2)
    together = finish(replace(apart, config=replace(apart.config, steps=1, optim=optim))).record.losses
    assert sorted(sizes) == [1, 2]
    assert together[0] == pytest.approx((sizes[0] * losses[0] + sizes[1] * losses[1]) / 3, rel=1e-5)


def test_a_lora_on_the_model_is_part_of_the_base(denoiser: Any, model: Any, pack: Any, tmp_path: Path) -> None:
    first = finish(jobs.job(tmp_path / "first", denoiser, steps=5))
    with torch.inference_mode():
        patched = pack.nodes._models.with_lora(model, first.record.lora)
    stacked = pack.nodes._models.HostDenoiser(patched)
    job = jobs.job(tmp_path / "second", stacked, steps=1)
    assert stacked.fingerprint != denoiser.fingerprint
    with stacked.training(torch.float32):
        expected = predict(job, [0])
    layers = select(stacked.network, "attention")
    adapters = run_module.build(layers, job.config.lora, 0, tiny.CPU)
    with attached(stacked, layers, adapters, torch.float32, Engine()):
        seen = predict(job, [0])
    with denoiser.training(torch.float32):
        base = predict(job, [0])
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
    assert (seen - base).abs().max() > 1e-3


def test_a_model_sampling_node_is_honoured(model: Any, pack: Any) -> None:
    from comfy_extras.nodes_model_advanced import ModelSamplingDiscrete

    (patched,) = ModelSamplingDiscrete().patch(model, "v_prediction", zsnr=False)
    denoiser = pack.nodes._models.HostDenoiser(patched)
    assert denoiser.prediction == "v"
    sigma = torch.tensor([0.5, 2.0])
    torch.testing.assert_close(denoiser.loss_weight(sigma), (sigma**2 + 1) / sigma**2)
    assert denoiser.fingerprint != pack.nodes._models.HostDenoiser(model).fingerprint


def test_a_bypass_lora_and_a_function_wrapper_are_refused_by_name(model: Any, pack: Any, tmp_path: Path) -> None:
    from comfy.patcher_extension import PatcherInjection

    patched = model.clone()
    nothing = PatcherInjection(inject=lambda patcher: None, eject=lambda patcher: None)
    patched.set_injections("bypass", [nothing])
    patched.set_model_unet_function_wrapper(lambda apply, args: apply(args["input"], args["timestep"], **args["c"]))
    with pytest.raises(PreflightError, match="bypass") as caught:
        finish(jobs.job(tmp_path, pack.nodes._models.HostDenoiser(patched)))
    assert len(caught.value.problems) == 2
    assert not list(tmp_path.glob("loras/*"))


@pytest.mark.parametrize("stop_at", [1, 2, 9])
def test_cancel_leaves_the_host_as_it_was_and_keeps_the_steps_done(
    denoiser: Any, model: Any, tmp_path: Path, stop_at: int
) -> None:
    with denoiser.training(torch.float32):  # as after any use by the host
        pass
    before = host_state(model)
    # Two checks a step: before it and before its only batch.
    job = jobs.job(tmp_path, denoiser, steps=100, cancel=FakeCancel(stop_at))
    with pytest.raises(KeyboardInterrupt):
        finish(job)
    assert host_state(model) == before
    saved = list((tmp_path / "loras").glob("*"))
    done = (stop_at - 1) // 2
    if done == 0:
        assert saved == []
        return
    assert [path.name for path in saved] == [f"tiny_partial_step{done:05d}.safetensors"]
    # It holds exactly the weights of an unbroken run of that many steps.
    unbroken = finish(jobs.job(tmp_path / "unbroken", denoiser, steps=done)).record
    partial = load_file(saved[0])
    assert all(torch.equal(partial[key], tensor) for key, tensor in unbroken.lora.items())
    # And is never taken for the finished run.
    again = finish(jobs.job(tmp_path, denoiser, steps=done + 1))
    assert not again.reused and again.path.name == "tiny.safetensors"


@pytest.mark.parametrize("where", ["forward", "recompute"])
def test_an_error_in_the_network_leaves_the_host_as_it_was(
    denoiser: Any, model: Any, tmp_path: Path, where: str, monkeypatch: Any
) -> None:
    with denoiser.training(torch.float32):
        pass
    before = host_state(model)
    calls = {"left": 30 if where == "forward" else 170}
    fetch = type(denoiser.weights).fetch

    def failing(self: Any, module: Any, like: Any) -> Any:
        calls["left"] -= 1
        if calls["left"] == 0:
            raise RuntimeError("a kernel failed, say")
        return fetch(self, module, like)

    monkeypatch.setattr(type(denoiser.weights), "fetch", failing)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        finish(jobs.job(tmp_path, denoiser))
    assert host_state(model) == before


def test_closing_the_generator_detaches(denoiser: Any, model: Any, tmp_path: Path) -> None:
    with denoiser.training(torch.float32):
        pass
    before = host_state(model)
    events = run(jobs.job(tmp_path, denoiser, steps=100))
    next(event for event in events if isinstance(event, Stepped))
    events.close()
    assert host_state(model) == before
    assert len(list((tmp_path / "loras").glob("*_partial_step00001.safetensors"))) == 1


def test_base_sampling_is_bit_equal_after_training(denoiser: Any, tmp_path: Path) -> None:
    job = jobs.job(tmp_path, denoiser)
    with denoiser.training(torch.float32):
        before = predict(job, [0, 1, 2])
    finish(job)
    with denoiser.training(torch.float32):
        assert torch.equal(predict(job, [0, 1, 2]), before)


def test_a_run_away_loss_stops_within_a_few_steps(denoiser: Any, model: Any, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="Lower learning_rate") as caught:
        finish(jobs.job(tmp_path, denoiser, steps=100, learning_rate=1e6))
    assert caught.value.step <= 5
    names = [path.name for path in (tmp_path / "loras").glob("*")]
    assert all("partial" in name for name in names)
    for path in (tmp_path / "loras").glob("*"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())


def test_an_unchanged_job_is_taken_from_disk(denoiser: Any, model: Any, pack: Any, tmp_path: Path) -> None:
    first = finish(jobs.job(tmp_path, denoiser))
    # Another object for the same model, as after a restart; loading a patched clone meanwhile changes nothing.
    again = pack.nodes._models.HostDenoiser(tiny.sd15())
    events = list(run(jobs.job(tmp_path, again)))
    assert [type(event) for event in events] == [Saved, Finished]
    assert events[-1].reused and events[-1].path == first.path
    renamed = list(run(jobs.job(tmp_path, again, output_name="other", vram_budget_gb=3.0)))
    assert renamed[-1].reused and renamed[-1].path.name == "other.safetensors"
    assert not finish(jobs.job(tmp_path, again, steps=4)).reused


def test_the_fingerprint_does_not_depend_on_what_is_loaded(
    denoiser: Any, model: Any, pack: Any, tmp_path: Path
) -> None:
    lora = finish(jobs.job(tmp_path, denoiser)).record.lora
    before = pack.nodes._models.HostDenoiser(model).fingerprint
    with torch.inference_mode():
        patched = pack.nodes._models.with_lora(model, lora)
    with pack.nodes._models.HostDenoiser(patched).training(torch.float32):
        assert pack.nodes._models.HostDenoiser(model).fingerprint == before
        loaded = pack.nodes._models.HostDenoiser(patched).fingerprint
    assert pack.nodes._models.HostDenoiser(patched).fingerprint == loaded != before


def test_an_existing_file_is_not_written_over_unless_asked(denoiser: Any, tmp_path: Path) -> None:
    (tmp_path / "loras").mkdir(parents=True)
    mine = tmp_path / "loras" / "tiny.safetensors"
    mine.write_bytes(b"somebody else's")
    assert finish(jobs.job(tmp_path, denoiser)).path.name == "tiny_2.safetensors"
    assert mine.read_bytes() == b"somebody else's"
    again = finish(jobs.job(tmp_path, denoiser))
    assert again.reused and again.path.name == "tiny_2.safetensors"
    assert finish(jobs.job(tmp_path, denoiser, overwrite=True)).path == mine


def test_every_problem_is_named_before_step_1(denoiser: Any, tmp_path: Path) -> None:
    job = jobs.job(tmp_path, denoiser, output_name="../../x")
    entries = tuple(
        replace(entry, scales=(replace(entry.scales[0], latent_shape=(16, 8, 8)),))
        for entry in job.recipe.cache.entries
    )
    recipe = replace(job.recipe, cache=replace(job.recipe.cache, entries=entries))
    config = replace(job.config, lora=replace(job.config.lora, rank=512))
    with pytest.raises(PreflightError) as caught:
        finish(replace(job, recipe=recipe, config=config))
    text = str(caught.value)
    assert "'..'" in text and "16 channels" in text and "works on 4" in text and "rank 512" in text
    assert len(caught.value.problems) == 3


def test_a_cleaned_cache_is_named_before_step_1(denoiser: Any, tmp_path: Path) -> None:
    job = jobs.job(tmp_path, denoiser)
    next(iter((tmp_path / "cache" / "latents").rglob("*.safetensors"))).unlink()
    with pytest.raises(PreflightError, match="Queue again"):
        finish(job)


def test_what_acts_inside_the_network_acts_in_training_and_is_part_of_the_base(
    denoiser: Any, model: Any, pack: Any, tmp_path: Path
) -> None:
    def patched(gain: float, tensor: torch.Tensor) -> Any:
        clone = model.clone()
        clone.set_model_attn1_patch(lambda q, k, v, options: (q * gain, k, v))
        clone.add_wrapper_with_key("diffusion_model", "test", lambda execute, x, *rest: execute(x + tensor, *rest))
        return pack.nodes._models.HostDenoiser(clone)

    with torch.inference_mode():
        tensor = torch.full((1,), 0.5)
    one, same, other = patched(2.0, tensor), patched(2.0, tensor.clone()), patched(3.0, tensor)
    assert one.fingerprint == same.fingerprint
    assert len({denoiser.fingerprint, one.fingerprint, other.fingerprint}) == 3
    plain = finish(jobs.job(tmp_path / "plain", denoiser)).record.losses
    assert finish(jobs.job(tmp_path / "one", one)).record.losses != plain
    assert "lowvram_lora" not in one._patcher.wrappers["diffusion_model"]


def test_the_hosts_block_prefetch_is_off_while_training(denoiser: Any, tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[Any] = []
    forward = type(denoiser.network)._forward

    def noted(self: Any, x: Any, timesteps: Any, context: Any, y: Any, control: Any, options: Any, **rest: Any) -> Any:
        seen.append(options["prefetch_dynamic_vbars"])
        return forward(self, x, timesteps, context, y, control, options, **rest)

    monkeypatch.setattr(type(denoiser.network), "_forward", noted)
    finish(jobs.job(tmp_path, denoiser, steps=1))
    assert seen == [False]


@pytest.mark.parametrize("kinds", [("eps", "v_prediction"), ("eps", "lcm")])
def test_another_kind_of_prediction_is_another_base(model: Any, pack: Any, kinds: tuple[str, str]) -> None:
    from comfy_extras.nodes_model_advanced import ModelSamplingDiscrete

    patched = [ModelSamplingDiscrete().patch(model, kind, zsnr=False)[0] for kind in (*kinds, kinds[0])]
    one, other, same = (pack.nodes._models.HostDenoiser(each).fingerprint for each in patched)
    assert one == same != other


def test_what_a_patch_has_captured_is_part_of_the_base(model: Any, pack: Any) -> None:
    class Reference:
        def __init__(self, weight: float) -> None:
            self.images = {"first": [torch.full((3,), weight)]}

        def patch(self, q: Any, k: Any, v: Any, options: Any) -> Any:
            return q, k, v

    def fingerprint(weight: float) -> str:
        clone = model.clone()
        clone.set_model_attn1_patch(Reference(weight).patch)
        return str(pack.nodes._models.HostDenoiser(clone).fingerprint)

    assert fingerprint(1.0) == fingerprint(1.0) != fingerprint(2.0)


def test_a_replaced_part_of_the_network_is_trained_through(model: Any, pack: Any, tmp_path: Path) -> None:
    import copy

    with torch.inference_mode(False):
        other = model.clone()
        part = copy.deepcopy(model.model.diffusion_model.middle_block[1])
        other.add_object_patch("diffusion_model.middle_block.1", part)
    replaced, plain = (pack.nodes._models.HostDenoiser(each) for each in (other, model))
    # The second run begins while the first one's part is still in the network.
    for name, denoiser in (("replaced", replaced), ("plain", plain)):
        lora = finish(jobs.job(tmp_path / name, denoiser)).record.lora
        assert all(tensor.any() for key, tensor in lora.items() if key.endswith("lora_up.weight")), name


def test_random_numbers_inside_the_network_follow_the_seed_and_repeat_in_the_recompute(
    model: Any, pack: Any, tmp_path: Path
) -> None:
    drawn: dict[bool, list[float]] = {False: [], True: []}

    def noisy(q: Any, k: Any, v: Any, options: Any) -> Any:
        mask = torch.rand(1)
        drawn[torch.is_grad_enabled()].append(float(mask))
        return q * (1 + mask), k, v

    clone = model.clone()
    clone.set_model_attn1_patch(noisy)
    denoiser = pack.nodes._models.HostDenoiser(clone)
    losses = []
    for number in range(2):
        torch.manual_seed(number)
        losses.append(finish(jobs.job(tmp_path / str(number), denoiser)).record.losses)
    assert losses[0] == losses[1]
    # Without gradients in a block's first run, with them in its second: the same numbers, blocks in reverse order.
    assert len(drawn[True]) > 10 and sorted(drawn[True]) == sorted(drawn[False])


def test_a_patch_that_cannot_be_differentiated_is_refused_in_words(model: Any, pack: Any, tmp_path: Path) -> None:
    with torch.inference_mode():
        captured = torch.ones(1)
    clone = model.clone()
    clone.set_model_attn1_patch(lambda q, k, v, options: (q * captured, k, v))
    with pytest.raises(UnsupportedModelError, match="Take patches"):
        finish(jobs.job(tmp_path, pack.nodes._models.HostDenoiser(clone)))
