"""The heart of the strategy `balanced`: packs of equal cost that still keep their budgets, in two steps.

1. `assign_lpt` is greedy list scheduling, longest processing time first (LPT): samples are jobs, packs are machines,
   and the next largest sample goes to the least loaded pack.
2. `fix_overflow` is a local search: an overfull and a roomy pack exchange samples where that helps.

Numbers are whole, some of them held in float64: sums are exact in any order, so every machine gets the same packs.

Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies" (LPT).
"""

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.packing.order import key_of, shuffled

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

_CERTAIN = 0.9  # share of the cost of attention and vision that is assigned before lengths are looked at
_FULL = 0.9995  # packs aim at this share of the token budget, so that rounding to whole samples rarely exceeds it
_FEW, _MANY = 16, 256  # rounds that serve fewer packs than 16 and 1 in 256 are done one sample at a time
_HALVINGS = 40

_EXCHANGED = 4  # samples of each pack of a pair that are redistributed
_ROUNDS = 16
_BATCH = 256  # pairs at a time, so that their tables stay in the processor's cache
_OVER = 64.0  # weight of exceeding a budget by all of it, against a difference of one mean pack's cost


def assign_lpt(tokens: Ints, costs: Floats, num_packs: int, budget_tokens: int, max_items: int | None = None) -> Ints:
    """Assign samples to packs of equal FLOPs, and as equal in tokens as that allows.

    Equal tokens alone leave costs unequal, since attention grows with the square of a sample's length; equal costs
    alone exceed the token budget. So samples that are expensive for their length are assigned first, by cost, and the
    others then fill each pack up to a length of its own, at which all packs cost the same.

    Args:
        tokens: length of each sample [tokens], shape (N,), each >= 1.
        costs: cost of each sample, whole numbers in any unit, shape (N,).
        num_packs: how many packs to make, K.
        budget_tokens: tokens that a pack should not exceed [tokens]; large samples may make it.
        max_items: samples that a pack must not exceed; at least N / num_packs. None sets no limit.

    Returns:
        The pack of each sample, shape (N,).
    """
    if not len(tokens):
        return np.zeros(0, dtype=np.int64)
    # Split each cost in two: a part per token, at the price of the cheapest sample, and the extra of attention and
    # vision.
    per_token = float((costs / tokens).min())
    extra = np.floor(np.maximum(costs - per_token * tokens, 0.0))

    # The few samples that hold nine tenths of the extra come first; all others only have to fill packs up.
    by_extra = np.argsort(-extra, kind="stable")
    reached = np.cumsum(extra[by_extra])
    num_first = int(np.searchsorted(reached, _CERTAIN * reached[-1])) + 1 if reached[-1] > 0 else 0
    first, others = by_extra[:num_first], by_extra[num_first:]
    others = others[largest_first(tokens[others])]

    # First pass: LPT over the extra, so that no pack gets much more attention and vision than another.
    pack_of = np.empty(len(tokens), dtype=np.int64)
    free = None if max_items is None else np.full(num_packs, max_items)
    pack_extra = np.zeros(num_packs)
    pack_of[first] = fill_least_loaded(extra[first], pack_extra, free)

    # Second pass: LPT over tokens. A pack's load is how far it is from the length at which its cost is everyone's.
    pack_tokens = sums_of(pack_of[first], tokens[first], num_packs)
    targets = _target_lengths(pack_tokens, pack_extra, float(tokens.sum()), per_token, np.floor(budget_tokens * _FULL))
    pack_of[others] = fill_least_loaded(tokens[others].astype(np.float64), pack_tokens - targets, free)
    return pack_of


def _target_lengths(pack_tokens: Floats, pack_extra: Floats, total: float, per_token: float, most: float) -> Floats:
    """Choose the length of each pack, shape (K,): at most `most`, and less where that would cost more than the others.

    The one cost that all packs get is found by bisection: the lowest at which their lengths add up to `total`.
    """
    low, high = 0.0, float(pack_extra.max()) + per_token * most
    targets = np.full(len(pack_tokens), most)
    for _ in range(_HALVINGS):
        cost = (low + high) / 2
        targets = np.minimum(most, np.floor((cost - pack_extra) / per_token))
        if np.maximum(targets, pack_tokens).sum() < total:
            low = cost
        else:
            high = cost
    return targets


