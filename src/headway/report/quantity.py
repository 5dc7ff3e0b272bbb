"""Numbers as people write them, in options and YAML files (32k, 1e9, 100B, 40%, 0.5s, $2.5, 60GiB), and in records."""

import math
import re
from fractions import Fraction

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
LARGEST_INTEGER = 2**62 - 1  # sums and differences of two stay within 64 bits


def quantity(value: object) -> float | None:
    """A number that sums and products can hold; None for anything else."""
    amount = number(value)
    return amount if amount is not None and abs(amount) <= _LARGEST_QUANTITY else None


def integer(value: object, *, largest: int = LARGEST_INTEGER) -> int:
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


SIZE_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
"""Units of sizes, and their bytes."""

PREFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
"""Letters behind a count, small or capital, by the SI: 32k is 32,000; B are billions, as in the names of models."""

_TIME_UNITS = {
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_UNIT_OF_TIME = {"s": "s", "hours": "h", "days": "d"}  # units of time as settings and options write them in brackets
_CURRENCIES = "$€£"
_NUMBER = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*|(?=\.\d))(\.\d*)?(?:[eE]([+-]?\d{1,3}))?\s*([a-zA-Z%]*)")
_MOST_CHARACTERS = 60
_MOST_EXPONENT = 300  # a float of 64 bits has room for every number with such an exponent
MONEY = "currency"
"""The unit of a price."""


def parse_number(text: str, unit: str = "", *, whole: bool = False) -> int | float | None:
    """Read a number with what people write behind it, or before it.

    Args:
        text: as typed.
        unit: of the result: "s", "hours", "days" and "bytes" take units of time or size behind the number, "currency"
            takes a sign before it; any other may itself stand behind it, as in "32k tokens".
        whole: whether it counts something, so that no percentage can be meant.

    Returns:
        The number in that unit, whole where it has no fraction; None where the text is none.

    >>> [parse_number(text) for text in ("32k", "1e9", "100B", "1,234", "40%", "3e-4")]
    [32000, 1000000000, 100000000000, 1234, 0.4, 0.0003]
    >>> parse_number("1.5h", "s"), parse_number("2 GiB", "bytes"), parse_number("$2.5", "currency")
    (5400, 2147483648, 2.5)
    """
    text = text.strip()
    if unit == MONEY:
        text = text.strip(_CURRENCIES).strip()
    elif unit and text.endswith(unit) and unit not in _UNIT_OF_TIME:
        text = text.removesuffix(unit).strip()
    match = _NUMBER.fullmatch(text) if len(text) <= _MOST_CHARACTERS and text.isascii() else None
    if match is None or abs(int(match[4] or 0)) > _MOST_EXPONENT:
        return None
    factor = _factor(match[5], unit, whole)
    if factor is None:
        return None
    digits = match[2].replace(",", "").replace("_", "") or "0"
    number = Fraction(f"{match[1]}{digits}{(match[3] or '').rstrip('.')}e{match[4] or 0}") * factor
    return int(number) if number.denominator == 1 else float(number)


def _factor(suffix: str, unit: str, whole: bool) -> Fraction | int | None:
    """Factor that the letters behind a number stand for; None where they mean nothing there."""
    if not suffix:
        return 1
    if unit in _UNIT_OF_TIME:
        return _TIME_UNITS[suffix] / _TIME_UNITS[_UNIT_OF_TIME[unit]] if suffix in _TIME_UNITS else None
    if unit == "bytes":
        return SIZE_UNITS.get(suffix)
    if suffix == "%":
        return None if whole or unit == MONEY else Fraction(1, 100)
    if suffix == "m" and not whole and not unit:
        return None  # thousandths by the SI, or millions
    return PREFIXES.get(suffix.lower())


_BARE = re.compile(r"[+-]?[\d.,_]+(?:[eE][+-]?\d+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?(?:\d{1,3}(?:\.\d{3})+|\d+),\d+(?:[eE][+-]?\d+)?\s*[a-zA-Z%]*")


def doubt(text: str, unit: str = "", *, whole: bool = False) -> str:
    """Say why a text that looks like a number is not taken for one, as the end of a sentence.

    Args:
        text: as typed; `parse_number` took it for no number.
        unit: as for `parse_number`.
        whole: as for `parse_number`.

    Returns:
        What it may mean, and how to write each; "" for a text without two meanings.

    >>> doubt("2m", "s")
    '2m may be minutes, milliseconds or months. Write 2min or 2ms, and months in days'
    >>> doubt("40G", "bytes")
    '40G may mean units of 1000 or of 1024. Write 40GB or 40GiB'
    """
    text = text.strip()
    bare = _BARE.match(text) if len(text) <= _MOST_CHARACTERS and text.isascii() else None
    if bare is None:
        return ""
    number, suffix = bare[0], text[bare.end() :].strip()
    letter = suffix[:1].upper()
    point = text.replace(".", "").replace(",", ".")
    doubts = {
        f"the comma of {text} may stand before decimals or thousands. Write {point} or {text.replace(',', '')}": (
            _DECIMAL_COMMA.fullmatch(text) is not None
        ),
        f"{text} has no unit": unit == "bytes" and not suffix,
        f"{text} may be minutes, milliseconds or months. Write {number}min or {number}ms, and months in days": (
            unit in _UNIT_OF_TIME and letter == suffix.upper() == "M"
        ),
        f"{text} may mean units of 1000 or of 1024. Write {number}{letter}B or {number}{letter}iB": (
            unit == "bytes" and letter != "" and letter in "KMGT" and suffix.upper() in (letter, f"{letter}B")
        ),
        f"{text} may be millions or thousandths. Write {number}M or {number}e-3": (
            suffix == "m" and not unit and not whole
        ),
        f"{text} is a share, but this is a count": whole and suffix == "%",
    }
    return next((clause for clause, applies in doubts.items() if applies), "")


def advice(text: str, unit: str = "", *, whole: bool = False) -> str:
    """Numbers that can be written in place of a text that is none, behind what is doubtful about it.

    >>> advice("2m", "s")
    '2m may be minutes, milliseconds or months. Write 2min or 2ms, and months in days'
    >>> advice("fast")
    'Write 0.5, 40%, 1e-3, 32k or 100B'
    """
    return doubt(text, unit, whole=whole) or f"Write {examples(unit, whole=whole)}"


def examples(unit: str = "", *, whole: bool = False) -> str:
    """Numbers that can be written, for an error."""
    if unit in _UNIT_OF_TIME:
        return "0.5s, 90min or 2d; without a unit it is in " + {"s": "seconds"}.get(unit, unit)
    if unit == "bytes":
        return f"2GiB or 2147483648; units are {', '.join(SIZE_UNITS)}"
    if unit == MONEY:
        return "2.5 or $2.5"
    return "32768, 32k or 2M" if whole else "0.5, 40%, 1e-3, 32k or 100B"


def bytes_in(text: str) -> int | None:
    """Read a size such as 40GiB [bytes]; None where it is none, or has no unit.

    >>> bytes_in("1.5 KiB")
    1536
    """
    size = None if text[-1:].isdigit() else parse_number(text, "bytes")
    return None if size is None else round(size)
