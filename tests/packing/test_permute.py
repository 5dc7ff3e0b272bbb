from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.packing.permute import key_of, permute, shuffled


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_every_place_goes_to_a_place_of_its_own(size, key):
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))
    assert sorted(shuffled(size, key).tolist()) == list(range(size))


@given(st.integers(2, 500), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5))
def test_a_key_for_each_place_gives_what_each_key_alone_gives(size, keys):
    places = np.arange(size)
    which = places % len(keys)
    together = permute(places, size, np.array(keys, dtype=np.uint64)[which])
    assert together.tolist() == [
        int(permute(places, size, keys[w])[place]) for place, w in zip(places, which, strict=True)
    ]


def test_a_billion_places_are_permuted_where_they_are_asked_for():
    size = 10**9 + 7
    places = np.concatenate([np.arange(50_000), size - 1 - np.arange(50_000)])
    images = permute(places, size, key_of(1))
    assert images.min() >= 0
    assert images.max() < size
    assert len(np.unique(images)) == len(places)


def test_all_orders_of_four_come_up_about_equally_often():
    orders = Counter(tuple(permute(np.arange(4), 4, key_of(9, number)).tolist()) for number in range(4800))
    assert len(orders) == 24
    # each order is expected 200 times, with a standard deviation of about 14
    assert max(abs(count - 200) for count in orders.values()) < 6 * 14


def test_neighbours_are_torn_apart():
    size = 100_000
    images = permute(np.arange(size), size, key_of(2))
    # the correlation of independent numbers has a standard deviation of 1 / sqrt(size), 0.003
    assert abs(np.corrcoef(np.arange(size), images)[0, 1]) < 0.02
    assert abs(np.corrcoef(images[1:], images[:-1])[0, 1]) < 0.02


def test_the_permutation_is_the_same_for_ever():
    """Recorded once: another sequence would change the data of every resumed run."""
    assert permute(np.arange(8), 8, key_of(0)).tolist() == [3, 7, 4, 5, 2, 6, 0, 1]
    assert shuffled(8, key_of(0)).tolist() == [5, 0, 4, 3, 6, 7, 2, 1]


@pytest.mark.parametrize("parts", [(0,), (1,), (0, 0), (-1, 2**70)])
def test_keys_of_different_numbers_differ(parts):
    assert key_of(*parts) != key_of(*parts, 0)
    assert 0 <= key_of(*parts) < 2**64
