"""Packing: laying samples end to end in packs of a fixed token and patch budget.

Both strategies are the textbook ones, not next-fit: every open pack is a candidate. They look a pack up in a tree, so a
hundred thousand samples take seconds.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from headway.data.plan.budget import Budget, Size, over_budget
from headway.data.plan.packer import FITS as STRATEGIES
from headway.data.plan.packer import Fit as Strategy
from headway.data.plan.packer import Packer
from headway.errors import DataError

__all__ = ["STRATEGIES", "Budget", "PackReport", "Packer", "Strategy", "over_budget", "pack"]


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
