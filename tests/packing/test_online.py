import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError, DataError
from headway.packing import STRATEGIES, Budget, OnlinePacker, Size

SIZES = st.lists(st.builds(Size, st.integers(1, 40), st.integers(0, 30)), max_size=120)
BUDGETS = st.sampled_from([Budget(40), Budget(40, 30), Budget(40, 30, 3)])


@given(SIZES, BUDGETS, st.sampled_from(STRATEGIES), st.integers(1, 6))
def test_every_sample_is_handed_out_once_within_the_budgets(sizes, budget, strategy, packs):
    packer = OnlinePacker(budget, strategy, packs=packs)
    done = [pack for number, size in enumerate(sizes) for pack in packer.add(number, size, 7.0 * size.tokens)]
    assert sorted([*itertools.chain(*done), *packer.waiting]) == list(range(len(sizes)))
    done += packer.flush()
    assert packer.waiting == []
    assert sorted(itertools.chain(*done)) == list(range(len(sizes)))
    for pack in done:
        assert pack
        assert sum(sizes[n].tokens for n in pack) <= budget.tokens
        assert budget.patches is None or sum(sizes[n].patches for n in pack) <= budget.patches
        assert budget.items is None or len(pack) <= budget.items


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("longest", [50, pytest.param(400, marks=pytest.mark.slow), 1000])
def test_little_more_than_the_open_packs_is_held(strategy, longest):
    rng = np.random.default_rng(0)
    packer, held = OnlinePacker(Budget(1000), strategy, packs=16), 0
    tokens = rng.integers(1, longest, 5000, endpoint=True)
    for number, length in enumerate(tokens.tolist()):
        packer.add(number, Size(length))
        held = max(held, int(tokens[packer.waiting].sum()))
    assert held <= 1000 * (16 + 2)


def test_packs_that_are_handed_out_together_are_alike():
    rng = np.random.default_rng(0)
    tokens = np.clip(rng.lognormal(4, 1, 20_000), 1, 800).astype(int)
    costs = 4000.0 * tokens + tokens**2
    balance = {}
    for strategy in ("balanced", "best_fit"):
        packer = OnlinePacker(Budget(4000), strategy, packs=16)
        handed = [packer.add(n, Size(length), costs[n]) for n, length in enumerate(tokens.tolist())]
        sums = np.array([[costs[pack].sum() for pack in packs] for packs in handed if packs])
        balance[strategy] = (sums.mean(axis=1) / sums.max(axis=1)).mean()
    assert balance["balanced"] > 0.98
    assert balance["best_fit"] < 0.975


def test_the_same_stream_gives_the_same_packs():
    sizes = [Size(int(n)) for n in np.random.default_rng(0).integers(1, 40, 300)]

    def packs(seed):
        packer = OnlinePacker(Budget(100), packs=8, seed=seed)
        return [pack for number, size in enumerate(sizes) for pack in packer.add(number, size)]

    assert packs(0) == packs(0)
    assert packs(0) != packs(1)


def test_a_sample_beyond_the_budget_is_refused():
    with pytest.raises(DataError, match="A sample has 11 tokens"):
        OnlinePacker(Budget(10)).add("long", Size(11))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"strategy": "worst_fit"}, "'worst_fit'. Allowed: balanced"),
        ({"packs": 0}, "0 open packs"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        OnlinePacker(Budget(10), **settings)
