"""The order in which items are trained on: mixtures of sources, epochs and stages, evaluated at any place.

An order is a function from place to item, not a list: `draw(start, count)` costs time and memory for `count` items,
wherever it starts. It depends on the sources' sizes, the stages and the seed, never on ranks or workers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.packing.permute import Unsigned, key_of, permute

_EXACT = 1 << 24  # whole weights are exact if they add up to no more than this
_RESOLUTION = 1 << 20  # other weights are rounded to multiples of 1 / 2**20 of the mixture
_LAST_PLACE = 1 << 62  # places times weights or counts must stay below 2**63
_SUBSET = 0x5B  # tells the choice of a limited source's items from the shuffling of its epochs


@dataclass(frozen=True, slots=True)
class Play:
    """How one source takes part in a stage; give `weight` or `epochs`.

    Attributes:
        source: the source's name.
        weight: share of the stage's draws, relative to the other sources' weights.
        epochs: how often each of the source's items plays; a fraction plays part of them once more.
        limit: use only this many of the source's items, chosen by the seed; None for all.
    """

    source: str
    weight: float | None = None
    epochs: float | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a curriculum: sources that play together.

    Attributes:
        plays: the sources, all with weights or all with epochs.
        samples: draws of the stage where sources have weights; None for endlessly, which only the last stage may be.
    """

    plays: tuple[Play, ...]
    samples: int | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """One source inside a stage, as numbers: its items are `first` .. `first + size - 1`."""

    source: int
    first: int
    size: int
    used: int
    share: int


