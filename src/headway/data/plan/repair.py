"""Repairing packs that exceed a budget: an overfull and a roomy pack share their samples anew, many pairs at a time.

Of each pair the largest samples are divided in every possible way, 256 for four of each. The division that keeps both
within their budgets and makes their costs most alike wins.
"""

import numpy as np
from numpy.typing import NDArray

from headway.data.plan.permute import key_of, shuffled
from headway.data.plan.spread import sums_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

_SHARED = 4  # samples of each pack that are divided anew
_ROUNDS = 16
_BATCH = 256  # pairs at a time, so that their tables stay in the processor's cache
_OVER = 64.0  # what an excess of a whole budget weighs against a difference of a whole pack's cost


def excess(pack_of: Ints, needs: Ints, caps: Ints, num_packs: int) -> Ints:
    """How far each pack exceeds each budget; negative where it has room, shape (R, K)."""
    return np.stack([np.bincount(pack_of, need, num_packs) for need in needs]).astype(np.int64) - caps[:, None]


def repair(pack_of: Ints, needs: Ints, caps: Ints, costs: Floats, num_packs: int, key: int) -> Ints:
    """Divide samples anew between overfull packs and others until the budgets hold or rounds run out.

    Args:
        pack_of: the pack of each sample, shape (N,).
        needs: what each sample takes of each budget, tokens first, shape (R, N).
        caps: the budgets, shape (R,).
        costs: of the samples, whole numbers in any unit, shape (N,).
        num_packs: K.
        key: of the choice of pairs.

    Returns:
        The pack of each sample, shape (N,).
    """
    pack_of = pack_of.copy()
    costs = costs * (num_packs / float(costs.sum()))  # in mean packs
    scales = np.array([_OVER / cap for cap in caps])
    for number in range(_ROUNDS):
        over = excess(pack_of, needs, caps, num_packs)
        fullness = (over / caps[:, None]).max(axis=0)
        overfull, others = np.flatnonzero(fullness > 0), np.flatnonzero(fullness <= 0)
        if not len(overfull) or not len(others):
            break
        median = np.partition(fullness[others], len(others) // 2)[len(others) // 2]
        roomy = others[fullness[others] <= median]
        roomy = roomy[shuffled(len(roomy), key_of(key, number, 0))]
        overfull = overfull[shuffled(len(overfull), key_of(key, number, 1))]
        num_pairs = min(len(overfull), len(roomy))
        pairs = np.stack([overfull[:num_pairs], roomy[:num_pairs]])
        pack_costs = sums_of(pack_of, costs, num_packs)
        for first in range(0, num_pairs, _BATCH):
            _divide(pack_of, pairs[:, first : first + _BATCH], needs, over, scales, costs, pack_costs)
    return pack_of


def _divide(
    pack_of: Ints, pairs: Ints, needs: Ints, over: Ints, scales: Floats, costs: Floats, pack_costs: Floats
) -> None:
    """Divide the largest samples of each pair of packs, shape (2, M), as well as can be; writes `pack_of`."""
    num_pairs = pairs.shape[1]
    table = _largest(pack_of, pairs.reshape(-1), needs[0], len(pack_costs))  # (2 M, S), -1 where there are fewer
    table = np.concatenate([table[:num_pairs], table[num_pairs:]], axis=1)  # (M, 2 S)
    there = table >= 0
    penalty = _differences(np.where(there, costs[table], 0.0), pack_costs[pairs])
    for need, excesses, scale in zip(needs, over[:, pairs] * scales[:, None, None], scales, strict=True):
        worse = _differences(np.where(there, need[table] * scale, 0.0), excesses)
        worse += (excesses.sum(axis=0) / 2).astype(np.float32)[:, None]  # the excess of the fuller pack of the two
        penalty += np.maximum(worse, 0, out=worse)
    best = penalty.argmin(axis=1)
    as_they_are = (1 << _SHARED) - 1
    better = penalty[np.arange(num_pairs), best] < penalty[:, as_they_are]
    in_first = (best[:, None] >> np.arange(table.shape[1])) & 1 == 1
    moved = there & better[:, None]
    pack_of[table[moved]] = np.where(in_first, pairs[0][:, None], pairs[1][:, None])[moved]


def _differences(shared: Floats, totals: Floats) -> Singles:
    """Half the difference between both packs, for every division of the samples they share, shape (M, 2**2S).

    Args:
        shared: what each shared sample weighs, the first pack's samples first, shape (M, 2 S).
        totals: what both packs weigh now, shape (2, M).
    """
    without = totals[0] - shared[:, :_SHARED].sum(axis=1) - totals.sum(axis=0) / 2
    sums = _subset_sums(shared.astype(np.float32), without.astype(np.float32))
    return np.abs(sums, out=sums)


def _largest(pack_of: Ints, packs: Ints, tokens: Ints, num_packs: int) -> Ints:
    """The largest samples of some packs, shape (packs, S); -1 where a pack has fewer."""
    place = np.full(num_packs, -1)
    place[packs] = np.arange(len(packs))
    members = np.flatnonzero(place[pack_of] >= 0)
    span = int(tokens.max()) + 1
    members = members[np.argsort(place[pack_of[members]] * span + (span - 1 - tokens[members]), kind="stable")]
    counts = np.bincount(place[pack_of[members]], minlength=len(packs))
    at = (np.cumsum(counts) - counts)[:, None] + np.arange(_SHARED)
    return np.where(np.arange(_SHARED) < counts[:, None], members[np.minimum(at, len(members) - 1)], -1)


def _subset_sums(values_MS: Singles, start_M: Singles) -> Singles:
    """Sum every subset of each row's values onto its start; bit i of a column's number stands for value i."""
    sums = np.empty((len(values_MS), 1 << values_MS.shape[1]), dtype=np.float32)
    sums[:, 0] = start_M
    for bit in range(values_MS.shape[1]):
        np.add(sums[:, : 1 << bit], values_MS[:, bit : bit + 1], out=sums[:, 1 << bit : 2 << bit])
    return sums