def fill_least_loaded(weights: Floats, loads: Floats, free: Ints | None = None) -> Ints:
    """Give each sample in turn to the pack with the least load, as LPT does where weights descend.

    The result is that of a heap, one sample at a time. But hundreds of packs are served in one vector operation: all
    whose load is below what the first of them will have once served.

    Args:
        weights: weight of each sample, descending, shape (N,).
        loads: load of each pack so far, shape (K,); what is added is written here.
        free: samples that each pack may still take, shape (K,); updated too. None sets no limit.

    Returns:
        The pack of each sample, shape (N,).
    """
    pack_of = np.empty(len(weights), dtype=np.int64)
    done = 0
    order, levels = _least_loaded_first(loads, free)
    while done < len(weights):
        # Number of packs that are served before the first is due a second time.
        served = int(np.searchsorted(levels, levels[0] + weights[done], side="right"))
        if served < _FEW + len(order) // _MANY:  # too few for a vector operation to pay: a heap for one round
            stop = min(len(weights), done + len(order))
            pack_of[done:stop] = _one_by_one(weights[done:stop], loads, free)
            done = stop
            order, levels = _least_loaded_first(loads, free)
            continue
        packs = order[: min(served, len(weights) - done)]
        raised = levels[: len(packs)] + weights[done : done + len(packs)]
        pack_of[done : done + len(packs)] = packs
        loads[packs] = raised
        done += len(packs)
        # Keep the packs sorted by load: take out those served, and merge them back in where they belong now.
        order, levels = order[len(packs) :], levels[len(packs) :]
        if free is not None:
            free[packs] -= 1
            packs, raised = packs[free[packs] > 0], raised[free[packs] > 0]
        again = np.argsort(raised, kind="stable")
        at = np.searchsorted(levels, raised[again], side="right")
        order, levels = np.insert(order, at, packs[again]), np.insert(levels, at, raised[again])
    return pack_of


def _least_loaded_first(loads: Floats, free: Ints | None) -> tuple[Ints, Floats]:
    packs = np.arange(len(loads)) if free is None else np.flatnonzero(free > 0)
    packs = packs[np.argsort(loads[packs], kind="stable")]
    return packs, loads[packs]


def _one_by_one(weights: Floats, loads: Floats, free: Ints | None) -> list[int]:
    heap: list[tuple[Any, int]] = [
        (load, pack) for pack, load in enumerate(loads.tolist()) if free is None or free[pack] > 0
    ]
    heapq.heapify(heap)
    packs = []
    for weight in weights.tolist():
        load, pack = heap[0]
        packs.append(pack)
        loads[pack] = load + weight
        if free is not None:
            free[pack] -= 1
        if free is not None and free[pack] == 0:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (load + weight, pack))
    return packs


def overflow(pack_of: Ints, needs: Ints, caps: Ints, num_packs: int) -> Ints:
    """Compute how far each pack exceeds each budget, shape (R, K); negative where it has room."""
    return np.stack([np.bincount(pack_of, need, num_packs) for need in needs]).astype(np.int64) - caps[:, None]


