"""Which open pack has room: the look-up trees behind the packing strategies."""

from bisect import bisect_left, insort

import numpy as np

from headway.data.plan.budget import Size


class Tree:
    """Maximum tree over a growing row of numbers; places that were never set hold -1."""

    def __init__(self, places: int = 1) -> None:
        self.width = 1 << max(0, places - 1).bit_length()
        self.top = [-1] * (2 * self.width)

    def set(self, place: int, value: int) -> None:
        """Write a number; the row grows to hold its place."""
        while place >= self.width:
            self._double()
        node = place + self.width
        self.top[node] = value
        node >>= 1
        while node:
            best = max(self.top[2 * node], self.top[2 * node + 1])
            if self.top[node] == best:
                break
            self.top[node] = best
            node >>= 1

    def find(self, start: int, need: int) -> int | None:
        """The leftmost place from `start` on whose number is at least `need`."""
        if start >= self.width:
            return None
        node = start + self.width
        while self.top[node] < need:
            while node & 1:  # a right child: what follows lies to the right of its parent
                node >>= 1
            if node == 0:
                return None
            node += 1
        while node < self.width:
            node = 2 * node if self.top[2 * node] >= need else 2 * node + 1
        return node - self.width

    def _double(self) -> None:
        leaves = self.top[self.width :]
        self.width *= 2
        self.top = [-1] * self.width + leaves + [-1] * (self.width - len(leaves))
        for node in range(self.width - 1, 0, -1):
            self.top[node] = max(self.top[2 * node], self.top[2 * node + 1])


class FirstFitRooms:
    """Open packs by number: a tree finds the oldest with enough tokens; the search goes on from there in strides."""

    _STRIDE = 4096  # packs compared in one vector operation

    def __init__(self) -> None:
        self.tree = Tree()
        self.left = np.full((self._STRIDE, 2), -1, dtype=np.int64)  # tokens, patches

    def add(self, number: int, left: Size) -> None:
        """Offer a pack with this much room."""
        if number >= len(self.left):
            self.left = np.concatenate([self.left, np.full_like(self.left, -1)])
        self.left[number] = left
        self.tree.set(number, left.tokens)

    def remove(self, number: int, left: Size) -> None:  # noqa: ARG002  # the other strategy needs what is left
        """Take a pack out of the choice."""
        self.add(number, Size(-1, -1))

    def find(self, size: Size) -> int | None:
        """The oldest pack with room for a sample."""
        first = self.tree.find(0, size.tokens)
        if first is None or size.patches == 0:
            return first
        for start in range(first, len(self.left), self._STRIDE):
            stride = self.left[start : start + self._STRIDE]
            fits = (stride[:, 0] >= size.tokens) & (stride[:, 1] >= size.patches)
            place = int(fits.argmax())
            if fits[place]:
                return start + place
        return None


class BestFitRooms:
    """Open packs by token room: for each room the packs sorted by patch room, and a tree of the largest patch room."""

    def __init__(self, tokens: int) -> None:
        self.tree = Tree(tokens + 1)
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
        """The pack with the least room that still takes a sample."""
        room = self.tree.find(size.tokens, size.patches)
        if room is None:
            return None
        entries = self.packs[room]
        return entries[bisect_left(entries, (size.patches, -1))][1]
