"""Intervals of positive numbers: what a printed decimal can have been before it was rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Interval:
    """A closed interval of non-negative numbers.

    >>> Interval(1, 2) / Interval(4, 5)
    Interval(low=0.2, high=0.5)
    """

    low: float
    high: float

    def __mul__(self, other: Interval | float) -> Interval:
        if isinstance(other, Interval):
            return Interval(self.low * other.low, self.high * other.high)
        return Interval(self.low * other, self.high * other)

    def __truediv__(self, other: Interval | float) -> Interval:
        if isinstance(other, Interval):
            return Interval(self.low / other.high, self.high / other.low if other.low else float("inf"))
        return Interval(self.low / other, self.high / other)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def middle(self) -> float:
        """The number halfway."""
        return (self.low + self.high) / 2

    def meets(self, other: Interval) -> bool:
        """Whether some number lies in both."""
        return self.low <= other.high and other.low <= self.high

    def widened(self, share: float) -> Interval:
        """The interval with a relative margin on both sides."""
        return Interval(self.low * (1 - share), self.high * (1 + share))


@dataclass(frozen=True, slots=True)
class Printed:
    """A number as printed, and what it can have been.

    Attributes:
        value: the printed number, in the unit that the code uses.
        range: what rounds (or truncates) to it.
    """

    value: float
    range: Interval


def printed(text: str, scale: float = 1.0, *, truncated: bool = False, step: float | None = None) -> Printed:
    """Read a printed decimal with the range that rounds to it.

    Args:
        text: digits with an optional point and thousands separators.
        scale: unit of the printed number in the unit wanted, e.g. 0.01 for percent.
        truncated: whether the printer cut the rest off instead of rounding.
        step: rounding step in the printed unit where it is coarser than the last digit.

    >>> printed("0.5").range
    Interval(low=0.45, high=0.55)
    >>> printed("6,590").range
    Interval(low=6589.5, high=6590.5)
    """
    digits = text.replace(",", "")
    value = float(digits)
    unit = step if step is not None else 10.0 ** -len(digits.partition(".")[2])
    low, high = (value, value + unit) if truncated else (value - unit / 2, value + unit / 2)
    return Printed(value * scale, Interval(max(low, 0.0) * scale, high * scale))


def common(intervals: Iterable[Interval]) -> Interval | None:
    """Intersect intervals; None when no number lies in all, or there are none.

    >>> common([Interval(1, 3), Interval(2, 4)])
    Interval(low=2, high=3)
    """
    parts = list(intervals)
    if not parts:
        return None
    low, high = max(part.low for part in parts), min(part.high for part in parts)
    return Interval(low, high) if low <= high else None


def hull(intervals: Iterable[Interval]) -> Interval | None:
    """Find the smallest interval around all; None for none."""
    parts = list(intervals)
    return Interval(min(part.low for part in parts), max(part.high for part in parts)) if parts else None