def fix_overflow(pack_of: Ints, needs: Ints, caps: Ints, costs: Floats, num_packs: int, key: int) -> Ints:
    """Let overfull packs exchange samples with roomy ones, until the budgets hold or rounds run out.

    Each pair of packs puts its four largest samples of each side on the table, and of all 256 ways to divide these
    eight, takes the one that keeps both within their budgets and makes their costs most alike.

    Args:
        pack_of: the pack of each sample, shape (N,).
        needs: what each sample takes of each budget, tokens first, shape (R, N).
        caps: the budgets, shape (R,).
        costs: cost of each sample, whole numbers in any unit, shape (N,).
        num_packs: K.
        key: seed of the choice of pairs.

    Returns:
        The pack of each sample, shape (N,).
    """
    pack_of = pack_of.copy()
    costs = costs * (num_packs / float(costs.sum()))  # in mean packs
    scales = np.array([_OVER / cap for cap in caps])
    by_size = largest_first(needs[0])
    for number in range(_ROUNDS):
        over = overflow(pack_of, needs, caps, num_packs)
        fullness = (over / caps[:, None]).max(axis=0)
        overfull, others = np.flatnonzero(fullness > 0), np.flatnonzero(fullness <= 0)
        if not len(overfull) or not len(others):
            break
        # Pair each overfull pack with one from the emptier half of the others, at random.
        median = np.partition(fullness[others], len(others) // 2)[len(others) // 2]
        roomy = others[fullness[others] <= median]
        roomy = roomy[shuffled(len(roomy), key_of(key, number, 0))]
        if len(overfull) > len(roomy):  # some overfull packs have no partner this time
            overfull = overfull[shuffled(len(overfull), key_of(key, number, 1))]
        num_pairs = min(len(overfull), len(roomy))
        pairs = np.stack([overfull[:num_pairs], roomy[:num_pairs]])
        pack_costs = sums_of(pack_of, costs, num_packs)
        table = np.concatenate([_largest(pack_of, packs, by_size, num_packs) for packs in pairs], axis=1)
        for first in range(0, num_pairs, _BATCH):
            batch = slice(first, first + _BATCH)
            _redistribute(pack_of, pairs[:, batch], table[batch], needs, over, scales, costs, pack_costs)
    return pack_of


def _redistribute(
    pack_of: Ints,
    pairs: Ints,
    table: Ints,
    needs: Ints,
    over: Ints,
    scales: Floats,
    costs: Floats,
    pack_costs: Floats,
) -> None:
    """Divide the samples on the table of each pair of packs as well as can be; writes `pack_of`.

    Args:
        pack_of: the pack of each sample, shape (N,).
        pairs: packs, each in one pair, shape (2, M).
        table: the samples of each pair, those of its first pack first, -1 for none, shape (M, 2 S).
        needs: what each sample takes of each budget, shape (R, N).
        over: how far each pack exceeds each budget, shape (R, K).
        scales: weight of exceeding each budget by 1, shape (R,).
        costs: cost of each sample in mean packs, shape (N,).
        pack_costs: cost of each pack, shape (K,).
    """
    there = table >= 0
    # Penalty of every division, (M, 2**2S): half the difference of the costs, and for each budget what the fuller pack
    # exceeds it by. The fuller one's excess is the mean of both plus half their difference.
    penalty = _half_differences(np.where(there, costs[table], 0.0), pack_costs[pairs])
    for need, excesses, scale in zip(needs, over[:, pairs] * scales[:, None, None], scales, strict=True):
        worse = _half_differences(np.where(there, need[table] * scale, 0.0), excesses)
        worse += (excesses.sum(axis=0) / 2).astype(np.float32)[:, None]
        penalty += np.maximum(worse, 0, out=worse)
    best = penalty.argmin(axis=1)
    as_they_are = (1 << _EXCHANGED) - 1  # the first pack's samples in the first, the second's in the second
    better = penalty[np.arange(len(table)), best] < penalty[:, as_they_are]
    in_first = (best[:, None] >> np.arange(table.shape[1])) & 1 == 1
    moved = there & better[:, None]
    pack_of[table[moved]] = np.where(in_first, pairs[0][:, None], pairs[1][:, None])[moved]


def _half_differences(shared: Floats, totals: Floats) -> Singles:
    """Half the difference of two packs for every way to divide the samples on their table, shape (M, 2**2S).

    Args:
        shared: weight of each sample on the table, the first pack's first, shape (M, 2 S).
        totals: weight of both packs now, shape (2, M).
    """
    # A division is a number whose bit i says that sample i goes to the first pack. Half the difference is the first
    # pack's weight minus the mean of both, so the sums of all subsets, built by doubling, are all it takes.
    without = totals[0] - shared[:, :_EXCHANGED].sum(axis=1) - totals.sum(axis=0) / 2
    values_MS = shared.astype(np.float32)
    sums = np.empty((len(shared), 1 << shared.shape[1]), dtype=np.float32)
    sums[:, 0] = without.astype(np.float32)
    for bit in range(shared.shape[1]):
        np.add(sums[:, : 1 << bit], values_MS[:, bit : bit + 1], out=sums[:, 1 << bit : 2 << bit])
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
    at = (np.cumsum(counts) - counts)[:, None] + np.arange(_EXCHANGED)
    return np.where(np.arange(_EXCHANGED) < counts[:, None], members[np.minimum(at, len(members) - 1)], -1)


def smallest_first(numbers: Ints) -> Ints:
    """Argsort whole numbers >= 0 stably; 16 bits in linear time, as numpy sorts them."""
    small = not len(numbers) or int(numbers.max()) < 1 << 16
    return np.argsort(numbers.astype(np.uint16) if small else numbers, kind="stable")


def largest_first(numbers: Ints) -> Ints:
    """Argsort whole numbers >= 0 stably, in descending order."""
    return smallest_first(numbers.max(initial=0) - numbers)


def sums_of(pack_of: Ints, values: NDArray[Any], num_packs: int) -> Floats:
    """Sum the values of each pack's samples, shape (num_packs,)."""
    return np.bincount(pack_of, values, num_packs).astype(np.float64, copy=False)
