"""The plan: which samples make a pack and which packs a step, as a pure function of lengths, order, budgets and seed.

Every rank computes the same plan without communication: decisions rest on whole numbers and on stable sorts, never on
rounding that differs between processors.
"""

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
from headway.packing.steps import BALANCE
from headway.packing.strategies import STRATEGIES, Candidates, Strategy, cost_shift, pack_window, whole_costs

Ints = NDArray[np.int64]

WINDOW = 131_072
"""Samples that are packed together unless told otherwise; more where `MIN_STEPS` steps need more."""

MIN_STEPS = 16
MOST_PACKS = 2**20
"""Packs of a step over all ranks at most."""

_UNLIMITED = 1 << 62


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
    """Start of a window: its place, what is carried into it, how its steps are cut, and where the order ended then."""

    position: int
    carried: tuple[int, ...]
    packs_per_step: int
    accumulation: int
    end: int | None


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
    steps, and steps of a window are shuffled.

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
                "least 1, and the packs of a step are ranks times accumulation."
            )
        if packs_per_step > MOST_PACKS:
            raise ConfigError(
                f"A step of {packs_per_step:,} packs, ranks times accumulation: at most {MOST_PACKS:,} can be planned. "
                "Lower one of them."
            )
        if window is not None and window < 1:
            raise ConfigError(f"A window of {window} samples: it must hold at least 1; thousands pack well.")
        if not 0 <= balance <= 1:
            raise ConfigError(f"A balance of {balance} over ranks: it is mean / max FLOPs, a fraction from 0 to 1.")
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
        return self._state(_Start(0, (), self.packs_per_step, self.accumulation, self.order.length), 0)

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
        while True:
            packed = self._pack(start)
            while done < packed.num_packs:
                last = packed.num_packs - done < self.packs_per_step
                if last and not self._ends(packed):
                    break
                stop = min(done + self.packs_per_step, packed.num_packs)
                step, done = self._step(packed, done, stop, start.position - len(start.carried)), stop
                yield step, self._state(start, done)
            if self._ends(packed):
                return
            left = packed.items[packed.bounds[done] :].tolist()  # of packs too few for a step of the new size
            same = start.packs_per_step == self.packs_per_step
            accumulation = start.accumulation if same else self.accumulation
            carried = (*left, *packed.carried)
            start = _Start(packed.position, carried, self.packs_per_step, accumulation, self.order.length)
            done = 0

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

    def _ends(self, packed: _PackedWindow) -> bool:
        return not packed.carried and self.order.length is not None and packed.position >= self.order.length

    def _pack(self, start: _Start) -> _PackedWindow:
        """Pack the window that starts somewhere; the same start gives the same packs."""
        carried = np.array(start.carried, dtype=np.int64)
        # Steps of a window are shuffled, so that it spans about an epoch at most: else some samples would play again
        # before others play at all. And it ends where its stage does, unless the rest of that fills no step.
        count = self.window or min(WINDOW, len(self.items))
        left = (_UNLIMITED if start.end is None else start.end) - start.position
        within = min(left, self.order.stage_end(start.position) - start.position)
        while True:
            wanted = max(1, count - len(carried))
            items = np.concatenate([carried, self.order.draw(start.position, min(wanted, within, left))])
            drawn_all = len(items) - len(carried) >= left
            window = self._window(items, start)
            ends_stage = wanted >= within
            enough = 1 if self.window is not None or ends_stage else MIN_STEPS
            steps = float(window.packs_needed()[-1]) / start.packs_per_step if len(items) else 0.0
            if steps < enough and not drawn_all:
                within = _UNLIMITED if ends_stage else within
                count = 1 + max(2 * len(items), int(len(items) * enough / max(steps, 0.125)))
                continue
            pack_of, num_packs = pack_window(window, self.strategy, drawn_all)
            if num_packs or drawn_all:
                return _packed_window(items, pack_of, num_packs, start.position, len(carried))
            within = _UNLIMITED if ends_stage else within
            count = 2 * len(items)

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
            end = state.get("end", self.order.length)
            end = None if end is None else int(end)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The state of a plan holds position, carried, packs_per_step, accumulation and packs_done, got "
                f"{dict(state)!r:.200}. Resume from a whole checkpoint."
            ) from error
        position, packs_per_step, accumulation, done = numbers
        return _Start(position, carried, packs_per_step, accumulation, end), done


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
        raise DataError(f"Item {item} has {int(items.tokens[item])} tokens; each must have at least 1. Leave it out.")
