"""What an epoch looks like, in words: counted from the plan itself."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..units import counted
from .distances import Space
from .order import permuted
from .place import PlannedEpoch, wrongly_seen
from .population import Population, Shape

# Batches of a small set of samples are compared with those of several random epochs.
_DRAWS_TO_COMPARE = 10_000
_MOST_ROUNDS = 100


@dataclass(frozen=True)
class Gain:
    """Mean distance of a sample from the nearest other one of its batch; see ``distances.Space``.

    Attributes:
        planned: in the batches of the plan.
        by_chance: in batches of the same sizes that the same draws were dealt to at random.
        rounds: random epochs behind ``by_chance``.
    """

    planned: float
    by_chance: float
    rounds: int


@dataclass(frozen=True, eq=False)
class Outlook:
    """An epoch and the population it was planned from."""

    population: Population
    epoch: PlannedEpoch

    @cached_property
    def tokens(self) -> list[int]:
        """Tokens of each batch."""
        return [sum(self._of[place.entry, place.scale][0] for place in batch) for batch in self.epoch]

    @cached_property
    def num_shapes(self) -> list[int]:
        """Different latent shapes of each batch: so many micro-batches a step."""
        return [len({self._of[place.entry, place.scale][1] for place in batch}) for batch in self.epoch]

    def gain(self, space: Space, seed: int = 0) -> Gain:
        """Compare the batches with random ones of the same draws and sizes."""
        batches = [[place.entry for place in batch] for batch in self.epoch]
        # Sorted, so that what chance gives does not depend on the plan.
        draws = sorted(index for batch in batches for index in batch)
        rounds = min(-(-_DRAWS_TO_COMPARE // max(len(draws), 1)), _MOST_ROUNDS)
        source = random.Random(f"chance/{seed}")
        dealt = [_dealt(permuted(draws, source), [len(batch) for batch in batches]) for _ in range(rounds)]
        chance = sum(space.mean_gain(each) for each in dealt) / rounds
        return Gain(space.mean_gain(batches), chance, rounds)

    def lines(self) -> Iterator[str]:
        """Yield what the epoch looks like: how many samples, draws and batches, and the details."""
        num_draws = sum(len(batch) for batch in self.epoch)
        samples, draws = counted(len(self.population), "sample"), counted(num_draws, "draw")
        yield f"{samples}, {draws} an epoch, {counted(len(self.epoch), 'batch', 'batches')}"
        yield from self.details()

    def details(self) -> Iterator[str]:
        """Yield the sizes of the batches, the count of every sample, scales, precisions and tokens."""
        population = self.population
        yield f"Samples a batch: {_span([len(batch) for batch in self.epoch])}"
        yield self._proof()
        places = [place for batch in self.epoch for place in batch]
        scales = Counter(place.scale for place in places)
        if len(scales) > 1:
            parts = (
                f"{scale:g}: {_share(count, len(places))}" for scale, count in sorted(scales.items(), reverse=True)
            )
            yield f"Scale of the sides, {', '.join(parts)}"
        precisions = Counter(place.precision for place in places)
        if len(precisions) > 1:
            parts = (f"{name}: {_share(count, len(places))}" for name, count in precisions.most_common())
            yield f"Precision, {', '.join(parts)}"
        yield f"Tokens a batch: {_span(self.tokens)}"
        if len(population.shapes) > 1:
            yield f"Latent shapes a batch, each a micro-batch of its own: {_span(self.num_shapes)}"

    @cached_property
    def _of(self) -> dict[tuple[int, float], tuple[int, Shape]]:
        """Tokens and latent shape by sample and scale."""
        population = self.population
        return {
            (index, float(population.scales[index, column])): (
                int(population.tokens[index, column]),
                population.shapes[population.shape_ids[index, column]],
            )
            for index in range(len(population))
            for column in range(population.scales.shape[1])
        }

    def _proof(self) -> str:
        wrong = wrongly_seen(self.epoch, self.population.repeats)
        if wrong:
            shown = ", ".join(map(str, wrong[:5]))
            samples = counted(len(wrong), "sample")
            return f"NOT seen as often as their repeats say: {samples}, first of all {shown}. Please report it."
        most, least = int(self.population.repeats.max(initial=0)), int(self.population.repeats.min(initial=1 << 31))
        times = "once" if most == least == 1 else f"{most} times" if most == least else "as often as its repeats say"
        return f"Counted: each of {counted(len(self.population), 'sample')} is seen {times}, exactly"


def gain_line(gain: Gain) -> str:
    """Return the comparison in a sentence."""
    if not gain.by_chance:
        return "Information gain: not measured, since no batch holds two samples that differ"
    rounds = "" if gain.rounds == 1 else f", mean of {gain.rounds} random epochs"
    return (
        f"Information gain in a batch: {gain.planned:.3f}, in random batches of the same draws {gain.by_chance:.3f} "
        f"({100 * (gain.planned / gain.by_chance - 1):+.1f} %{rounds}). It is the distance from the most similar "
        "sample of the batch, 1 for two samples on average; it says how unlike samples are, not how well they train"
    )


def _dealt(draws: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    source = iter(draws)
    return [[next(source) for _ in range(size)] for size in sizes]


def _span(values: Sequence[int]) -> str:
    if not values:
        return "none"
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}, mean {sum(values) / len(values):.2f}"


def _share(count: int, total: int) -> str:
    return f"{count} ({100 * count / total:.0f} %)"
