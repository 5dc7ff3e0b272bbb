"""Spreading samples over packs: the emptiest pack takes the next largest sample, hundreds of packs at a time.

Numbers here are whole numbers, some of them held in float64: sums are exact in any order, so every machine gets the
same packs.
"""

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_CERTAIN = 0.9  # share of the cost above text's that is spread before lengths are
_FULL = 0.9995  # tokens are aimed at this share of the budget, so that rounding to samples rarely exceeds it
_FEW, _MANY = 16, 256  # rounds that serve fewer packs than 16 and 1 in 256 are done one sample at a time
_HALVINGS = 40


def spread(tokens: Ints, costs: Floats, num_packs: int, budget_tokens: int, max_items: int | None = None) -> Ints:
    """Assign samples to packs so that packs are alike: equal FLOPs first, then as equal in tokens as that allows.

    A sample's cost is what its tokens would cost in short texts, and what attention and vision add to it. The addition
    is spread first, largest first. Then each pack's length is chosen: the token budget, less where the pack already
    holds more than its share of the additional cost; and short samples fill packs up to these lengths.

    Args:
        tokens: length of each sample [tokens], shape (N,), each >= 1.
        costs: of each sample, whole numbers in any unit, shape (N,).
        num_packs: how many packs to make.
        budget_tokens: tokens that a pack should not exceed [tokens]; large samples may make it.
        max_items: samples that a pack must not exceed; at least N / num_packs. None sets no limit.

    Returns:
        The pack of each sample, shape (N,).
    """
    if not len(tokens):
        return np.zeros(0, dtype=np.int64)
    per_token = float((costs / tokens).min())
    extra = np.floor(np.maximum(costs - per_token * tokens, 0.0))
    by_extra = np.argsort(-extra, kind="stable")
    reached = np.cumsum(extra[by_extra])
    num_first = int(np.searchsorted(reached, _CERTAIN * reached[-1])) + 1 if reached[-1] > 0 else 0
    first, rest = by_extra[:num_first], by_extra[num_first:]
    rest = rest[largest_first(tokens[rest])]

    pack_of = np.empty(len(tokens), dtype=np.int64)
    free = None if max_items is None else np.full(num_packs, max_items)
    pack_extra = np.zeros(num_packs)
    pack_of[first] = fill_emptiest(extra[first], pack_extra, free)
    pack_tokens = sums_of(pack_of[first], tokens[first], num_packs)
    aims = _aims(pack_tokens, pack_extra, float(tokens.sum()), per_token, np.floor(budget_tokens * _FULL))
    pack_of[rest] = fill_emptiest(tokens[rest].astype(np.float64), pack_tokens - aims, free)
    return pack_of


def by_number(numbers: Ints) -> Ints:
    """Sort whole numbers >= 0 stably, smallest first; small ones in linear time, as numpy sorts 16 bits."""
    small = not len(numbers) or int(numbers.max()) < 1 << 16
    return np.argsort(numbers.astype(np.uint16) if small else numbers, kind="stable")


def largest_first(numbers: Ints) -> Ints:
    """Sort whole numbers stably, largest first."""
    return by_number(numbers.max(initial=0) - numbers)


def sums_of(pack_of: Ints, values: NDArray[Any], num_packs: int) -> Floats:
    """Sum the values of each pack's samples, shape (num_packs,)."""
    return np.bincount(pack_of, values, num_packs).astype(np.float64, copy=False)


def _aims(pack_tokens: Floats, pack_extra: Floats, total: float, per_token: float, most: float) -> Floats:
    """Choose each pack's length: at most `most`, of one cost where they are shorter, and `total` in all."""
    low, high = 0.0, float(pack_extra.max()) + per_token * most
    aims = np.full(len(pack_tokens), most)
    for _ in range(_HALVINGS):
        cost = (low + high) / 2
        aims = np.minimum(most, np.floor((cost - pack_extra) / per_token))
        if np.maximum(aims, pack_tokens).sum() < total:
            low = cost
        else:
            high = cost
    return aims


def fill_emptiest(weights: Floats, loads: Floats, free: Ints | None = None) -> Ints:
    """Let the emptiest pack take the next sample, again and again.

    All packs that the next sample would not lift above another one's start are served in one vector operation.

    Args:
        weights: of the samples, descending, shape (N,).
        loads: of the packs so far, shape (K,); what is added to them is written here.
        free: samples that each pack may still take, shape (K,); updated too. None sets no limit.

    Returns:
        The pack of each sample, shape (N,).
    """
    pack_of = np.empty(len(weights), dtype=np.int64)
    done = 0
    order, levels = _emptiest_first(loads, free)
    while done < len(weights):
        served = int(np.searchsorted(levels, levels[0] + weights[done], side="right"))
        if served < _FEW + len(order) // _MANY:
            stop = min(len(weights), done + len(order))
            pack_of[done:stop] = _one_by_one(weights[done:stop], loads, free)
            done = stop
            order, levels = _emptiest_first(loads, free)
            continue
        packs = order[: min(served, len(weights) - done)]
        raised = levels[: len(packs)] + weights[done : done + len(packs)]
        pack_of[done : done + len(packs)] = packs
        loads[packs] = raised
        done += len(packs)
        order, levels = order[len(packs) :], levels[len(packs) :]
        if free is not None:
            free[packs] -= 1
            packs, raised = packs[free[packs] > 0], raised[free[packs] > 0]
        again = np.argsort(raised, kind="stable")
        at = np.searchsorted(levels, raised[again], side="right")
        order, levels = np.insert(order, at, packs[again]), np.insert(levels, at, raised[again])
    return pack_of


def _emptiest_first(loads: Floats, free: Ints | None) -> tuple[Ints, Floats]:
    """Packs that may take more, and their loads, lowest first."""
    packs = np.arange(len(loads)) if free is None else np.flatnonzero(free > 0)
    packs = packs[np.argsort(loads[packs], kind="stable")]
    return packs, loads[packs]


def _one_by_one(weights: Floats, loads: Floats, free: Ints | None) -> list[int]:
    """The same with a heap, for loads so uneven that a round would serve few packs."""
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
