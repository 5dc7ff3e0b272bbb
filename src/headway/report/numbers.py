"""Numbers of records that anybody may have written."""

import math

_LONGEST = 40  # characters of a number's text that are read or shown


def number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if type(value) is float:  # most of a million values
        return value if math.isfinite(value) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # no float holds so large an integer
        return None


_LARGEST_QUANTITY = 1e30  # bound of FLOPs, bytes and tokens: sums and products of a few stay finite
_LARGEST = 2**62 - 1  # sums and differences of two stay within 64 bits


def quantity(value: object) -> float | None:
    """A number that sums and products can hold; None for anything else."""
    amount = number(value)
    return amount if amount is not None and abs(amount) <= _LARGEST_QUANTITY else None


def integer(value: object, *, largest: int = _LARGEST) -> int:
    """A whole number that a stranger wrote, of bounded size.

    Args:
        value: an integer, a float without a fraction, or the text of an integer.
        largest: most that it may be, in either direction.

    Raises:
        ValueError: anything else: a fraction, NaN, an infinity, `true`, a list, or a number that is too large.

    >>> integer(3.0), integer("-7")
    (3, -7)
    """
    if type(value) is int:  # most of a million values
        parsed = value
    elif (isinstance(value, float) and value.is_integer()) or (isinstance(value, str) and len(value) <= _LONGEST):
        parsed = int(value)
    else:
        raise ValueError(f"{str(value)[:_LONGEST]!r} is no whole number")
    if not -largest <= parsed <= largest:
        raise ValueError(f"a number of {parsed.bit_length()} bits is too large")
    return parsed


def finite(value: object) -> float:
    """A finite number that a stranger wrote.

    Raises:
        ValueError: anything else.
    """
    parsed = number(value)
    if parsed is None:
        raise ValueError(f"{str(value)[:_LONGEST]!r} is no finite number")
    return parsed


def numbers(value: object) -> list[float]:
    """A list of finite numbers; an empty one for anything else."""
    values = [number(item) for item in value] if isinstance(value, list) else []
    return [value for value in values if value is not None] if None not in values else []
