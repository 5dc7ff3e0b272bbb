"""Packing strategies by name: each assigns the samples of a window to packs that make whole steps.

`balanced` (see the module of that name) makes packs of equal cost. The textbook ones, for comparison, take samples as
they come and keep packs in the order in which they were opened. What makes no whole step is left to the next window.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.packing.balanced import assign_lpt, fix_overflow, largest_first, overflow, sums_of
from headway.packing.bins import Packer
from headway.packing.budget import Budget, Size
from headway.packing.steps import BALANCE, balance_of, group_into_steps

Strategy = Literal["balanced", "best_fit", "first_fit", "next_fit", "none"]
"""Name of a way to assign samples to packs; "none" gives each sample a pack of its own."""

STRATEGIES: tuple[Strategy, ...] = ("balanced", "best_fit", "first_fit", "next_fit", "none")
"""Every `Strategy`."""

FILL = 0.9912
"""Share of the token and patch budgets that `balanced` plans packs for; the rest lets costs be made equal."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_PROBE = 1024  # samples by which it is seen whether packs of samples as they come are full
_COST_BITS = 31  # plans use costs as whole numbers up to 2**31, so that sums of millions are exact


def cost_shift(heaviest: float) -> int:
    """The power of two to scale costs by, so that this one, the largest, is just below 2**31."""
    return _COST_BITS - int(np.frexp(heaviest)[1])


def whole_costs(costs: Floats, shift: int) -> Floats:
    """Costs as whole numbers, held in float64; each at least 1."""
    integers: Floats = np.maximum(np.rint(np.ldexp(costs, shift)), 1.0)
    return integers


@dataclass(frozen=True, slots=True)
class Candidates:
    """Samples to pack.

    Attributes:
        tokens: length of each sample [tokens], shape (N,).
        patches: vision patches of each sample [patches], shape (N,).
        costs: cost of each sample, whole numbers in any unit, held in float64, shape (N,).
        budget: limits of a pack.
        packs_per_step: packs of a step over all ranks.
        accumulation: packs of a step that one rank accumulates gradients over.
        key: seed of everything that is chosen at random.
        balance: mean / max FLOPs over ranks that packs are sorted for, a fraction.
    """

    tokens: Ints
    patches: Ints
    costs: Floats
    budget: Budget
    packs_per_step: int
    accumulation: int
    key: int
    balance: float = BALANCE

    @property
    def needs(self) -> Ints:
        """Tokens, patches and count (1) of each sample, for the budgets that are set, shape (R, N)."""
        ones = np.ones_like(self.tokens) if self.budget.items is not None else None
        patches = self.patches if self.budget.patches is not None else None
        return np.stack([column for column in (self.tokens, patches, ones) if column is not None])

    @property
    def caps(self) -> Ints:
        """The budgets that are set, shape (R,); a budget of no patches counts as 1, since no sample has any."""
        caps = (self.budget.tokens, self.budget.patches, self.budget.items)
        return np.array([max(cap, 1) for cap in caps if cap is not None])

    def packs_needed(self) -> Floats:
        """Packs that the samples up to each one fill as `balanced` fills them, at most one each, shape (N,)."""
        shares = np.cumsum(self.needs, axis=1) / self.caps[:, None]
        shares[: 1 + (self.budget.patches is not None)] /= FILL
        needed: Floats = np.minimum(shares.max(axis=0), np.arange(1, len(self.tokens) + 1))
        return needed

    def part(self, samples: Ints) -> "Candidates":
        """The window of some of the samples."""
        tokens, patches, costs = self.tokens[samples], self.patches[samples], self.costs[samples]
        return replace(self, tokens=tokens, patches=patches, costs=costs)


