"""Numbers of records that anybody may have written."""

import math


def number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if type(value) is float:  # most of a million values
        return value if math.isfinite(value) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # of an integer that no float holds
        return None


def numbers(value: object) -> list[float]:
    """A list of finite numbers; an empty one for anything else."""
    found = [number(one) for one in value] if isinstance(value, list) else []
    return [one for one in found if one is not None] if None not in found else []
