"""The data side's techniques on the toy world's lesson, from a folder of pictures to a LoRA, by the product's own code.

The pictures are written as a dataset, scanned, scored, encoded at the sizes asked for, drawn by the sampler and trained
on by the run. Every way sees whole epochs: as many pictures as any other, each as often as any other.

What the toy world can't show: its captions are all one chunk of a CLIP, of which nothing is to be left out, so there is
nothing to gain by dynamic text length. All pictures have one size, so a token budget cuts batches differently only
where adaptive resolution makes some smaller. A picture is 36 tokens for the network beside 77 of text, so smaller
pictures and windows of attention save next to nothing. What these can save is counted at full size (``bench sparse``).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lowvram_lora.adapters.targets import select
from lowvram_lora.config import CacheConfig, ComplexityConfig, DataConfig, SamplerConfig
from lowvram_lora.data import planned
from lowvram_lora.data.batches import BatchRecipe
from lowvram_lora.data.cache import CacheIndex, build
from lowvram_lora.data.complexity import score
from lowvram_lora.data.dataset import Dataset
from lowvram_lora.data.draw import Batch, Draw
from lowvram_lora.data.epochs import EpochConfig
from lowvram_lora.data.precision import num_bytes
from lowvram_lora.data.profiles import plan_of
from lowvram_lora.data.scan import scan
from lowvram_lora.data.sparse import SparseConfig
from lowvram_lora.data.tokens import latent_tokens
from lowvram_lora.training import prepare
from lowvram_lora.training.altered import as_configured
from lowvram_lora.training.estimate import Simulator
from lowvram_lora.training.job import Job

from . import dataset as lessons
from . import scenes, trainers
from .studio import Studio
from .task import BATCH

EPOCHS = 12
"""1536 pictures: 192 steps of 8."""
STEP_PX = 16
"""96 pixels are then 80 at 3/4 and 48 at 1/2: sides that are whole patches of the network."""
PATCH = 2
WINDOW = 3
"""Tokens a side: four windows to a picture."""


@dataclass(frozen=True)
class Way:
    """A way to train on the lesson.

    Attributes:
        against: the way that differs from it in the one technique alone; empty for the plain way.
        sampler, cache, train: fields of the settings of these names that are not as in the plain way.
        sparse: fields of ``SparseConfig``, which no node has an input for.
    """

    against: str = ""
    sampler: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    sparse: Mapping[str, Any] = field(default_factory=dict)


PLAIN_CACHE = {"compression": "none", "scales": "full", "dynamic_precision": "off", "predictive": "off"}
_SPARSE = {"strategy": "sparse"}
_SCALES = {"scales": "full, 3/4, 1/2"}
_BUDGET = {**_SPARSE, "adaptive_batch": True}
_PRECISION = {"dynamic_precision": "on"}
_TEXT = {"dynamic_text": True}
_LOCAL = {"local_attention_tokens": 1, "local_attention_window": WINDOW}
# The usual discount is 0.25: with so few tokens to save, no picture of this world is then made smaller. At 0.6 about
# half of the draws are, at 0.8 all.
_DEAR = {"cost_discount": 0.6}

OFF = "off"
WAYS = {
    OFF: Way(),
    "sparse batches": Way(OFF, sampler=_SPARSE),
    "adaptive resolution": Way("sparse batches", sampler=_SPARSE, cache=_SCALES),
    "token budget": Way("adaptive resolution", sampler=_BUDGET, cache=_SCALES),
    "adaptive resolution, cost 0.6": Way("sparse batches", sampler=_SPARSE, cache=_SCALES, sparse=_DEAR),
    "token budget, cost 0.6": Way("adaptive resolution, cost 0.6", sampler=_BUDGET, cache=_SCALES, sparse=_DEAR),
    "dynamic precision": Way(OFF, cache=_PRECISION),
    "dynamic text length": Way(OFF, train=_TEXT),
    "local attention": Way(OFF, train=_LOCAL),
    "all together": Way(OFF, sampler=_BUDGET, cache={**_SCALES, **_PRECISION}, train={**_TEXT, **_LOCAL}),
}


class Lesson:
    """A dataset on disk, and its cache at every size that a way asks for.

    Args:
        folder: gets the pictures and the cache.
        count: pictures.
    """

    def __init__(
        self, host_pack: Any, studio: Studio, concept: str, folder: Path, count: int = lessons.NUM_PICTURES
    ) -> None:
        self._pack, self._folder = host_pack, folder
        encoders = host_pack.nodes._encoders
        self._codec, self._text = encoders.HostVae(studio.vae), encoders.HostClip(studio.clip)
        lessons.write(folder / "pictures", lessons.lesson_scenes(concept, count))

    @cached_property
    def dataset(self) -> Dataset:
        """The scored pictures."""
        pictures = self._folder / "pictures"
        config = DataConfig(folder=str(pictures), resolution=scenes.SIDE, bucket_step=STEP_PX)
        return score(scan(config, [pictures]), ComplexityConfig(), self._folder / "measures")

    def index(self, way: Way) -> CacheIndex:
        """Return the cache that a way reads; what is encoded already is not encoded again."""
        plan = plan_of(CacheConfig(**{**PLAIN_CACHE, **way.cache}))
        with torch.inference_mode():
            return build(self.dataset, self._codec, self._text, self._folder / "cache", lambda *_: None, plan)[0]

    def drawn(self, way: Way, rate: float, seed: int, folder: Path, epochs: int = EPOCHS) -> Drawn:
        """Return the training of a way, which is yet to begin; its files go under ``folder``."""
        sampler = SamplerConfig(**{"batch_size": BATCH, "seed": seed, **way.sampler})
        recipe = BatchRecipe(self.index(way), sampler)
        with mock.patch.object(planned, "EpochConfig", partial(EpochConfig, sparse=SparseConfig(**way.sparse))):
            # It plans on first use.
            steps = sum(len(recipe.epoch(number)) for number in range(epochs))
        config = trainers.config_of(steps, rate, seed, **way.train)
        return Drawn(trainers.job_on(self._pack, recipe, config, folder))


@dataclass(frozen=True)
class Drawn:
    """A training, and what can be said of it without running it."""

    job: Job

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """The batch of each step, at the precision that it is read at."""
        samples = prepare.samples_of(self.job)
        return tuple(batch for step in range(self.job.config.steps) for batch in samples.window(step, 1))

    @property
    def seen(self) -> Counter[int]:
        """How often each picture is seen."""
        return Counter(draw.entry for batch in self.batches for draw in batch)

    def counted(self) -> dict[str, Any]:
        """Return how many tokens and bytes a step has, of what.

        ``tokens`` are those that the network gets, ``planned_tokens`` what the sampler counts: each position of the
        latents, though two by two of them are one token.
        """
        index = self.job.recipe.cache
        draws = [draw for batch in self.batches for draw in batch]
        shapes = [index.image_of(draw).latent_shape for draw in draws]
        texts = [index.entries[draw.entry].text_tokens for draw in draws]
        as_planned = [latent_tokens(shape) + text for shape, text in zip(shapes, texts, strict=True)]
        network = [latent_tokens(shape, PATCH) + self._rows(draw) for shape, draw in zip(shapes, draws, strict=True)]
        read = [num_bytes(draw.precision, shape) for draw, shape in zip(draws, shapes, strict=True)]
        steps = len(self.batches)
        return {
            "steps": steps,
            "samples": len(draws),
            "tokens_a_step": round(sum(network) / steps, 1),
            "planned_tokens_a_step": round(sum(as_planned) / steps, 1),
            "passes_a_step": round(statistics.fmean(len(groups) for groups in self._groups), 2),
            "latent_bytes_a_draw": round(statistics.fmean(read), 1),
            "scales": _shares(str(draw.scale) for draw in draws),
            "precisions": _shares(draw.precision for draw in draws),
        }

    def device_bytes(self) -> dict[str, float]:
        """Return the simulated device bytes of a step without any technique of ``memory``.

        ``planned`` is what a plan has to hold room for, the most that could meet; ``most`` and ``mean`` are of the
        steps that there are.
        """
        largest, index = prepare.largest_batch(self.job.recipe), self.job.recipe.cache
        draws = {index.image_of(draw).latent_shape: draw for batch in (*self.batches, largest) for draw in batch}
        bound = index.image_of(largest[0]).latent_shape, len(largest)
        groups = {bound, *(group for groups in self._groups for group in groups)}
        peaks = {(shape, count): self._peak((draws[shape],) * count) for shape, count in groups}
        steps = [max(peaks[group] for group in groups) for groups in self._groups]
        return {"planned": peaks[bound], "most": max(steps), "mean": round(statistics.fmean(steps))}

    @cached_property
    def _groups(self) -> list[list[tuple[tuple[int, ...], int]]]:
        """Of each step, what goes through the network together: shapes of latents, and how many have each."""
        index = self.job.recipe.cache
        return [list(Counter(index.image_of(draw).latent_shape for draw in batch).items()) for batch in self.batches]

    def _rows(self, draw: Draw) -> int:
        """Return the rows of a draw's caption as the network gets it."""
        return self._rows_of[self.job.recipe.cache.text_key(draw)]

    @cached_property
    def _rows_of(self) -> dict[str, int]:
        job, samples = self.job, prepare.samples_of(self.job)
        denoiser, index = as_configured(job.denoiser, job.config), job.recipe.cache
        found: dict[str, int] = {}
        for draw in (draw for batch in self.batches for draw in batch):
            if index.text_key(draw) not in found:
                noise = torch.zeros(1, *index.image_of(draw).latent_shape)
                ((_, given),) = denoiser.condition([samples.conditioning(draw)], noise)
                found[index.text_key(draw)] = given["c_crossattn"].shape[1]
        return found

    def _peak(self, batch: Batch) -> int:
        """Return the simulated device bytes of a step of draws of one shape, of which a sample stands for each."""
        job = self.job
        simulator = Simulator(
            denoiser=job.denoiser,
            layers=select(job.denoiser.network, job.config.lora.targets),
            config=job.config,
            dtype=torch.float32,
            samples=prepare.samples_of(job),
            batch=batch,
            text=prepare.longest_text(job.recipe),
            cancel=job.cancel,
        )
        return simulator.step(trainers.nothing(job.denoiser)).counter.peak


def _shares(names: Iterator[str]) -> dict[str, float]:
    """Return the share of each name, the commonest first."""
    found = Counter(names)
    return {name: round(number / found.total(), 3) for name, number in found.most_common()}