def pack_window(window: Candidates, strategy: Strategy, last: bool) -> tuple[Ints, int]:
    """Assign a window's samples to packs that make whole steps.

    Args:
        window: the samples.
        strategy: one of `STRATEGIES`.
        last: whether no window follows, so that every sample must be assigned.

    Returns:
        The pack of each sample, -1 where it is left to the next window, shape (N,); and the number of packs, a multiple
        of `packs_per_step`. Packs are numbered in the order in which they are trained on; of the last window's some may
        be empty.
    """
    if not len(window.tokens):
        return np.zeros(0, dtype=np.int64), 0
    pack_of, num_packs = _PACKERS[strategy](window)
    while last and (pack_of < 0).any():
        remaining = np.flatnonzero(pack_of < 0)
        more, num_more = _balanced(window.part(remaining), at_least=1)
        pack_of[remaining[more >= 0]] = more[more >= 0] + num_packs
        num_packs += num_more
    return pack_of, num_packs


def _equal_or_plain(window: Candidates) -> tuple[Ints, int]:
    """Packs of equal cost; or `next_fit`'s packs, if these are as full and as equal (samples of one length)."""
    plain = _in_full_packs(window)
    equal = _balanced(window)
    if plain is None:
        return equal
    (fill, balance), (plain_fill, plain_balance) = _fill_and_balance(window, *equal), _fill_and_balance(window, *plain)
    return plain if plain_fill >= fill and plain_balance >= balance else equal


def _in_full_packs(window: Candidates) -> tuple[Ints, int] | None:
    """Whole steps of packs of samples as they come; None where these are less full than packs of equal cost."""
    probe = window.part(np.arange(min(_PROBE, len(window.tokens))))
    packs, tokens = int(_next_fit_packs(probe)[-1]), int(probe.tokens.sum())
    if tokens < FILL * packs * window.budget.tokens:  # the last pack, which more samples may fill, does not count
        return None
    pack_of = _next_fit_packs(window)
    # the last pack waits for more samples, unless it is full
    if window.tokens[pack_of == pack_of[-1]].sum() < FILL * window.budget.tokens:
        pack_of = np.where(pack_of == pack_of[-1], -1, pack_of)
    pack_of, num_packs = _whole_steps(pack_of, window, all_open=False)
    return (_in_steps(pack_of, num_packs, window), num_packs) if num_packs else None


