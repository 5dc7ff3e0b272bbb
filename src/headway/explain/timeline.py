"""A stretch of time divided among events that overlap: at every moment the most important one that runs owns it."""

import heapq
from dataclasses import dataclass

import numpy as np

from headway.explain.trace import NONE, Column


@dataclass(frozen=True, slots=True)
class Segments:
    """Pieces of a window, without gaps and overlaps, in order.

    Attributes:
        start_ns: beginning of each piece [ns].
        end_ns: its end [ns]; the next begins there.
        owner: index of the event that owns it; NONE where none ran.
    """

    start_ns: Column
    end_ns: Column
    owner: Column

    @property
    def ns(self) -> Column:
        """Length of each piece [ns]; their sum is the window's."""
        return self.end_ns - self.start_ns

    def of_none(self) -> list[tuple[int, int]]:
        """The pieces in which no event ran."""
        idle = self.owner == NONE
        return list(zip(self.start_ns[idle].tolist(), self.end_ns[idle].tolist(), strict=True))


def divide(start_ns: Column, end_ns: Column, priority: Column, window: tuple[int, int]) -> Segments:
    """Divide a window among events by priority.

    Args:
        start_ns: beginnings of the events [ns], in any order, some outside the window.
        end_ns: their ends [ns].
        priority: a lower number goes first; of equals the one that began first, then the one that stands first.
        window: beginning and end [ns].

    >>> pieces = divide(np.array([0, 4]), np.array([6, 8]), np.array([1, 0]), (0, 10))
    >>> list(zip(pieces.ns.tolist(), pieces.owner.tolist()))
    [(4, 0), (4, 1), (2, -1)]
    """
    begin, finish = window
    inside = np.flatnonzero((end_ns > begin) & (start_ns < finish) & (end_ns > start_ns))
    inside = inside[np.argsort(start_ns[inside], kind="stable")]
    starts = np.maximum(start_ns[inside], begin).tolist()
    ends = np.minimum(end_ns[inside], finish).tolist()
    running: list[tuple[int, int, int, int]] = []  # priority, order of beginning, end, index
    cuts: list[tuple[int, int]] = []  # where a piece ends, and who owned it
    at = begin
    for order, (index, rank, next_start) in enumerate(
        [*zip(inside.tolist(), priority[inside].tolist(), starts, strict=True), (NONE, 0, finish)]
    ):
        while at < next_start:
            while running and running[0][2] <= at:
                heapq.heappop(running)
            until = min(running[0][2], next_start) if running else next_start
            cuts.append((until, running[0][3] if running else NONE))
            at = until
        if index != NONE:
            heapq.heappush(running, (rank, order, ends[order], index))
    table = np.array(cuts, dtype=np.int64).reshape(-1, 2)
    return Segments(np.concatenate([[begin], table[:-1, 0]]) if len(table) else table[:, 0], table[:, 0], table[:, 1])
