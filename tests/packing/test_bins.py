import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data import Budget, Size
from headway.errors import ConfigError, DataError
from headway.packing.bins import FITS, pack

TOKENS, PATCHES = 40, 30
SIZES = st.lists(st.builds(Size, st.integers(1, TOKENS), st.integers(0, PATCHES)), max_size=60)
BUDGETS = st.sampled_from([Budget(TOKENS), Budget(TOKENS, PATCHES)])
STRATEGY = st.sampled_from(FITS)


def room(budget, sizes, members):
    """Tokens and patches left; patches count only where they have a budget."""
    patches = sum(sizes[i].patches for i in members) if budget.patches is not None else 0
    return budget.tokens - sum(sizes[i].tokens for i in members), (budget.patches or 0) - patches


def fits(budget, sizes, members, index):
    tokens, patches = room(budget, sizes, [*members, index])
    return tokens >= 0 and patches >= 0


@given(SIZES, BUDGETS, STRATEGY)
def test_every_sample_is_in_exactly_one_pack(sizes, budget, strategy):
    packs = pack(sizes, budget, strategy)
    assert sorted(itertools.chain(*packs)) == list(range(len(sizes)))
    assert all(packs)


@given(SIZES, BUDGETS, STRATEGY)
def test_no_pack_exceeds_its_budgets(sizes, budget, strategy):
    for members in pack(sizes, budget, strategy):
        assert min(room(budget, sizes, members)) >= 0


@given(SIZES, BUDGETS)
def test_first_fit_takes_the_oldest_pack_with_room_and_opens_one_only_without(sizes, budget):
    packs = pack(sizes, budget, "first_fit")
    owner = {index: number for number, members in enumerate(packs) for index in members}
    open_packs: list[list[int]] = []
    for index in range(len(sizes)):
        candidates = [n for n, members in enumerate(open_packs) if fits(budget, sizes, members, index)]
        expected = candidates[0] if candidates else len(open_packs)
        assert owner[index] == expected
        if expected == len(open_packs):
            open_packs.append([])
        open_packs[expected].append(index)


@given(SIZES, BUDGETS)
def test_best_fit_takes_the_tightest_pack_with_room_and_opens_one_only_without(sizes, budget):
    packs = pack(sizes, budget, "best_fit")
    owner = {index: number for number, members in enumerate(packs) for index in members}
    open_packs: list[list[int]] = []
    for index in range(len(sizes)):
        candidates = [members for members in open_packs if fits(budget, sizes, members, index)]
        chosen = owner[index]
        if candidates:
            assert room(budget, sizes, open_packs[chosen]) == min(room(budget, sizes, c) for c in candidates)
            assert open_packs[chosen] in candidates
        else:
            assert chosen == len(open_packs)
            open_packs.append([])
        open_packs[chosen].append(index)


def test_best_fit_leaves_less_room_than_first_fit_where_order_misleads():
    sizes = [Size(5), Size(7), Size(3), Size(5)]
    assert pack(sizes, Budget(10), "first_fit") == [[0, 2], [1], [3]]
    assert pack(sizes, Budget(10), "best_fit") == [[0, 3], [1, 2]]


def test_patches_bind_as_tokens_do():
    sizes = [Size(1, 8), Size(1, 8), Size(1, 2)]
    assert pack(sizes, Budget(100, 10), "first_fit") == [[0, 2], [1]]
    assert pack(sizes, Budget(100), "first_fit") == [[0, 1, 2]]


@pytest.mark.parametrize("size", [Size(11), Size(5, 4)])
def test_a_sample_beyond_the_budget_is_refused_with_its_size_and_the_options(size):
    with pytest.raises(DataError) as caught:
        pack([Size(1), size], Budget(10, 3))
    message = str(caught.value)
    assert f"Sample 1 has {size.tokens} tokens and {size.patches} vision patches" in message
    assert "10 tokens and 3 patches" in message
    assert '"drop"' in message
    assert '"truncate"' in message


def test_an_unknown_strategy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'next_fit'. Allowed: first_fit, best_fit"):
        pack([Size(1)], Budget(10), "next_fit")


@pytest.mark.parametrize(("tokens", "patches"), [(0, None), (-1, 5), (10, -1)])
def test_a_budget_that_holds_nothing_is_refused(tokens, patches):
    with pytest.raises(ConfigError, match="at least 1 token"):
        Budget(tokens, patches)
