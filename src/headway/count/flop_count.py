"""FLOPs of a step: exact integers by component (or module) and phase, additive over micro-batches and ranks."""

from dataclasses import dataclass, replace
from functools import cached_property

from headway.errors import UsageError

USEFUL = "useful/1"  # our convention; what it counts is in docs/counting.md


@dataclass(frozen=True, slots=True)
class FlopRow:
    """FLOPs of one component or module under one driver; exact integers."""

    name: str
    driver: str
    forward: int = 0
    dgrad: int = 0
    wgrad: int = 0
    recompute: int = 0

    @property
    def total(self) -> int:
        """Useful FLOPs: forward, dgrad and wgrad; recompute is not useful."""
        return self.forward + self.dgrad + self.wgrad


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of a step, by component (or module) and phase; exact Python integers, additive."""

    rows: tuple[FlopRow, ...] = ()
    convention: str = USEFUL

    @cached_property
    def forward(self) -> int:
        """FLOPs of the forward pass."""
        return sum(row.forward for row in self.rows)

    @cached_property
    def dgrad(self) -> int:
        """FLOPs of gradients with respect to activations."""
        return sum(row.dgrad for row in self.rows)

    @cached_property
    def wgrad(self) -> int:
        """FLOPs of gradients with respect to weights."""
        return sum(row.wgrad for row in self.rows)

    @cached_property
    def recompute(self) -> int:
        """FLOPs that activation checkpointing runs a second time; part of HFU, not of MFU."""
        return sum(row.recompute for row in self.rows)

    @property
    def total(self) -> int:
        """Useful FLOPs: forward + dgrad + wgrad."""
        return self.forward + self.dgrad + self.wgrad

    def by_component(self) -> dict[str, int]:
        """Sum the useful FLOPs of each name over its drivers."""
        sums: dict[str, int] = {}
        for row in self.rows:
            sums[row.name] = sums.get(row.name, 0) + row.total
        return sums

    def share(self, prefix: str) -> float:
        """Return the fraction of useful FLOPs in names that start with `prefix`, such as `vision`; 0.0 of nothing."""
        part = sum(row.total for row in self.rows if row.name == prefix or row.name.startswith(prefix + "."))
        return part / self.total if self.total else 0.0

    def split(self, ranks: int) -> "list[FlopCount]":
        """Share the work evenly among ranks that hold one model together (tensor, sequence or expert parallel).

        Args:
            ranks: how many share it, >= 1.

        Returns:
            One count per rank; they add up to this one exactly, and differ by at most 1 FLOP in each phase of a row.

        Raises:
            UsageError: there are no ranks.

        >>> [part.forward for part in FlopCount((FlopRow("language.mlp", "tokens", forward=10),)).split(4)]
        [3, 3, 2, 2]
        """
        if ranks < 1:
            raise UsageError(f"{ranks} ranks cannot share a step. Give 1 or more.")
        return [
            replace(
                self,
                rows=tuple(
                    FlopRow(
                        row.name,
                        row.driver,
                        *((n + ranks - 1 - i) // ranks for n in (row.forward, row.dgrad, row.wgrad, row.recompute)),
                    )
                    for row in self.rows
                ),
            )
            for i in range(ranks)
        ]

    def __add__(self, other: "FlopCount") -> "FlopCount":
        if not isinstance(other, FlopCount):
            return NotImplemented
        if other.convention != self.convention:
            raise UsageError(f"FLOPs counted by {self.convention} and by {other.convention} cannot be added.")
        sums = {(row.name, row.driver): row for row in self.rows}
        for row in other.rows:
            mine = sums.get((row.name, row.driver), FlopRow(row.name, row.driver))
            sums[row.name, row.driver] = FlopRow(
                row.name,
                row.driver,
                mine.forward + row.forward,
                mine.dgrad + row.dgrad,
                mine.wgrad + row.wgrad,
                mine.recompute + row.recompute,
            )
        return replace(self, rows=tuple(sums.values()))

    def __radd__(self, other: int) -> "FlopCount":
        """Let `sum(counts)` start from 0."""
        return self if other == 0 else NotImplemented
