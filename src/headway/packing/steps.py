"""Group packs into steps, and deal a step's packs to ranks: equal FLOPs for every rank, and little sorted."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.packing.order import key_of, shuffled

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BALANCE = 0.986
"""Balance that packs are sorted for where they need it: mean over steps of mean / max FLOPs over ranks, a fraction."""

_HALVINGS = 12  # halvings of the bisection for the width of bands


def deal(costs: Sequence[float] | Floats, ranks: int, accumulation: int = 1) -> list[list[int]]:
    """Deal a step's packs to ranks so that each rank's FLOPs are as equal as can be.

    In each of `accumulation` rounds the rank with the least so far takes the heaviest of the next packs, so that heavy
    and light packs pair up and ranks meet packs of like cost at the same time.

    Args:
        costs: cost of each of the step's packs, shape (ranks * accumulation,).
        ranks: data-parallel ranks.
        accumulation: packs of each rank.

    Returns:
        For each rank the numbers of its packs, in the order in which it accumulates them.

    Raises:
        ConfigError: the packs are not ranks * accumulation.

    >>> deal([5.0, 1.0, 4.0, 2.0], ranks=2, accumulation=2)
    [[0, 1], [2, 3]]
    """
    array = np.asarray(costs, dtype=np.float64)
    if ranks < 1 or accumulation < 1 or len(array) != ranks * accumulation:
        raise ConfigError(
            f"A step of {len(array)} packs cannot be dealt to {ranks} ranks with an accumulation of {accumulation}: "
            "ranks times accumulation must be the packs of a step."
        )
    packs_of_ranks: list[list[int]] = _deal_steps(array[None], ranks)[0].tolist()
    return packs_of_ranks


def rank_costs(costs_SP: Floats, ranks: int) -> Floats:
    """FLOPs of each rank in each of several steps, shape (S, ranks)."""
    if costs_SP.shape[1] == ranks:
        return costs_SP
    summed: Floats = np.take_along_axis(costs_SP[:, None], _deal_steps(costs_SP, ranks), axis=2).sum(axis=2)
    return summed


def balance_of(costs_SP: Floats, ranks: int) -> Floats:
    """Mean / max FLOPs over the ranks of each step, a fraction, shape (S,)."""
    per_rank = rank_costs(costs_SP, ranks)
    heaviest = per_rank.max(axis=1)
    return np.where(heaviest > 0, per_rank.sum(axis=1) / (ranks * np.maximum(heaviest, 1)), 1.0)


def group_into_steps(costs: Floats, packs_per_step: int, accumulation: int, key: int, balance: float = BALANCE) -> Ints:
    """Group packs into steps: at random if that leaves ranks equal, else at random within bands of like cost.

    Args:
        costs: cost of each pack, whole numbers in any unit, shape (S * packs_per_step,).
        packs_per_step: packs of a step over all ranks.
        accumulation: packs of a step that one rank accumulates gradients over.
        key: seed of the shuffling.
        balance: the bands are as wide as this mean / max FLOPs over ranks allows, mean over steps, a fraction.

    Returns:
        The packs in the order in which they are trained on, shape (S, packs_per_step).
    """
    # Sort packs by cost; row s would be step s if everything were sorted.
    order = np.argsort(-costs, kind="stable").reshape(-1, packs_per_step)
    heaviest = costs[order[:, 0]].tolist()
    sums = [0.0, *np.cumsum(costs[order].sum(axis=1)).tolist()]
    ranks = packs_per_step // accumulation

    def shuffled_in_bands(least_share: float) -> Ints:
        places = np.empty(order.size, dtype=np.int64)
        start = 0
        for number, stop in enumerate(_band_ends(sums, heaviest, packs_per_step, least_share)):
            size = (stop - start) * packs_per_step
            first = start * packs_per_step
            places[first : first + size] = first + shuffled(size, key_of(key, number))
            start = stop
        steps: Ints = order.reshape(-1)[places].reshape(order.shape)
        return steps

    def is_balanced(least_share: float) -> bool:
        steps = balance_of(costs[shuffled_in_bands(least_share)], ranks)
        return float(np.cumsum(steps)[-1]) >= balance * len(steps)

    # A band ends where its mean would fall below `least_share` of its heaviest pack: 0 makes one band of all packs,
    # which is no sorting, and 1 a band of each step. Bisect for the widest bands that reach the balance.
    loose, tight = 0.0, 0.0 if is_balanced(0.0) else 1.0
    for _ in range(_HALVINGS if tight else 0):
        middle = (loose + tight) / 2
        loose, tight = (loose, middle) if is_balanced(middle) else (middle, tight)
    # Shuffle the steps, or the heaviest band would be trained on first.
    return shuffled_in_bands(tight)[shuffled(len(order), key_of(key, -1))]


def _band_ends(sums: list[float], heaviest: list[float], width: int, least_share: float) -> list[int]:
    """Find where bands end [steps]: each as long as its mean is at least `least_share` of its heaviest pack."""
    num_steps, start, ends = len(heaviest), 0, []
    while start < num_steps:
        least = least_share * heaviest[start] * width

        def too_light(stop: int, start: int = start, least: float = least) -> bool:
            return sums[stop] - sums[start] < least * (stop - start)

        start = max(start + 1, bisect_left(range(num_steps + 1), True, lo=start + 1, key=too_light) - 1)
        ends.append(start)
    return ends


def _deal_steps(costs_SP: Floats, ranks: int) -> NDArray[Any]:
    """Pack numbers of each rank in each step, shape (S, ranks, accumulation)."""
    num_steps, width = costs_SP.shape
    if width == ranks:
        return np.broadcast_to(np.arange(width)[:, None], (num_steps, width, 1))
    # LPT in rounds, all steps at once: of the next heaviest packs the least loaded rank takes the heaviest.
    order = np.argsort(-costs_SP, axis=1, kind="stable")
    loads = np.zeros((num_steps, ranks))
    dealt = np.empty((num_steps, ranks, width // ranks), dtype=np.int64)
    rows = np.arange(num_steps)[:, None]
    for turn in range(width // ranks):
        packs = order[:, turn * ranks : (turn + 1) * ranks]
        lightest = np.argsort(loads, axis=1, kind="stable")
        dealt[rows, lightest, turn] = packs
        loads[rows, lightest] += costs_SP[rows, packs]
    return dealt
