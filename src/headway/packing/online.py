"""Packing a stream: the strategies of the plan over a buffer of a few packs' worth of samples."""

from typing import Generic, TypeVar

import numpy as np

from headway.errors import ConfigError, DataError
from headway.packing.budget import Budget, Size, over_budget
from headway.packing.order import key_of
from headway.packing.strategies import STRATEGIES, Candidates, Strategy, cost_shift, pack_window, whole_costs

T = TypeVar("T")


class OnlinePacker(Generic[T]):
    """Packs samples as they come, without an index and without an end.

    Samples are buffered until they fill `packs` packs; then the strategy makes these packs, and all are handed out at
    once. Samples that it leaves over stay in the buffer, so little more than `packs` packs are held.

    Args:
        budget: limits of a pack.
        strategy: one of `STRATEGIES`; "balanced" makes the packs that are handed out together alike in cost.
        packs: packs that are open together; more fill better and balance better.
        seed: of the order in which packs are handed out.

    Raises:
        ConfigError: an unknown strategy, or no open pack.

    >>> packer = OnlinePacker(Budget(10), "best_fit", packs=2)
    >>> [packer.add(name, Size(tokens)) for name, tokens in zip("abcd", (6, 5, 4, 5))]
    [[], [], [], [['a', 'c'], ['b', 'd']]]
    """

    def __init__(
        self,
        budget: Budget,
        strategy: Strategy = "balanced",
        *,
        packs: int = 32,
        seed: int = 0,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ConfigError(f"Unknown packing strategy {strategy!r}. Allowed: {', '.join(STRATEGIES)}.")
        if packs < 1:
            raise ConfigError(f"A packer got {packs} open packs. Give at least 1.")
        self.budget, self.strategy, self.packs, self.seed = budget, strategy, packs, seed
        self._waiting: list[T] = []
        self._sizes: list[tuple[int, int, float]] = []
        self._totals = np.zeros(3)  # tokens, patches and number of the waiting samples
        self._enough: float = packs

    @property
    def waiting(self) -> list[T]:
        """Samples that were added and not yet handed out, in the order in which to add them to another packer."""
        return list(self._waiting)

    def add(self, sample: T, size: Size, cost: float | None = None) -> list[list[T]]:
        """Add a sample.

        Args:
            sample: whatever stands for it.
            size: its tokens and patches.
            cost: FLOPs of training on it; its tokens when None.

        Returns:
            Packs that are complete, none most of the time.

        Raises:
            DataError: the sample exceeds a pack.
        """
        if not self.budget.holds(size):
            raise DataError(over_budget("A sample", size, self.budget))
        self._waiting.append(sample)
        self._sizes.append((size.tokens, size.patches, float(size.tokens if cost is None else cost)))
        self._totals += (size.tokens, size.patches, 1)
        return self._hand_out(last=False) if self._filled() >= self._enough else []

    def flush(self) -> list[list[T]]:
        """Hand everything out that waits, in as few packs as it fills."""
        return self._hand_out(last=True) if self._waiting else []

    def _hand_out(self, last: bool) -> list[list[T]]:
        tokens, patches, costs = (np.array(column) for column in zip(*self._sizes, strict=True))
        integer_costs = whole_costs(costs, cost_shift(float(costs.max())))
        key = key_of(self.seed, len(self._waiting), int(tokens[0]), int(tokens[-1]))
        window = Candidates(tokens, patches, integer_costs, self.budget, 1 if last else self.packs, 1, key)
        pack_of, num_packs = pack_window(window, self.strategy, last)
        packs: list[list[T]] = [[] for _ in range(num_packs)]
        for sample, pack in zip(self._waiting, pack_of.tolist(), strict=True):
            if pack >= 0:
                packs[pack].append(sample)
        left = np.flatnonzero(pack_of < 0).tolist()
        self._waiting = [self._waiting[i] for i in left]
        self._sizes = [self._sizes[i] for i in left]
        self._totals = np.array([tokens[left].sum(), patches[left].sum(), len(left)])
        self._enough = self.packs if num_packs else self._filled() + 1
        return [pack for pack in packs if pack]

    def _filled(self) -> float:
        caps = (self.budget.tokens, self.budget.patches, self.budget.items)
        return max(float(total / cap) for total, cap in zip(self._totals, caps, strict=True) if cap)
