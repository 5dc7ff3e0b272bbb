"""Numbers as people write them, held against the same numbers as Python writes them."""

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.report.quantity import bytes_in, doubt, finite, integer, number, parse_number, quantity

NOT_NUMBERS = (
    *("", " ", "k", "%", "-", ".", "1.2.3", "1,23", "1,2345", "1__0", "0x10", "nan", "inf", "1e", "e5", "1e400", "1 2"),
    *("10q", "10kk", "10k%", "$", "1" * 61, "1e-999", "٣", "1.5s", "$5", "2GiB"),
)


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300))
def test_a_number_that_python_writes_is_itself_to_the_last_bit(number):
    if number == 0 or abs(number) > 1e-290:  # exponents of more than 300 are refused
        assert float(parse_number(repr(number))) == number


@given(st.integers(-(10**12), 10**12), st.sampled_from("kKmMgGbBtT"))
def test_prefixes_are_those_of_the_si(count, prefix):
    exponents = {"k": 3, "m": 6, "g": 9, "b": 9, "t": 12}
    assert parse_number(f"{count}{prefix}", whole=True) == int(Decimal(f"{count}e{exponents[prefix.lower()]}"))
    assert parse_number(f"{count:,}") == parse_number(f"{count:_}") == count


@pytest.mark.parametrize("text", NOT_NUMBERS)
def test_what_is_no_number_is_none(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [
        ("0.5s", "s", 0.5),
        ("250ms", "s", 0.25),
        ("2min", "s", 120),
        ("36h", "days", 1.5),
        ("1d", "hours", 24),
        ("$2.5", "currency", 2.5),
        ("2.5 €", "currency", 2.5),
        ("1.5 GiB", "bytes", 3 * 2**29),
        ("60GB", "bytes", 60 * 10**9),
        ("32k tokens", "tokens", 32000),
        ("2m", "s", None),  # of minutes or thousandths
        ("2G", "bytes", None),  # of 1000 or 1024
        ("2h", "tokens", None),
    ],
)
def test_units_are_those_of_the_result(text, unit, number):
    assert parse_number(text, unit) == number


def test_what_is_counted_takes_no_percentage():
    assert parse_number("40%") == 0.4
    assert parse_number("100%", whole=True) is None


def test_a_size_has_a_unit():
    assert bytes_in("40GiB") == 40 * 2**30
    assert bytes_in("40") is None


@pytest.mark.parametrize(
    ("text", "unit", "whole", "says"),
    [
        ("2m", "s", False, "2m may be minutes, milliseconds or months. Write 2min or 2ms, and months in days"),
        ("3M", "days", False, "3M may be minutes, milliseconds or months. Write 3min or 3ms"),
        ("40G", "bytes", False, "40G may mean units of 1000 or of 1024. Write 40GB or 40GiB"),
        ("40gb", "bytes", False, "40gb may mean units of 1000 or of 1024. Write 40GB or 40GiB"),
        ("1m", "", False, "1m may be millions or thousandths. Write 1M or 1e-3"),
        ("2,5", "", False, "the comma of 2,5 may stand before decimals or thousands. Write 2.5 or 25"),
        ("1.234,5", "currency", False, "the comma of 1.234,5 may stand before decimals or thousands. Write 1234.5 or"),
        ("3%", "steps", True, "3% is a share, but this is a count"),
        ("fast", "", False, ""),
        ("10q", "", False, ""),
    ],
)
def test_a_number_of_two_meanings_is_none_and_both_are_named(text, unit, whole, says):
    assert parse_number(text, unit, whole=whole) is None
    assert doubt(text, unit, whole=whole)[: len(says) or None] == says


ODD = [
    None,
    True,
    False,
    "",
    "x",
    "nan",
    [],
    [1],
    {},
    math.nan,
    math.inf,
    -math.inf,
    1.5,
    10**30,
    -(10**30),
    "9" * 5000,
]


@pytest.mark.parametrize("value", ODD)
def test_what_is_no_whole_number_of_64_bits_is_a_value_error(value):
    with pytest.raises(ValueError, match=r"whole number|too large|invalid literal"):
        integer(value)


@given(st.integers(-(2**62) + 1, 2**62 - 1), st.integers(-(2**62) + 1, 2**62 - 1))
def test_sums_and_differences_of_two_integers_stay_within_64_bits(a, b):
    assert abs(integer(a) + integer(b)) < 2**63
    assert abs(integer(a) - integer(b)) < 2**63


@given(st.one_of(st.integers(), st.floats(), st.text(), st.none(), st.lists(st.integers()), st.booleans()))
def test_readers_give_a_finite_number_or_refuse(value):
    known = number(value)
    assert known is None or math.isfinite(known)
    assert (quantity(value) is None) == (known is None or abs(known) > 1e30)
    if known is None:
        with pytest.raises(ValueError, match="finite"):
            finite(value)
    else:
        assert finite(value) == known
