"""First fit and best fit, the textbook heuristics of bin packing: samples one after the other into open packs.

First fit takes the oldest pack with room, best fit the one that is left with the least. Every open pack is a candidate
(next fit would look at the last alone), found in a search tree, so a hundred thousand samples take seconds. Given
samples in descending order they are first-fit decreasing and best-fit decreasing.

Source: Johnson 1973, "Near-optimal bin packing algorithms".
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Literal

import numpy as np

from headway.errors import ConfigError, DataError
from headway.packing.budget import Budget, Size, over_budget

Fit = Literal["first_fit", "best_fit"]
FITS: tuple[Fit, ...] = ("first_fit", "best_fit")


class Packer:
    """Assigns samples, one after the other, to packs that are still open.

    Args:
        budget: limits of a pack.
        strategy: "first_fit" takes the oldest open pack with room; "best_fit" the one that is left with the least token
            room, and among equals the least patch room.

    Raises:
        ConfigError: an unknown strategy.
    """

    def __init__(self, budget: Budget, strategy: Fit = "best_fit") -> None:
        if strategy not in FITS:
            raise ConfigError(f"Unknown packing strategy {strategy!r}. Allowed: {', '.join(FITS)}.")
        self.budget = budget
        self._trees = FirstFit() if strategy == "first_fit" else BestFit(budget.tokens)
        self._left: list[Size] = []  # room in each pack, by its number
        self._counts: list[int] = []

    def place(self, size: Size) -> int:
        """Put a sample into an open pack, or into a new one if it fits in none.

        Returns:
            The pack's number; packs are numbered from 0 in the order they were opened.

        Raises:
            DataError: the sample exceeds the budget of an empty pack.
        """
        if not self.budget.holds(size):
            raise DataError(over_budget("A sample", size, self.budget))
        size = size if self.budget.patches is not None else Size(size.tokens)
        number = self._trees.find(size)
        if number is None:
            number = len(self._left)
            self._left.append(Size(self.budget.tokens, self.budget.patches or 0))
            self._counts.append(0)
        else:
            self._trees.remove(number, self._left[number])
        left = self._left[number]
        self._left[number] = Size(left.tokens - size.tokens, left.patches - size.patches)
        self._counts[number] += 1
        if self.budget.items is None or self._counts[number] < self.budget.items:
            self._trees.add(number, self._left[number])
        return number


def pack(sizes: Sequence[Size], budget: Budget, strategy: Fit = "best_fit") -> list[list[int]]:
    """Assign samples to packs, in the order given.

    Args:
        sizes: tokens and patches of each sample.
        budget: limits of a pack.
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


class MaxTree:
    """A row of numbers that tells its leftmost large one in logarithmic time; places that were never set hold -1.

    It is a binary tree in an array: node n has the children 2 n and 2 n + 1 and holds the larger of both, and the
    numbers themselves are the leaves, from node `width` on.
    """

    def __init__(self, places: int = 1) -> None:
        self.width = 1 << max(0, places - 1).bit_length()
        self.nodes = [-1] * (2 * self.width)

    def set(self, place: int, value: int) -> None:
        """Write a number; the row grows to hold its place."""
        while place >= self.width:
            self._double()
        node = place + self.width
        self.nodes[node] = value
        while node := node >> 1:
            best = max(self.nodes[2 * node], self.nodes[2 * node + 1])
            if self.nodes[node] == best:
                break
            self.nodes[node] = best

    def find(self, start: int, need: int) -> int | None:
        """The leftmost place from `start` on whose number is at least `need`."""
        if start >= self.width:
            return None
        # Climb from the first leaf, and to the right where nothing below is large enough; then descend to the left.
        node = start + self.width
        while self.nodes[node] < need:
            while node & 1:  # a right child: what follows lies to the right of its parent
                node >>= 1
            if node == 0:
                return None
            node += 1
        while node < self.width:
            node = 2 * node if self.nodes[2 * node] >= need else 2 * node + 1
        return node - self.width

    def _double(self) -> None:
        leaves = self.nodes[self.width :]
        self.width *= 2
        self.nodes = [-1] * self.width + leaves + [-1] * (self.width - len(leaves))
        for node in range(self.width - 1, 0, -1):
            self.nodes[node] = max(self.nodes[2 * node], self.nodes[2 * node + 1])


class FirstFit:
    """Open packs by number, with the tokens left in each as a tree; patches are then compared one after the other."""

    def __init__(self) -> None:
        self.tree = MaxTree()
        self.left = np.full((1, 2), -1, dtype=np.int64)  # tokens, patches

    def add(self, number: int, left: Size) -> None:
        """Offer a pack with this much room."""
        if number >= len(self.left):
            self.left = np.concatenate([self.left, np.full_like(self.left, -1)])
        self.left[number] = left
        self.tree.set(number, left.tokens)

    def remove(self, number: int, left: Size) -> None:  # noqa: ARG002  # the other heuristic needs what is left
        """Take a pack out of the choice."""
        self.add(number, Size(-1, -1))

    def find(self, size: Size) -> int | None:
        """The oldest pack with room for a sample."""
        first = self.tree.find(0, size.tokens)
        if first is None or size.patches == 0:
            return first
        fits = np.flatnonzero(np.all(self.left[first:] >= size, axis=1))
        return first + int(fits[0]) if len(fits) else None


class BestFit:
    """Open packs by the tokens left in them: those with equally many sorted by patches left, the most as a tree."""

    def __init__(self, tokens: int) -> None:
        self.tree = MaxTree(tokens + 1)
        self.packs: dict[int, list[tuple[int, int]]] = {}

    def add(self, number: int, left: Size) -> None:
        """Offer a pack with this much room."""
        entries = self.packs.setdefault(left.tokens, [])
        insort(entries, (left.patches, number))
        self.tree.set(left.tokens, entries[-1][0])

    def remove(self, number: int, left: Size) -> None:
        """Take a pack out of the choice."""
        entries = self.packs[left.tokens]
        entries.pop(bisect_left(entries, (left.patches, number)))
        self.tree.set(left.tokens, entries[-1][0] if entries else -1)

    def find(self, size: Size) -> int | None:
        """The pack that a sample leaves the least room in."""
        tokens_left = self.tree.find(size.tokens, size.patches)
        if tokens_left is None:
            return None
        entries = self.packs[tokens_left]
        return entries[bisect_left(entries, (size.patches, -1))][1]