def _fill_and_balance(window: Candidates, pack_of: Ints, num_packs: int) -> tuple[float, float]:
    """Share of the packs' tokens that are real, and mean balance of their steps; of no packs, the balance wanted."""
    if not num_packs:
        return 0.0, window.balance
    placed = pack_of >= 0
    costs_SP = sums_of(pack_of[placed], window.costs[placed], num_packs).reshape(-1, window.packs_per_step)
    balance = balance_of(costs_SP, window.packs_per_step // window.accumulation)
    return float(window.tokens[placed].sum()) / (num_packs * window.budget.tokens), float(np.cumsum(balance)[-1]) / len(
        balance
    )


def _in_steps(pack_of: Ints, num_packs: int, window: Candidates) -> Ints:
    """Group packs into steps, and number them in the order in which they are trained on."""
    placed = pack_of >= 0
    costs = sums_of(pack_of[placed], window.costs[placed], num_packs)
    steps = group_into_steps(costs, window.packs_per_step, window.accumulation, window.key, window.balance)
    number = np.empty(num_packs, dtype=np.int64)
    number[steps.reshape(-1)] = np.arange(num_packs)
    return np.where(placed, number[pack_of], -1)


def _balanced(window: Candidates, at_least: int = 0) -> tuple[Ints, int]:
    # Cut the window where its samples fill whole steps; what lies behind stays in the order.
    needed = window.packs_needed()
    num_steps = int(needed[-1]) // window.packs_per_step
    if num_steps:
        num_taken = int(np.searchsorted(needed, num_steps * window.packs_per_step, side="right"))
    else:
        num_steps, num_taken = at_least, len(needed) if at_least else 0
    pack_of = np.full(len(needed), -1)
    if not num_steps:
        return pack_of, 0

    # Packs of like cost and length.
    samples = np.arange(num_taken)
    num_packs = num_steps * window.packs_per_step
    pack_of[samples] = _alike(window.part(samples), num_packs)

    # Samples so large that few fit together leave many over: whole steps of these, too.
    remaining = np.flatnonzero(pack_of[:num_taken] < 0)
    if len(remaining) * 8 > num_taken:
        more, num_more = _best_fit_decreasing(window.part(remaining))
        pack_of[remaining] = np.where(more >= 0, more + num_packs, -1)
        num_packs += num_more

    return _in_steps(pack_of, num_packs, window), num_packs


def _alike(window: Candidates, num_packs: int) -> Ints:
    """Make packs of like cost and length; samples that fit nowhere get -1."""
    needs, caps = window.needs, window.caps
    pack_of = assign_lpt(window.tokens, window.costs, num_packs, window.budget.tokens, window.budget.items)
    pack_of = fix_overflow(pack_of, needs, caps, window.costs, num_packs, window.key)
    # Out of packs that are overfull still, take the shortest samples that help, until the budgets hold.
    over = overflow(pack_of, needs, caps, num_packs)
    by_pack = np.argsort(pack_of, kind="stable")
    starts = np.searchsorted(pack_of[by_pack], np.arange(num_packs + 1))
    for pack in np.flatnonzero((over > 0).any(axis=0)).tolist():
        left = over[:, pack]
        members = by_pack[starts[pack] : starts[pack + 1]]
        for sample in members[np.argsort(window.tokens[members], kind="stable")].tolist():
            if (left > 0).any() and (needs[:, sample] > 0)[left > 0].any():
                pack_of[sample] = -1
                left = left - needs[:, sample]
    return pack_of


def _best_fit_decreasing(window: Candidates) -> tuple[Ints, int]:
    order = largest_first(window.tokens)
    pack_of = np.empty(len(order), dtype=np.int64)
    pack_of[order], num_packs = _in_order(window.part(order), "best_fit")
    return pack_of, num_packs


def _in_order(window: Candidates, strategy: Literal["best_fit", "first_fit"]) -> tuple[Ints, int]:
    packer = Packer(window.budget, strategy)
    sizes = zip(window.tokens.tolist(), window.patches.tolist(), strict=True)
    pack_of = np.array([packer.place(Size(*size)) for size in sizes], dtype=np.int64)
    return _whole_steps(pack_of, window, all_open=True)


def _next_fit(window: Candidates) -> tuple[Ints, int]:
    return _whole_steps(_next_fit_packs(window), window, all_open=False)


def _next_fit_packs(window: Candidates) -> Ints:
    """The pack of each sample, as they come."""
    # Each pack ends where the running sum of some budget would pass its cap.
    reached, caps = np.cumsum(window.needs, axis=1), window.caps
    pack_of = np.empty(reached.shape[1], dtype=np.int64)
    start = pack = 0
    base = np.zeros(len(caps), dtype=np.int64)
    while start < len(pack_of):
        stop = min(
            int(np.searchsorted(row, cap, side="right"))
            for row, cap in zip(reached, (base + caps).tolist(), strict=True)
        )
        pack_of[start:stop] = pack
        base = reached[:, stop - 1]
        start, pack = stop, pack + 1
    return pack_of


def _none(window: Candidates) -> tuple[Ints, int]:
    return _whole_steps(np.arange(len(window.tokens)), window, all_open=False)


def _whole_steps(pack_of: Ints, window: Candidates, all_open: bool) -> tuple[Ints, int]:
    """Leave the packs that make no whole step to the next window: the emptiest where all are open, else the last."""
    num_packs = int(pack_of.max(initial=-1)) + 1
    num_kept = num_packs // window.packs_per_step * window.packs_per_step
    if not all_open:
        return np.where(pack_of < num_kept, pack_of, -1), num_kept
    tokens = np.bincount(pack_of, window.tokens, num_packs)
    fullest = np.sort(np.argsort(-tokens, kind="stable")[:num_kept])
    number = np.full(num_packs, -1)
    number[fullest] = np.arange(num_kept)
    return number[pack_of], num_kept


_PACKERS: dict[Strategy, Callable[[Candidates], tuple[Ints, int]]] = {
    "balanced": _equal_or_plain,
    "best_fit": lambda window: _in_order(window, "best_fit"),
    "first_fit": lambda window: _in_order(window, "first_fit"),
    "next_fit": _next_fit,
    "none": _none,
}
