"""Numbers that anybody may have written are read by one reader each."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.report.numbers import finite, integer, number, quantity

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
