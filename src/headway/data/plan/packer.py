"""First fit and best fit: samples one after the other into packs that are still open.

Both are the textbook strategies, not next fit: every open pack is a candidate. They look a pack up in a tree, so a
hundred thousand samples take seconds.
"""

from collections.abc import Sequence
from typing import Literal

from headway.data.plan.budget import Budget, Size, over_budget
from headway.data.plan.rooms import BestFitRooms, FirstFitRooms
from headway.errors import ConfigError, DataError

Fit = Literal["first_fit", "best_fit"]
FITS: tuple[Fit, ...] = ("first_fit", "best_fit")


class Packer:
    """Assigns samples, one after the other, to packs that are still open.

    Args:
        budget: what a pack holds.
        strategy: "first_fit" takes the oldest open pack with room; "best_fit" the one that is left with the least token
            room, and among equals the least patch room.

    Raises:
        ConfigError: an unknown strategy.
    """

    def __init__(self, budget: Budget, strategy: Fit = "best_fit") -> None:
        if strategy not in FITS:
            raise ConfigError(f"Unknown packing strategy {strategy!r}. Allowed: {', '.join(FITS)}.")
        self.budget = budget
        self._rooms: FirstFitRooms | BestFitRooms = (
            FirstFitRooms() if strategy == "first_fit" else BestFitRooms(budget.tokens)
        )
        self._left: dict[int, Size] = {}
        self._counts: dict[int, int] = {}
        self._opened = 0

    @property
    def open_packs(self) -> dict[int, Size]:
        """Room left in each open pack, oldest first."""
        return self._left

    def find(self, size: Size) -> int | None:
        """The open pack that the strategy would choose, or None if it fits in none."""
        return self._rooms.find(size if self.budget.patches is not None else Size(size.tokens))

    def place(self, size: Size) -> int:
        """Put a sample into an open pack, or into a new one if it fits in none.

        Returns:
            The pack's number; packs are numbered from 0 in the order they were opened.

        Raises:
            DataError: the sample exceeds the budget of an empty pack.
        """
        if not self.budget.holds(size):
            raise DataError(over_budget("A sample", size, self.budget))
        number = self.find(size)
        if number is None:
            return self.open(size)
        left = self._left[number]
        self._rooms.remove(number, left)  # it had room, so it was offered
        self._fill(number, left, size)
        return number

    def open(self, size: Size) -> int:
        """Open a new pack that already holds this much, and return its number."""
        number = self._opened
        self._opened += 1
        self._fill(number, Size(self.budget.tokens, self.budget.patches or 0), size)
        return number

    def _fill(self, number: int, left: Size, size: Size) -> None:
        patches = size.patches if self.budget.patches is not None else 0
        self._left[number] = Size(left.tokens - size.tokens, left.patches - patches)
        self._counts[number] = self._counts.get(number, 0) + 1
        if self._takes_more(number):
            self._rooms.add(number, self._left[number])

    def _takes_more(self, number: int) -> bool:
        return self.budget.items is None or self._counts[number] < self.budget.items

    def close(self, number: int) -> None:
        """Take a pack out of the choice."""
        left = self._left.pop(number)
        if self._takes_more(number):
            self._rooms.remove(number, left)
        del self._counts[number]


def pack(sizes: Sequence[Size], budget: Budget, strategy: Fit = "best_fit") -> list[list[int]]:
    """Assign samples to packs, in the order given.

    Args:
        sizes: tokens and patches of each sample.
        budget: what a pack holds.
        strategy: "best_fit" or "first_fit".

    Returns:
        The samples' indices, pack by pack; every index once.

    Raises:
        DataError: a sample exceeds the budget.
        ConfigError: an unknown strategy.

    >>> pack([Size(6), Size(5), Size(4), Size(5)], Budget(10))
    [[0, 2], [1, 3]]
    """
    packer = Packer(budget, strategy)
    packs: list[list[int]] = []
    for index, size in enumerate(sizes):
        if not budget.holds(size):
            raise DataError(over_budget(f"Sample {index}", size, budget))
        number = packer.place(size)
        if number == len(packs):
            packs.append([])
        packs[number].append(index)
    return packs
