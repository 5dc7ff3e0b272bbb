"""The plan: which samples make a pack and which packs a step, as a pure function of lengths, order, budgets and seed.

Every rank computes the same plan without communication: decisions rest on whole numbers and on stable sorts, never on
rounding that differs between processors.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.errors import CheckpointError, ConfigError, DataError
from headway.packing.balanced import smallest_first, sums_of
from headway.packing.budget import Budget, Size, over_budget
from headway.packing.items import Items
from headway.packing.order import Order, key_of
from headway.packing.steps import BALANCE, balance_of
from headway.packing.strategies import STRATEGIES, Candidates, Strategy, cost_shift, pack_window, whole_costs

Ints = NDArray[np.int64]

WINDOW = 131_072
"""Samples that are packed together unless told otherwise; more where `MIN_STEPS` steps need more."""

MIN_STEPS = 16
MOST_PACKS = 2**20
"""Packs of a step over all ranks at most."""

_UNLIMITED = 1 << 62
_LOST = 0.02  # balance over ranks that may be lost for windows that end with epochs of a few steps


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """One optimizer step, over all ranks.

    Attributes:
        packs: items of each pack, shape (packs_per_step,) of (n,). At the very end of a finite order some are empty.
        costs: useful FLOPs of each pack, shape (packs_per_step,).
        reached: items of the order that have been trained on once the step is done.
    """

    packs: list[Ints]
    costs: NDArray[np.float64]
    reached: int = 0


class _Start(NamedTuple):
    """Start of a window: its place, what is carried into it, how its steps are cut, and where the order ended then.

    Windows that began before they were cut at the end of an epoch are packed as they were (`ends_epochs`).
    """

    position: int
    carried: tuple[int, ...]
    packs_per_step: int
    accumulation: int
    end: int | None
    ends_epochs: bool


class _PackedWindow(NamedTuple):
    """The packs of a window in the order in which they are trained on, and where the next window starts."""

    items: Ints
    bounds: Ints
    position: int
    carried: tuple[int, ...]

    @property
    def num_packs(self) -> int:
        return len(self.bounds) - 1


class Plan:
    """Steps of packs.

    The order is packed a window at a time: its next samples, and what earlier windows left over. A window makes whole
    steps, and steps of a window are shuffled. It ends with an epoch: what is left of that and fills no step makes one
    with the first samples of the next, so that each sample has played once before any has twice, but for that step's.

    Args:
        items: the samples to plan.
        order: the order in which they are trained on.
        budget: limits of a pack.
        packs_per_step: packs of an optimizer step over all ranks, data-parallel ranks times accumulation.
        strategy: "balanced", or one of the textbook ones for comparison.
        seed: of everything that the plan chooses at random.
        window: samples packed together; when None 131,072, at most an epoch, and at least 16 steps' worth.
        accumulation: packs of a step that one rank accumulates gradients over; with more, heavy and light packs pair
            up on a rank, so that less is sorted.
        balance: mean / max FLOPs over ranks, mean over steps, that "balanced" sorts packs for where they differ, a
            fraction. Less leaves steps better mixed.

    Raises:
        ConfigError: an unknown strategy, or a number below 1.
        DataError: an item that exceeds the budget.

    >>> items = Items.of([6, 5, 4, 5])
    >>> plan = Plan(items, Order.epochs(items.sizes, 1), Budget(11), packs_per_step=2)
    >>> [step.costs.tolist() for step, state in plan.steps()]
    [[10.0, 10.0]]
    """

    def __init__(
        self,
        items: Items,
        order: Order,
        budget: Budget,
        packs_per_step: int,
        *,
        strategy: Strategy = "balanced",
        seed: int = 0,
        window: int | None = None,
        accumulation: int = 1,
        balance: float = BALANCE,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ConfigError(f"Unknown packing strategy {strategy!r}. Allowed: {', '.join(STRATEGIES)}.")
        if packs_per_step < 1 or accumulation < 1 or packs_per_step % accumulation:
            raise ConfigError(
                f"A plan of {packs_per_step} packs per step with an accumulation of {accumulation}: both must be at "
                "least 1. The packs of a step are ranks times accumulation."
            )
        if packs_per_step > MOST_PACKS:
            raise ConfigError(
                f"A step of {packs_per_step:,} packs (ranks times accumulation) is too large, because at most "
                f"{MOST_PACKS:,} can be planned. Use fewer ranks or less accumulation."
            )
        if window is not None and window < 1:
            raise ConfigError(
                f"A window of {window} samples is too small. Give at least 1 sample. Thousands pack well."
            )
        if not 0 <= balance <= 1:
            raise ConfigError(
                f"A balance of {balance} over ranks is not allowed. The balance is mean / max FLOPs, a fraction from "
                "0 to 1."
            )
        _check_sizes(items, budget)
        self.items, self.order, self.budget = items, order, budget
        self.packs_per_step, self.strategy, self.seed = packs_per_step, strategy, seed
        self.accumulation, self.window, self.balance = accumulation, window, balance
        self._shift = cost_shift(float(items.costs.max(initial=0.0)))

    def settings(self) -> dict[str, Any]:
        """Settings that decide the plan besides items and order, as plain JSON values; ranks are free to change."""
        return {
            "budget": [self.budget.tokens, self.budget.patches, self.budget.items],
            "strategy": self.strategy,
            "seed": self.seed,
            "window": self.window,
            "balance": self.balance,
        }

    def initial_state(self) -> dict[str, Any]:
        """The state before the first step."""
        return self._state(self._start_at(0, (), ends_epochs=self.ends_epochs), 0)

    @functools.cached_property
    def ends_epochs(self) -> bool:
        """Tell whether windows end where epochs do; not if short epochs would leave ranks with unequal work."""
        start = self._start_at(0, (), ends_epochs=True)
        end = self.order.lap_end(0)
        if self.strategy != "balanced" or end == self.order.length:
            return True
        needed = self._window(self.order.draw(0, min(end, WINDOW)), start).packs_needed()
        if not len(needed) or needed[-1] >= MIN_STEPS * self.packs_per_step:
            return True
        steps = [step for step, _ in self._steps(start, 0, ends_epochs=True, until=end)]
        ranks = self.packs_per_step // self.accumulation
        balances = balance_of(np.stack([step.costs for step in steps]), ranks)
        return float(np.cumsum(balances)[-1]) >= (self.balance - _LOST) * len(balances)

    def steps(self, state: Mapping[str, Any] | None = None) -> Iterator[tuple[PlannedStep, dict[str, Any]]]:
        """Yield steps from a state on, each with the state that follows it.

        With the same `packs_per_step` as before, the steps are the very ones that would have followed, however many
        ranks share them. With another number, the packs of the current window keep their order and are taken so many
        at a time; the next window is packed for the new number.

        Args:
            state: as yielded with an earlier step, plain JSON values; None for the beginning.

        Raises:
            CheckpointError: the state is none of a plan.
        """
        start, done = self._start_of_state(state if state is not None else self.initial_state())
        yield from self._steps(start, done, ends_epochs=self.ends_epochs)

    def _steps(
        self, start: _Start, done: int, *, ends_epochs: bool, until: int = _UNLIMITED
    ) -> Iterator[tuple[PlannedStep, dict[str, Any]]]:
        """Yield steps from a window on, of which some are done, until so many items have been trained on."""
        while True:
            packed = self._pack(start)
            while done < packed.num_packs:
                last = packed.num_packs - done < self.packs_per_step
                if last and not self._ends(packed):
                    break
                stop = min(done + self.packs_per_step, packed.num_packs)
                step, done = self._step(packed, done, stop, start.position - len(start.carried)), stop
                yield step, self._state(start, done)
                if step.reached >= until:
                    return
            if self._ends(packed):
                return
            left = packed.items[packed.bounds[done] :].tolist()  # samples of packs too few for a step of the new size
            same = start.packs_per_step == self.packs_per_step
            accumulation = start.accumulation if same else self.accumulation
            start = self._start_at(packed.position, (*left, *packed.carried), ends_epochs=ends_epochs)
            start, done = start._replace(accumulation=accumulation), 0

    def count_steps(self, state: Mapping[str, Any] | None = None, most: int | None = None) -> int:
        """Count the steps from a state on, up to `most` of them; takes as long as it takes to plan them.

        Raises:
            CheckpointError: the state is none of a plan.
        """
        return sum(1 for _ in itertools.islice(self.steps(state), most))

    def _step(self, packed: _PackedWindow, first: int, stop: int, before: int) -> PlannedStep:
        bounds = packed.bounds[first : stop + 1]
        packs = [packed.items[low:high] for low, high in itertools.pairwise(bounds.tolist())]
        packs += [packed.items[:0]] * (self.packs_per_step - len(packs))
        pack_of = np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])
        costs = self.items.sizes_of(packed.items[bounds[0] : bounds[-1]]).costs
        return PlannedStep(packs, sums_of(pack_of, costs, len(packs)), before + int(bounds[-1]))

    def _start_at(self, position: int, carried: tuple[int, ...], *, ends_epochs: bool) -> _Start:
        return _Start(position, carried, self.packs_per_step, self.accumulation, self.order.length, ends_epochs)

    def _ends(self, packed: _PackedWindow) -> bool:
        return not packed.carried and self.order.length is not None and packed.position >= self.order.length

    def _pack(self, start: _Start) -> _PackedWindow:
        """Pack the window that starts somewhere; the same start gives the same packs."""
        carried = np.array(start.carried, dtype=np.int64)
        count = self.window or min(WINDOW, len(self.items))
        left = (_UNLIMITED if start.end is None else start.end) - start.position
        # Steps of a window are shuffled, so that it ends where all samples have played, or its stage does: else some
        # would play again before others play at all.
        end_of = self.order.lap_end if start.ends_epochs else self.order.stage_end
        within = min(left, end_of(start.position) - start.position)
        # Samples that the epoch before has left over make a step at once.
        begins = start.ends_epochs and len(carried) and start.position == end_of(start.position - 1)
        if begins:
            within, count = 0, 1
        while True:
            wanted = max(1, count - len(carried))
            items = np.concatenate([carried, self.order.draw(start.position, min(wanted, within, left))])
            drawn_all = len(items) - len(carried) >= left
            window = self._window(items, start)
            ends = wanted >= within
            enough = 1 if self.window is not None or ends else MIN_STEPS
            steps = float(window.packs_needed()[-1]) / start.packs_per_step if len(items) else 0.0
            if ends and steps < 1 and not drawn_all and start.ends_epochs:
                return self._pack_across(start, items)
            if steps < enough and not drawn_all:
                within = _UNLIMITED if ends else within
                count = 1 + max(2 * len(items), int(len(items) * enough / max(steps, 0.125)))
                continue
            pack_of, num_packs = pack_window(window, self.strategy, drawn_all)
            if num_packs or drawn_all:
                return _packed_window(items, pack_of, num_packs, start.position, len(carried))
            if ends and start.ends_epochs:
                return self._pack_across(start, items)
            within = _UNLIMITED if ends else within
            count = 2 * len(items)

    def _pack_across(self, start: _Start, remaining: Ints) -> _PackedWindow:
        """Pack what an epoch has left over, all of it, with as much of the next as makes a step.

        Args:
            start: of the window.
            remaining: the items that are left, first those carried into it.
        """
        num_carried = len(start.carried)
        place = start.position + len(remaining) - num_carried
        left = (_UNLIMITED if start.end is None else start.end) - place
        more = len(remaining)
        while True:
            items = np.concatenate([remaining, self.order.draw(place, min(more, left))])
            needed = self._window(items, start).packs_needed()
            if needed[-1] >= start.packs_per_step or len(items) - len(remaining) >= left:
                break
            more *= 2
        items = items[: max(len(remaining), int(np.searchsorted(needed, 2 * start.packs_per_step)))]
        while True:
            is_alone = len(items) == len(remaining)
            drawn_all = len(items) - len(remaining) >= left
            pack_of, num_packs = pack_window(self._window(items, start), self.strategy, is_alone or drawn_all)
            placed = pack_of[: len(remaining)]
            if num_packs and (placed >= 0).all() and (is_alone or placed.max() < start.packs_per_step):
                return _packed_window(items, pack_of, num_packs, start.position, num_carried)
            items = items[: len(remaining) + (len(items) - len(remaining)) // 2]

    def _window(self, items: Ints, start: _Start) -> Candidates:
        sizes = self.items.sizes_of(items)
        return Candidates(
            sizes.tokens,
            sizes.patches,
            whole_costs(sizes.costs, self._shift),
            self.budget,
            start.packs_per_step,
            start.accumulation,
            key_of(self.seed, start.position, len(start.carried)),
            self.balance,
        )

    def _state(self, start: _Start, done: int) -> dict[str, Any]:
        return {**start._asdict(), "carried": list(start.carried), "packs_done": done}

    def _start_of_state(self, state: Mapping[str, Any]) -> tuple[_Start, int]:
        try:
            carried = tuple(int(item) for item in state["carried"])
            numbers = [int(state[name]) for name in ("position", "packs_per_step", "accumulation", "packs_done")]
            end = None if state["end"] is None else int(state["end"])
            ends_epochs = bool(state["ends_epochs"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The state of a plan holds position, carried, packs_per_step, accumulation and packs_done, got "
                f"{dict(state)!r:.200}. Resume from a whole checkpoint."
            ) from error
        position, packs_per_step, accumulation, done = numbers
        return _Start(position, carried, packs_per_step, accumulation, end, ends_epochs), done


def _packed_window(items: Ints, pack_of: Ints, num_packs: int, position: int, num_carried: int) -> _PackedWindow:
    """Sort a window's items by pack; items behind the last one used are drawn again by the next window."""
    used = np.flatnonzero(pack_of >= 0)
    num_seen = max(num_carried, int(used[-1]) + 1 if len(used) else 0)
    left = items[:num_seen][pack_of[:num_seen] < 0]
    by_pack = used[smallest_first(pack_of[used])]
    bounds = np.concatenate([[0], np.cumsum(np.bincount(pack_of[used], minlength=num_packs))])
    return _PackedWindow(items[by_pack], bounds, position + num_seen - num_carried, tuple(left.tolist()))


def _check_sizes(items: Items, budget: Budget) -> None:
    wide = items.patches > budget.patches if budget.patches is not None else np.zeros(len(items), dtype=bool)
    over = (items.tokens > budget.tokens) | wide
    if over.any():
        item = int(over.argmax())
        size = Size(int(items.tokens[item]), int(items.patches[item]))
        raise DataError(over_budget(f"Item {item}", size, budget))
    if len(items) and int(items.tokens.min()) < 1:
        item = int(items.tokens.argmin())
        raise DataError(
            f"Item {item} has {int(items.tokens[item])} tokens, but each must have at least 1. Leave the item out."
        )
