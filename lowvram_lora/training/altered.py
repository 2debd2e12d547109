"""Settings that let the network be another function than its own, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import AttentionLimit, TrainConfig
from ..memory.random_state import forked
from ..ports import Denoiser, Encoding
from . import objective
from .step import Samples


class AlteredDenoiser:
    """A ``Denoiser`` that is another, with something changed in its function.

    Args:
        limit: where self-attention sees windows.
        cuts_padding: leave out the padding behind captions.
    """

    def __init__(self, denoiser: Denoiser, limit: AttentionLimit | None, cuts_padding: bool) -> None:
        self._denoiser = denoiser
        self._limit = limit
        self._cuts_padding = cuts_padding

    def __getattr__(self, name: str) -> Any:
        """Answer as the other does."""
        return getattr(self._denoiser, name)

    def condition(self, encodings: Sequence[Encoding], noise: Tensor) -> list[tuple[list[int], dict[str, Any]]]:
        """Return the network's arguments."""
        return self._denoiser.condition(encodings, noise, self._cuts_padding)

    def predict_x0(self, noised: Tensor, sigma_B: Tensor, conditioning: dict[str, Any]) -> Tensor:
        """Return the estimate of the clean latents."""
        return self._denoiser.predict_x0(noised, sigma_B, conditioning, self._limit)


def altered(denoiser: Denoiser, limit: AttentionLimit | None = None, cuts_padding: bool = False) -> Denoiser:
    """Return ``denoiser`` with its function changed; itself where nothing is."""
    if limit is None and not cuts_padding:
        return denoiser
    made: Any = AlteredDenoiser(denoiser, limit, cuts_padding)
    return made  # type: ignore[no-any-return]


def as_configured(denoiser: Denoiser, config: TrainConfig) -> Denoiser:
    """Return ``denoiser`` with what ``config`` changes in its function."""
    return altered(denoiser, config.attention_limit, config.dynamic_text)


def relative_difference(plain: Denoiser, other: Denoiser, samples: Samples, begin: Callable[[], None]) -> float:
    """Return how far apart two denoisers' estimates of the first batch are, relative to the first one's norm.

    One sample at a time and without gradients, so that it takes less memory than a step does.

    Args:
        begin: called before each pass through the network.
    """
    generator = objective.generator_for(samples.seed, 0, 0)
    batch = samples.window(0, 1)[0]
    sigmas = objective.draw_sigmas(plain.sigmas, len(batch), generator).to(plain.device)
    apart = norm = 0.0
    for index, entry in enumerate(batch):
        sigma = sigmas[index : index + 1]
        latents = samples.latents(entry).unsqueeze(0).to(plain.device, torch.float32)
        latents = plain.scale_latents(latents)
        noise = objective.draw_noise(latents, generator)
        found = []
        for denoiser in (plain, other):
            # Patches that draw numbers of their own are to draw the same.
            with torch.no_grad(), forked(plain.device, generator.initial_seed()):
                begin()
                ((_, conditioning),) = denoiser.condition([samples.conditioning(entry)], noise)
                found.append(denoiser.predict_x0(plain.add_noise(latents, noise, sigma), sigma, conditioning))
        apart += float((found[1] - found[0]).square().sum())
        norm += float(found[0].square().sum())
    return float((apart / norm) ** 0.5) if norm else 0.0


def differences(
    denoiser: Denoiser, config: TrainConfig, samples: Samples, begin: Callable[[], None], where: str = "the first batch"
) -> Iterator[str]:
    """Yield a sentence for each setting that changes the network's function: by how much, on the samples' first batch.

    Args:
        where: that batch, in words.
    """
    limit = config.attention_limit
    if limit is not None:
        yield _attention_words(limit, relative_difference(denoiser, altered(denoiser, limit), samples, begin), where)
    if config.dynamic_text:
        cut = altered(denoiser, cuts_padding=True)
        yield _text_words(relative_difference(denoiser, cut, samples, begin), where)


def _attention_words(limit: AttentionLimit, share: float, where: str) -> str:
    above = f"above {limit.tokens} tokens"
    if not share:
        return f"Local attention {above} changes nothing here: no self-attention of this model is limited by it."
    return (
        f"Local attention is on ({above}, windows of {limit.window} x {limit.window} tokens), so the network is not "
        f"the function it was made as: on {where} its estimate of the picture differs by {share:.2%}. ComfyUI samples "
        "with full attention."
    )


def _text_words(share: float, where: str) -> str:
    if not share:
        return f"dynamic_text changes nothing here: the captions of {where} hold no padding. Off is the same."
    return (
        "dynamic_text is on, so this network does not see the padding behind captions that it was made to see: on "
        f"{where} its estimate of the picture differs by {share:.2%}. ComfyUI samples with the padding."
    )
