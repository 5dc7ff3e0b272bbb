import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.packing.balanced import assign_lpt, fill_least_loaded, fix_overflow, overflow

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def one_after_the_other(weights, num_packs):
    """Longest processing time first (Graham 1969), a sample at a time: the loads that result, sorted."""
    loads = [0.0] * num_packs
    for weight in weights:
        loads[loads.index(min(loads))] += weight
    return sorted(loads)


@given(WEIGHTS, st.integers(1, 60))
def test_many_at_a_time_load_packs_as_one_after_the_other_does(weights, num_packs):
    weights = np.sort(np.array(weights, dtype=float))[::-1]
    loads = np.zeros(num_packs)
    pack_of = fill_least_loaded(weights, loads)
    assert sorted(loads.tolist()) == one_after_the_other(weights, num_packs)
    assert np.bincount(pack_of, weights, num_packs).tolist() == loads.tolist()


@given(WEIGHTS, st.lists(st.integers(0, 1000), min_size=40, max_size=40))
def test_uneven_loads_are_filled_up_from_the_lowest(weights, start):
    weights = np.sort(np.array(weights, dtype=float))[::-1]
    loads = np.array(start, dtype=float)
    fill_least_loaded(weights, loads)
    assert loads.sum() == weights.sum() + sum(start)
    # whatever grew was the lowest before its last sample came
    grown = loads > np.array(start)
    assert loads[grown].max() - weights[0] <= loads.min()


@given(WEIGHTS, st.integers(1, 10), st.integers(1, 9))
def test_no_pack_takes_more_samples_than_it_has_room_for(weights, num_packs, room):
    weights = np.sort(np.array(weights, dtype=float))[::-1][: num_packs * room]
    free = np.full(num_packs, room)
    pack_of = fill_least_loaded(weights, np.zeros(num_packs), free)
    counts = np.bincount(pack_of, minlength=num_packs)
    assert counts.max() <= room
    assert (free == room - counts).all()


def test_packs_with_a_long_sample_stay_shorter_so_that_all_cost_the_same():
    rng = np.random.default_rng(0)
    tokens = np.concatenate([np.full(4, 4000), rng.integers(10, 200, 3000)])
    costs = np.floor(1000.0 * tokens + tokens**2 / 8)  # a sample of 4,000 tokens costs half as much again
    num_packs = 40
    pack_of = assign_lpt(tokens, costs, num_packs, int(tokens.sum() / num_packs * 1.03))
    pack_tokens = np.bincount(pack_of, tokens, num_packs)
    pack_costs = np.bincount(pack_of, costs, num_packs)
    with_long = np.unique(pack_of[:4])
    assert len(with_long) == 4
    assert pack_tokens[with_long].max() < np.delete(pack_tokens, with_long).min()
    assert pack_costs.mean() / pack_costs.max() > 0.99


@st.composite
def overfull_packs(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_packs = draw(st.integers(2, 30))
    count = num_packs * draw(st.integers(1, 6))
    needs = np.stack([rng.integers(1, 100, count), rng.integers(0, 50, count)])
    caps = (needs.sum(axis=1) / num_packs * draw(st.floats(1.02, 1.5))).astype(np.int64) + 1
    return rng.integers(0, num_packs, count), needs, caps, needs[0] * 10.0, num_packs


def total_overflow(pack_of, needs, caps, num_packs):
    over = np.maximum(overflow(pack_of, needs, caps, num_packs), 0)
    return (over / caps[:, None]).sum()


@given(overfull_packs(), st.integers(0, 5))
def test_repair_moves_samples_and_never_makes_the_excess_larger(packs, key):
    pack_of, needs, caps, costs, num_packs = packs
    repaired = fix_overflow(pack_of, needs, caps, costs, num_packs, key)
    assert len(repaired) == len(pack_of)
    assert repaired.min() >= 0
    assert repaired.max() < num_packs
    # costs may differ by a pack at most per pair, which weighs as much as 1/64 of a budget
    before, after = (total_overflow(packs, needs, caps, num_packs) for packs in (pack_of, repaired))
    assert after <= before + num_packs / 4


def test_repair_finds_the_division_that_fits():
    # 7 + 5 exceed 10 and 4 + 3 leave room: 7 + 3 and 5 + 4 fit
    needs, caps = np.array([[7, 5, 4, 3]]), np.array([10])
    repaired = fix_overflow(np.array([0, 0, 1, 1]), needs, caps, needs[0] * 1.0, 2, key=0)
    assert overflow(repaired, needs, caps, 2).max() <= 0


def test_repair_makes_most_packs_of_few_large_samples_fit():
    rng = np.random.default_rng(1)
    tokens = rng.integers(3_000, 26_000, 14_000)
    num_packs = int(tokens.sum() / (51_200 * 0.991))
    pack_of = assign_lpt(tokens, 1.0 * tokens, num_packs, 51_200)
    caps = np.array([51_200])
    repaired = fix_overflow(pack_of, tokens[None], caps, 1.0 * tokens, num_packs, key=0)
    before, after = ((overflow(packs, tokens[None], caps, num_packs) > 0).mean() for packs in (pack_of, repaired))
    assert before > 0.3
    assert after < 0.01


@pytest.mark.parametrize("num_packs", [1, 7])
def test_nothing_is_spread_over_packs(num_packs):
    none = np.zeros(0, dtype=np.int64)
    assert assign_lpt(none, none * 1.0, num_packs, 10).tolist() == []
