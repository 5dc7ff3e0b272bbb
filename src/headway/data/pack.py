"""Packing: laying samples end to end in packs of a fixed token and patch budget.

Both strategies are the textbook ones, not next-fit: every open pack is a candidate. They look a pack up in a tree, so a
hundred thousand samples take seconds.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from headway.data.rooms import BestFitRooms, FirstFitRooms, Size
from headway.errors import ConfigError, DataError

Strategy = Literal["first_fit", "best_fit"]
STRATEGIES: tuple[Strategy, ...] = ("first_fit", "best_fit")


@dataclass(frozen=True, slots=True)
class Budget:
    """What a pack holds.

    Attributes:
        tokens: the most tokens [tokens].
        patches: the most vision patches [patches]; None sets no limit.

    Raises:
        ConfigError: a budget below 1 token or below 0 patches.
    """

    tokens: int
    patches: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1 or (self.patches is not None and self.patches < 0):
            raise ConfigError(
                f"A pack's budget is {self.tokens} tokens and {self.patches} patches; it needs at least 1 token, and "
                "patches of 0 or more (or none for no limit)."
            )

    def holds(self, size: Size) -> bool:
        """Whether one sample of this size fits an empty pack."""
        return size.tokens <= self.tokens and (self.patches is None or size.patches <= self.patches)


@dataclass(slots=True)
class PackReport:
    """What became of the samples, counted.

    Attributes:
        read: samples looked at.
        used: samples that went into packs, truncated ones included.
        dropped: samples left out because they exceed a pack.
        truncated: samples whose text was cut to a pack.
        packs: packs handed out.
        tokens: tokens in those packs [tokens].
        capacity: tokens that those packs could have held [tokens].
    """

    read: int = 0
    used: int = 0
    dropped: int = 0
    truncated: int = 0
    packs: int = 0
    tokens: int = 0
    capacity: int = 0

    @property
    def fill(self) -> float:
        """Share of the packs' token budget that holds tokens, a fraction; 0 before the first pack."""
        return self.tokens / self.capacity if self.capacity else 0.0

    def to_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


class Packer:
    """Assigns samples, one after the other, to packs that are still open.

    Args:
        budget: what a pack holds.
        strategy: "first_fit" takes the oldest open pack with room; "best_fit" the one that is left with the least token
            room, and among equals the least patch room.

    Raises:
        ConfigError: an unknown strategy.
    """

    def __init__(self, budget: Budget, strategy: Strategy = "best_fit") -> None:
        if strategy not in STRATEGIES:
            raise ConfigError(f"Unknown packing strategy {strategy!r}. Allowed: {', '.join(STRATEGIES)}.")
        self.budget = budget
        self._rooms: FirstFitRooms | BestFitRooms = (
            FirstFitRooms() if strategy == "first_fit" else BestFitRooms(budget.tokens)
        )
        self._left: dict[int, Size] = {}
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
        self._rooms.remove(number, left)
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
        self._rooms.add(number, self._left[number])

    def close(self, number: int) -> None:
        """Take a pack out of the choice."""
        self._rooms.remove(number, self._left.pop(number))


def pack(sizes: Sequence[Size], budget: Budget, strategy: Strategy = "best_fit") -> list[list[int]]:
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


def over_budget(what: str, size: Size, budget: Budget) -> str:
    """The sentence that tells a person that a sample exceeds a pack, and what can be done."""
    limit = f"{budget.tokens} tokens" + (f" and {budget.patches} patches" if budget.patches is not None else "")
    return (
        f"{what} has {size.tokens} tokens and {size.patches} vision patches, more than a pack's budget of {limit}. "
        'Raise the budget, shrink the images, or choose what to do with over-long samples: "drop" leaves them out, '
        '"truncate" cuts their text; both are counted and reported.'
    )
