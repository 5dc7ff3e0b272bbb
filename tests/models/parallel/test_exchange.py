"""What the processes that share a pack exchange; the laws themselves are in exchange_process.py."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.models.parallel.exchange import Split, shares
from helpers.processes import run_processes

PROCESS = Path(__file__).with_name("exchange_process.py")


@given(items=st.integers(0, 1000), degree=st.integers(1, 16))
def test_shares_are_all_items_as_even_as_they_go(items, degree):
    dealt = shares(items, degree)
    assert len(dealt) == degree
    assert sum(dealt) == items
    assert max(dealt) - min(dealt) <= 1
    assert dealt == sorted(dealt, reverse=True)


@given(units=st.integers(1, 100), unit=st.integers(1, 9), degree=st.integers(1, 8))
def test_the_parts_of_all_processes_follow_each_other_and_keep_units_whole(units, unit, degree):
    slots = list(range(units * unit))
    parts = [slots[Split(len(slots), unit, rank, degree, "").local()] for rank in range(degree)]
    assert [slot for part in parts for slot in part] == slots
    assert all(len(part) % unit == 0 for part in parts)


@pytest.mark.dist
@pytest.mark.parametrize(
    "degree", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_attention_and_gradients_are_those_of_one_process(degree):
    run_processes([sys.executable, PROCESS], degree)


@pytest.mark.dist
@pytest.mark.slow
def test_the_exchange_compiles_once_for_all_lengths():
    """Between two, as three heads do not divide, and more processes take much longer to compile."""
    run_processes([sys.executable, PROCESS, "compiled"], 2)
