"""Repairing packs that exceed a budget: an overfull and a roomy pack share their samples anew, many pairs at a time.

Of each pair the largest samples are divided in every possible way, 256 for four of each. The division that keeps both
within their budgets and makes their costs most alike wins.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.packing.lpt import largest_first, sums_of
from headway.packing.permute import key_of, shuffled

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
    by_size = largest_first(needs[0])
    for number in range(_ROUNDS):
        over = excess(pack_of, needs, caps, num_packs)
        fullness = (over / caps[:, None]).max(axis=0)
        overfull, others = np.flatnonzero(fullness > 0), np.flatnonzero(fullness <= 0)
        if not len(overfull) or not len(others):
            break
        median = np.partition(fullness[others], len(others) // 2)[len(others) // 2]
        roomy = others[fullness[others] <= median]
        roomy = roomy[shuffled(len(roomy), key_of(key, number, 0))]
        if len(overfull) > len(roomy):  # not all have a partner this time
            overfull = overfull[shuffled(len(overfull), key_of(key, number, 1))]
        num_pairs = min(len(overfull), len(roomy))
        pairs = np.stack([overfull[:num_pairs], roomy[:num_pairs]])
        pack_costs = sums_of(pack_of, costs, num_packs)
        shared = np.concatenate([_largest(pack_of, packs, by_size, num_packs) for packs in pairs], axis=1)
        for first in range(0, num_pairs, _BATCH):
            batch = slice(first, first + _BATCH)
            _divide(pack_of, pairs[:, batch], shared[batch], needs, over, scales, costs, pack_costs)
    return pack_of


def _divide(
    pack_of: Ints,
    pairs: Ints,
    table: Ints,
    needs: Ints,
    over: Ints,
    scales: Floats,
    costs: Floats,
    pack_costs: Floats,
) -> None:
    """Divide the largest samples of each pair of packs as well as can be; writes `pack_of`.

    Args:
        pack_of: the pack of each sample, shape (N,).
        pairs: packs, each in one pair, shape (2, M).
        table: the samples that each pair shares, those of its first pack first, -1 for none, shape (M, 2 S).
        needs: what each sample takes of each budget, shape (R, N).
        over: how far each pack exceeds each budget, shape (R, K).
        scales: what exceeding each budget by 1 weighs, shape (R,).
        costs: of the samples in mean packs, shape (N,).
        pack_costs: of the packs, shape (K,).
    """
    there = table >= 0
    penalty = _differences(np.where(there, costs[table], 0.0), pack_costs[pairs])
    for need, excesses, scale in zip(needs, over[:, pairs] * scales[:, None, None], scales, strict=True):
        worse = _differences(np.where(there, need[table] * scale, 0.0), excesses)
        worse += (excesses.sum(axis=0) / 2).astype(np.float32)[:, None]  # the excess of the fuller pack of the two
        penalty += np.maximum(worse, 0, out=worse)
    best = penalty.argmin(axis=1)
    as_they_are = (1 << _SHARED) - 1
    better = penalty[np.arange(len(table)), best] < penalty[:, as_they_are]
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


def _largest(pack_of: Ints, packs: Ints, by_size: Ints, num_packs: int) -> Ints:
    """The largest samples of some packs, shape (packs, S); -1 where a pack has fewer."""
    kind = np.uint16 if len(packs) < 1 << 16 else np.int64  # 16 bits sort fastest
    place: NDArray[Any] = np.full(num_packs, len(packs), dtype=kind)
    place[packs] = np.arange(len(packs))
    places = place[pack_of[by_size]]
    there = np.flatnonzero(places < len(packs))
    members = np.append(by_size[there[np.argsort(places[there], kind="stable")]], -1)
    counts = np.bincount(places[there], minlength=len(packs))
    at = (np.cumsum(counts) - counts)[:, None] + np.arange(_SHARED)
    return np.where(np.arange(_SHARED) < counts[:, None], members[np.minimum(at, len(members) - 1)], -1)


def _subset_sums(values_MS: Singles, start_M: Singles) -> Singles:
    """Sum every subset of each row's values onto its start; bit i of a column's number stands for value i."""
    sums = np.empty((len(values_MS), 1 << values_MS.shape[1]), dtype=np.float32)
    sums[:, 0] = start_M
    for bit in range(values_MS.shape[1]):
        np.add(sums[:, : 1 << bit], values_MS[:, bit : bit + 1], out=sums[:, 1 << bit : 2 << bit])
    return sums
