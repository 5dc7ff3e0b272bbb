import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.packing import deal
from headway.packing.steps import BALANCE, balance_of, group_into_steps, rank_costs

COSTS = st.lists(st.integers(1, 1000), min_size=12, max_size=12)


@given(COSTS, st.sampled_from([(1, 12), (2, 6), (3, 4), (12, 1)]))
def test_each_rank_gets_its_number_of_packs_and_each_pack_one_rank(costs, shape):
    ranks, accumulation = shape
    hands = deal([float(cost) for cost in costs], ranks, accumulation)
    assert [len(hand) for hand in hands] == [accumulation] * ranks
    assert sorted(itertools.chain(*hands)) == list(range(12))


@given(COSTS)
def test_ranks_differ_by_no_more_than_the_heaviest_pack(costs):
    sums = [sum(costs[pack] for pack in hand) for hand in deal([float(cost) for cost in costs], 3, 4)]
    assert max(sums) - min(sums) <= max(costs)


def test_heavy_and_light_packs_pair_up():
    assert rank_costs(np.array([[9.0, 8.0, 2.0, 1.0]]), 2).tolist() == [[10.0, 10.0]]
    assert balance_of(np.array([[9.0, 8.0, 2.0, 1.0]]), 2).tolist() == [1.0]
    assert balance_of(np.array([[9.0, 8.0, 2.0, 1.0]]), 4).tolist() == [20 / 4 / 9]


@given(st.lists(st.integers(1, 1000), min_size=24, max_size=24), st.sampled_from([2, 4, 8]), st.integers(0, 3))
def test_grouping_only_reorders(costs, packs_per_step, key):
    steps = group_into_steps(np.array(costs, dtype=float), packs_per_step, 1, key)
    assert steps.shape == (24 // packs_per_step, packs_per_step)
    assert sorted(steps.reshape(-1).tolist()) == list(range(24))


def test_packs_of_like_cost_are_not_sorted():
    costs = np.arange(3200) + 1e6  # within 0.3 %
    steps = group_into_steps(costs, 32, 1, key=1)
    # sorted steps would span 32 neighbours; random ones span nearly all
    assert np.median(np.ptp(costs[steps], axis=1)) > 2500


def test_packs_that_differ_are_sorted_as_far_as_balance_needs():
    costs = np.floor(np.random.default_rng(0).lognormal(20, 0.3, 6400))
    random = balance_of(costs.reshape(-1, 32), 32).mean()
    assert random < 0.7
    assert balance_of(costs[group_into_steps(costs, 32, 1, key=1)], 32).mean() >= BALANCE


def test_accumulation_leaves_more_to_chance():
    costs = np.floor(np.random.default_rng(0).lognormal(20, 0.3, 6400))
    spans = [np.ptp(costs[group_into_steps(costs, 32, accumulation, key=1)], axis=1).mean() for accumulation in (1, 8)]
    assert spans[1] > 2 * spans[0]


@pytest.mark.parametrize(("ranks", "accumulation"), [(0, 1), (2, 0), (2, 3)])
def test_packs_that_cannot_be_dealt_are_refused(ranks, accumulation):
    with pytest.raises(ConfigError, match=f"{ranks} ranks with an accumulation of {accumulation}"):
        deal([1.0, 2.0, 3.0, 4.0], ranks, accumulation)