class Order:
    """A sequence of items over sources and stages.

    Inside a stage every source plays its own epochs: each of its items once, in an order of their own, before any plays
    again. Sources alternate as evenly as their shares allow: of the first n draws each has its share of n, within 1 for
    each source. With epochs the counts at the end of the stage are exact.

    Args:
        sizes: items of each source by name, in the order in which items are numbered.
        stages: what plays, in order; every source in proportion to its size, endlessly, when None.
        seed: of the shuffling.
        shuffle: whether to shuffle inside sources.

    Raises:
        ConfigError: an unknown or empty source, a weight or number of epochs that is not positive, or an endless stage
            before the last.

    >>> order = Order({"chat": 4, "images": 2}, [Stage((Play("chat", epochs=1), Play("images", epochs=2)))])
    >>> order.length, sorted(order.draw(0, 100).tolist())
    (8, [0, 1, 2, 3, 4, 4, 5, 5])
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        stages: Sequence[Stage] | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if not any(sizes.values()):
            raise ConfigError("There is nothing to order: the sources hold no samples. Give at least one that does.")
        if stages is None:
            stages = [Stage(tuple(Play(name, weight=size) for name, size in sizes.items() if size))]
        firsts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        numbers = {name: number for number, name in enumerate(sizes)}
        self.seed, self.shuffle = seed, shuffle
        self._stages: list[list[_Part]] = []
        self._ends: list[int] = []  # where each stage ends; the last may never
        for number, stage in enumerate(stages):
            parts, length = _parts(stage, number, sizes, firsts, numbers)
            if length is None and number < len(stages) - 1:
                raise ConfigError(
                    f"Stage {number} of the data never ends, so what follows it would never play. Give it a number of "
                    "samples, or epochs instead of weights."
                )
            self._stages.append(parts)
            start = self._ends[-1] if self._ends else 0
            self._ends.append(_LAST_PLACE if length is None else start + length)

    @classmethod
    def epochs(cls, sizes: Mapping[str, int], epochs: float, *, seed: int = 0, shuffle: bool = True) -> "Order":
        """Every source the same number of epochs."""
        stage = Stage(tuple(Play(name, epochs=epochs) for name, size in sizes.items() if size))
        return cls(sizes, [stage], seed=seed, shuffle=shuffle)

    @property
    def length(self) -> int | None:
        """Items in all; None for an endless order."""
        return None if self._ends[-1] == _LAST_PLACE else self._ends[-1]

    def stage_end(self, place: int) -> int:
        """Where the stage that holds a place ends; beyond all places where it never does, or nothing is left."""
        return next((end for end in self._ends if place < end), _LAST_PLACE)

    def draw(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the items at places start .. start + count - 1, fewer where the order ends before.

        Returns:
            Numbers of items, shape (count,) or shorter.
        """
        drawn = []
        begin = 0
        for number, end in enumerate(self._ends):
            low, high = max(start, begin), min(start + count, end)
            if low < high:
                drawn.append(self._draw_stage(number, low - begin, high - begin))
            begin = end
        return np.concatenate(drawn) if drawn else np.zeros(0, dtype=np.int64)

    def _draw_stage(self, stage: int, start: int, stop: int) -> NDArray[np.int64]:
        items = np.empty(stop - start, dtype=np.int64)
        at = np.arange(len(items))  # where in `items` the places are that no source has taken yet
        places = np.arange(start, stop + 1)  # counted among what the remaining sources play, one more than `at`
        rest = sum(part.share for part in self._stages[stage])
        for part in self._stages[stage]:
            before = places * part.share // rest  # draws of this source before each place; grows by 0 or 1
            taken = before[1:] > before[:-1]
            items[at[taken]] = self._play(part, stage, before[:-1][taken])
            at = at[~taken]
            left = places - before
            places = np.append(left[:-1][~taken], left[-1])
            rest -= part.share
        return items

    def _play(self, part: _Part, stage: int, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """The items of a source's draws, numbered from 0 over all its epochs."""
        if not draws.size:
            return draws
        epochs, places = np.divmod(draws, part.used)
        if self.shuffle:
            keys: int | Unsigned
            if epochs[0] == epochs[-1]:
                keys = key_of(self.seed, part.source, stage, int(epochs[0]))
            else:
                different, which = np.unique(epochs, return_inverse=True)
                each = [key_of(self.seed, part.source, stage, epoch) for epoch in different.tolist()]
                keys = np.array(each, dtype=np.uint64)[which]
            places = permute(places, part.used, keys)
            if part.used < part.size:
                places = permute(places, part.size, key_of(self.seed, part.source, _SUBSET))
        return part.first + places


def _parts(
    stage: Stage, number: int, sizes: Mapping[str, int], firsts: Mapping[str, int], numbers: Mapping[str, int]
) -> tuple[list[_Part], int | None]:
    """Check a stage and turn shares into whole numbers; also its length."""
    where = f"Stage {number} of the data"
    if not stage.plays:
        raise ConfigError(f"{where} plays no source. Name at least one of {', '.join(sizes)}.")
    by_epochs = stage.plays[0].epochs is not None
    used = []
    for play in stage.plays:
        if not sizes.get(play.source):
            known = ", ".join(name for name, size in sizes.items() if size)
            raise ConfigError(f"{where} plays {play.source!r}, which holds no samples. Sources with samples: {known}.")
        share = play.epochs if by_epochs else play.weight
        if share is None or (play.epochs is not None and play.weight is not None):
            raise ConfigError(
                f"{where} gives {play.source!r} weight {play.weight} and epochs {play.epochs}. Give weights to all "
                "sources of a stage, or epochs to all."
            )
        if not (math.isfinite(share) and share > 0) or (play.limit is not None and play.limit < 1):
            raise ConfigError(
                f"{where} gives {play.source!r} a weight or epochs of {share} and a limit of {play.limit}; weights and "
                "epochs are above 0, a limit is at least 1 sample."
            )
        used.append(min(sizes[play.source], play.limit or sizes[play.source]))
    if by_epochs and stage.samples is not None:
        raise ConfigError(f"{where} has epochs and {stage.samples} samples; the epochs say how long it is already.")
    if stage.samples is not None and stage.samples < 1:
        raise ConfigError(f"{where} has {stage.samples} samples; give at least 1, or none for endlessly.")
    shares = _epoch_counts(stage, used) if by_epochs else _weights(stage)
    length = sum(shares) if by_epochs else stage.samples
    if (length or 0) * max(shares) >= _LAST_PLACE:
        raise ConfigError(f"{where} draws {length} samples, more than an order can number. Use more stages.")
    parts = [
        _Part(numbers[play.source], firsts[play.source], sizes[play.source], one, share)
        for play, one, share in zip(stage.plays, used, shares, strict=True)
        if share
    ]
    return parts, length


def _epoch_counts(stage: Stage, used: Sequence[int]) -> list[int]:
    return [round(Fraction(play.epochs or 0) * one) for play, one in zip(stage.plays, used, strict=True)]


def _weights(stage: Stage) -> list[int]:
    weights: list[Any] = [play.weight for play in stage.plays]
    if all(weight == int(weight) for weight in weights) and sum(weights) <= _EXACT:
        return [int(weight) for weight in weights]
    total = sum(weights)
    return [max(1, round(weight / total * _RESOLUTION)) for weight in weights]
