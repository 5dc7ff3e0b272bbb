"""The order in which items are trained on: mixtures of sources, epochs and stages, evaluated at any place.

An order is a function from place to item, not a list: `draw(start, count)` costs time and memory for `count` items,
wherever it starts. It depends on the sources' sizes, the stages and the seed, never on ranks or workers.

What makes that possible is `permute`, a keyed pseudo-random permutation evaluated place by place. Nothing is
materialised, so a billion places cost no memory, and the same key gives the same permutation on every machine and with
every version of numpy: whole-number arithmetic modulo 2**64 has no rounding.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError

Unsigned = NDArray[np.uint64]

_EXACT = 1 << 24  # whole weights are exact if they add up to no more than this
_RESOLUTION = 1 << 20  # other weights are rounded to multiples of 1 / 2**20 of the mixture
_LAST_PLACE = 1 << 62  # places times weights or counts must stay below 2**63
_SUBSET = 0x5B  # tells the choice of a limited source's items from the shuffling of its epochs

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FEISTEL_ROUNDS = 6
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class StageSource:
    """One source of a stage's mixture; with neither weight nor epochs it plays in proportion to its size.

    Attributes:
        name: name of the source.
        weight: share of the stage's draws, relative to the other sources' weights.
        epochs: how often each of the source's items is drawn; a fraction draws part of them once more.
        limit: use only this many of the source's items, chosen by the seed; None for all.
    """

    name: str
    weight: float | None = None
    epochs: float | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a curriculum: a mixture of sources.

    Attributes:
        sources: the mixture, all with weights, all with epochs, or all with neither.
        samples: draws of the stage where sources have no epochs.
        epochs: times through the stage; without it sources play as often as they say, or else endlessly, which only
            the last stage may. Once through a stage with weights is `samples`, or all of the source that lasts longest.
    """

    sources: tuple[StageSource, ...]
    samples: int | None = None
    epochs: float | None = None


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

    Inside a stage every source has epochs of its own: each of its items is drawn once, in a shuffled order, before any
    is drawn again. Sources alternate as evenly as their shares allow: of the first n draws each has its share of n,
    within 1 for each source. With epochs the counts at the end of the stage are exact.

    Args:
        sizes: items of each source by name, in the order in which items are numbered.
        stages: the curriculum; every source in proportion to its size, endlessly, when None.
        seed: seed of the shuffling.
        tells_epochs: whether `draw` adds the number of items, for each time that an item has played before.

    Raises:
        ConfigError: an unknown or empty source, a weight or number of epochs that is not positive, or an endless stage
            before the last.

    >>> mixture = StageSource("chat", epochs=1), StageSource("images", epochs=2)
    >>> order = Order({"chat": 4, "images": 2}, [Stage(mixture)])
    >>> order.length, sorted(order.draw(0, 100).tolist())
    (8, [0, 1, 2, 3, 4, 4, 5, 5])
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        stages: Sequence[Stage] | None = None,
        *,
        seed: int = 0,
        tells_epochs: bool = False,
    ) -> None:
        if not any(sizes.values()):
            raise ConfigError(
                "There is nothing to order, because the sources hold no samples. Give at least one source that has "
                "samples."
            )
        if stages is None:
            stages = [Stage(tuple(StageSource(name, weight=size) for name, size in sizes.items() if size))]
        firsts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        numbers = {name: number for number, name in enumerate(sizes)}
        self.seed = seed
        self._lap = sum(sizes.values()) if tells_epochs else 0
        self._stages: list[list[_Part]] = []
        self._ends: list[int] = []  # place at which each stage ends; the last may never end
        self._laps: list[Fraction] = []  # draws of one time through each stage
        self._epoch: Fraction | None = None
        for number, stage in enumerate(stages):
            parts, length, epoch, lap = _parts(stage, number, sizes, firsts, numbers)
            self._epoch = epoch if len(stages) == 1 else None
            if length is None and number < len(stages) - 1:
                raise ConfigError(
                    f"Stage {number} of the data never ends, so the stages after it would never be used. Give this "
                    "stage a number of samples, or epochs instead of weights."
                )
            self._stages.append(parts)
            self._laps.append(lap)
            start = self._ends[-1] if self._ends else 0
            self._ends.append(_LAST_PLACE if length is None else start + length)

    @classmethod
    def epochs(cls, sizes: Mapping[str, int], epochs: float, *, seed: int = 0) -> "Order":
        """Every source the same number of epochs."""
        stage = Stage(tuple(StageSource(name, epochs=epochs) for name, size in sizes.items() if size))
        return cls(sizes, [stage], seed=seed)

    @property
    def length(self) -> int | None:
        """Items in all; None for an endless order."""
        return None if self._ends[-1] == _LAST_PLACE else self._ends[-1]

    def epochs_at(self, place: int) -> float | None:
        """Compute how often the data have played before a place; None where stages follow one another."""
        return None if self._epoch is None else float(place / self._epoch)

    def lap_end(self, place: int) -> int:
        """Find where the time through the data ends that holds a place: each of their samples once; or its stage."""
        begin = 0
        for end, lap in zip(self._ends, self._laps, strict=True):
            if place < end:
                return min(end, begin + math.ceil(((place - begin) // lap + 1) * lap))
            begin = end
        return _LAST_PLACE

    def stage_end(self, place: int) -> int:
        """Find where the stage that holds a place ends; beyond all places where it never does, or nothing is left."""
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
        # One source after the other takes its places, as evenly spread as its share of the places still free allows:
        # of n places the first floor(n * share / rest), so a source takes place n where that floor grows.
        items = np.empty(stop - start, dtype=np.int64)
        at = np.arange(len(items))  # indices in `items` of the places that no source has taken yet
        # numbers of these places among the stage's free places, and one past the last
        places = np.arange(start, stop + 1)
        remaining_share = sum(part.share for part in self._stages[stage])
        if stop * max(part.share for part in self._stages[stage]) >= _LAST_PLACE:
            raise ConfigError(
                f"Place {stop} of the data is more than an order can number. Use more stages, or weights."
            )
        for part in self._stages[stage]:
            before = places * part.share // remaining_share  # draws of this source before each place; grows by 0 or 1
            is_taken = before[1:] > before[:-1]
            items[at[is_taken]] = self._items_of_draws(part, stage, before[:-1][is_taken])
            at = at[~is_taken]
            left = places - before
            places = np.append(left[:-1][~is_taken], left[-1])
            remaining_share -= part.share
        return items

    def _items_of_draws(self, part: _Part, stage: int, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """Look up the items that a source's draws give; draws are numbered from 0 over all its epochs."""
        if not draws.size:
            return draws
        epochs, places = np.divmod(draws, part.used)
        keys: int | Unsigned
        if epochs[0] == epochs[-1]:
            keys = key_of(self.seed, part.source, stage, int(epochs[0]))
        else:
            different, which = np.unique(epochs, return_inverse=True)
            epoch_keys = [key_of(self.seed, part.source, stage, epoch) for epoch in different.tolist()]
            keys = np.array(epoch_keys, dtype=np.uint64)[which]
        # Shuffle within the items used; of a limited source these are chosen once, by a key without the epoch.
        places = permute(places, part.used, keys)
        if part.used < part.size:
            places = permute(places, part.size, key_of(self.seed, part.source, _SUBSET))
        items: NDArray[np.int64] = part.first + places + epochs * self._lap
        return items


def _parts(
    stage: Stage, number: int, sizes: Mapping[str, int], firsts: Mapping[str, int], numbers: Mapping[str, int]
) -> tuple[list[_Part], int | None, Fraction, Fraction]:
    """Check a stage; return its sources with whole shares, its draws (None if endless), and an epoch's draws.

    The last number is the draws between places where all sources have played a whole number of times, if they do so
    before the stage ends.
    """
    where = f"Stage {number} of the data"
    if not stage.sources:
        raise ConfigError(f"{where} names no source. Name at least one of {', '.join(sizes)}.")
    # All sources of a stage say how often they play in the way of the first: by epochs, by weights, or by their sizes.
    first = stage.sources[0]
    by_epochs, by_size = first.epochs is not None, first.epochs is None and first.weight is None
    used = []
    for source in stage.sources:
        if not sizes.get(source.name):
            names = ", ".join(name for name, size in sizes.items() if size)
            raise ConfigError(f"{where} names {source.name!r}, which holds no samples. Sources with samples: {names}.")
        if ((source.epochs is not None) is not by_epochs) or ((source.weight is None) is not (by_size or by_epochs)):
            raise ConfigError(
                f"{where} gives {source.name!r} weight {source.weight} and epochs {source.epochs}. Give weights to "
                "all sources of a stage, or epochs to all of them, or neither."
            )
        share = source.epochs if by_epochs else 1.0 if by_size else source.weight
        if not (share is not None and math.isfinite(share) and share > 0) or (
            source.limit is not None and source.limit < 1
        ):
            raise ConfigError(
                f"{where} gives {source.name!r} a weight or epochs of {share} and a limit of {source.limit}. Weights "
                "and epochs are above 0, and a limit is at least 1 sample."
            )
        used.append(min(sizes[source.name], source.limit or sizes[source.name]))
    # Epochs already say how many samples a stage draws.
    if by_epochs and stage.samples is not None:
        raise ConfigError(
            f"{where} has epochs and {stage.samples} samples, but both say how long the stage is. Leave one of them "
            "out."
        )
    if stage.samples is not None and stage.samples < 1:
        raise ConfigError(
            f"{where} has {stage.samples} samples. Give at least 1, or leave the number out for a stage that never "
            "ends."
        )
    # Shares are whole numbers, so that places are dealt out exactly: draws where sources have epochs, else a ratio.
    if by_epochs:
        shares = [
            round(Fraction(source.epochs or 0) * num_used) for source, num_used in zip(stage.sources, used, strict=True)
        ]
    elif by_size:
        shares = [num_used // math.gcd(*used) for num_used in used]
    else:
        shares = _whole_shares([source.weight for source in stage.sources])
    # Draws of one time through the stage, and of the whole stage; None where it never ends.
    epoch = Fraction(sum(shares)) if by_epochs else _epoch_of(stage, used, shares)
    lap = _lap_of(shares, used) if by_epochs and any(shares) else epoch
    length = sum(shares) if by_epochs else stage.samples
    if stage.epochs is not None:
        length = max(1, round(Fraction(stage.epochs) * epoch))
    # A place times a share must stay below 2**63.
    if (length or 0) * max(shares) >= _LAST_PLACE:
        raise ConfigError(f"{where} draws {length} samples, more than an order can number. Use more stages.")
    # A source whose share is rounded to nothing has no draws.
    parts = [
        _Part(numbers[source.name], firsts[source.name], sizes[source.name], num_used, share)
        for source, num_used, share in zip(stage.sources, used, shares, strict=True)
        if share
    ]
    return parts, length, epoch, lap


def _lap_of(shares: Sequence[int], used: Sequence[int]) -> Fraction:
    """Draws after which sources that have epochs have all played a whole number of times; else all of their draws."""
    times = {Fraction(share, num_used) for share, num_used in zip(shares, used, strict=True)}
    if len(times) == 1:
        return sum(shares) / times.pop()
    is_whole = all(number.denominator == 1 for number in times)
    return Fraction(sum(shares), math.gcd(*(number.numerator for number in times)) if is_whole else 1)


def _epoch_of(stage: Stage, used: Sequence[int], shares: Sequence[int]) -> Fraction:
    """Draws of an epoch of a stage whose sources have weights, or play by size."""
    if stage.samples is not None:
        return Fraction(stage.samples)
    return max(Fraction(num_used * sum(shares), share) for num_used, share in zip(used, shares, strict=True))


def _whole_shares(weights: Sequence[Any]) -> list[int]:
    if all(weight == int(weight) for weight in weights) and sum(weights) <= _EXACT:
        return [int(weight) for weight in weights]
    total = sum(weights)
    return [max(1, round(weight / total * _RESOLUTION)) for weight in weights]


def key_of(*parts: int) -> int:
    """Fold whole numbers into one key of 64 bits; their order matters.

    >>> key_of(0, 1) == key_of(1, 0)
    False
    """
    key = 0
    for part in parts:
        key = int(mixed(np.array([(key ^ (part & _MASK)) + _GOLDEN & _MASK], dtype=np.uint64))[0])
    return key


def permute(places: NDArray[Any], size: int, key: int | Unsigned) -> NDArray[np.int64]:
    """Look places up in a pseudo-random permutation.

    Args:
        places: whole numbers from 0 to size - 1, shape (N,).
        size: how many numbers are permuted.
        key: names the permutation; one for all places, or one each, shape (N,).

    Returns:
        Where each place goes, shape (N,); a permutation of 0 .. size - 1 for each key.

    Source: a Feistel network (Luby and Rackoff 1988) on the next power of two, walked along its cycle until the result
    lies below `size` (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"); its round function is the
    finaliser of splitmix64 (Steele, Lea and Flood 2014).

    >>> sorted(permute(np.arange(5), 5, key=7).tolist())
    [0, 1, 2, 3, 4]
    """
    values = np.asarray(places).astype(np.uint64)
    keys = np.asarray(key, dtype=np.uint64)
    values = _network(values, size, keys)
    # The network permutes up to the next power of two; what lands beyond `size` is sent through it again.
    outside = np.flatnonzero(values >= size)
    while outside.size:
        values[outside] = _network(values[outside], size, keys[outside] if keys.ndim else keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def shuffled(size: int, key: int) -> NDArray[np.int64]:
    """Shuffle 0 .. size - 1 as a whole."""
    scrambled = mixed(np.arange(size, dtype=np.uint64) + np.uint64(key))
    # A radix sort by the highest 32 bits, 16 at a time, since numpy sorts so few in linear time.
    order = np.argsort((scrambled >> np.uint64(32)).astype(np.uint16), kind="stable")
    return order[np.argsort((scrambled >> np.uint64(48)).astype(np.uint16)[order], kind="stable")]


def _network(values: Unsigned, size: int, keys: Unsigned) -> Unsigned:
    # A Feistel network: each half in turn is changed by a hash of the other, which can be undone whatever the hash.
    bits = max(2, (size - 1).bit_length())
    low = bits // 2
    widths = np.uint64(64 - (bits - low)), np.uint64(64 - low)
    left, right = values >> np.uint64(low), values & np.uint64((1 << low) - 1)
    for number in range(_FEISTEL_ROUNDS):
        if number % 2 == 0:
            left = left ^ (mixed(right + _round_key(keys, number)) >> widths[0])
        else:
            right = right ^ (mixed(left + _round_key(keys, number)) >> widths[1])
    return (left << np.uint64(low)) | right


def _round_key(keys: Unsigned, number: int) -> Unsigned:
    with np.errstate(over="ignore"):
        return keys + np.uint64(number * _GOLDEN & _MASK)


def mixed(values: Unsigned) -> Unsigned:
    """Scramble 64 bits; the high ones come out best mixed."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))
