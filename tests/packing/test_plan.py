import itertools
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headway.errors import CheckpointError, ConfigError, DataError
from headway.packing import STRATEGIES, Budget, Items, Order, Plan, Stage, StageSource
from headway.packing.steps import balance_of
from helpers.cases import examples

TOKENS, PATCHES = 40, 30


@st.composite
def plans(draw):
    """Plans over small random items, with windows so small that several are needed."""
    count = draw(st.integers(1, 150))
    seed = draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    longest = draw(st.sampled_from([3, 15, TOKENS]))
    tokens, patches = rng.integers(1, longest, count, endpoint=True), rng.integers(0, PATCHES, count)
    items = Items.of(tokens, patches, tokens * (1e12 + 3e9 * tokens) + 5e12 * patches)
    budget = Budget(TOKENS, draw(st.sampled_from([None, PATCHES])), draw(st.sampled_from([None, None, 2, 7])))
    order = Order.epochs(items.sizes, draw(st.sampled_from([1, 2, 1.5])), seed=seed)
    settings = {
        "strategy": draw(st.sampled_from(STRATEGIES)),
        "window": draw(st.integers(1, 80)),
        "seed": draw(st.integers(0, 9)),
    }
    return items, order, budget, settings


def packs_of(steps):
    return [pack for step, _ in steps for pack in step.packs]


def drawn(order):
    return sorted(order.draw(0, order.length).tolist())


@given(plans(), st.integers(1, 6))
def test_every_item_is_planned_exactly_as_often_as_the_order_plays_it(plan, packs_per_step):
    items, order, budget, settings = plan
    steps = list(Plan(items, order, budget, packs_per_step, **settings).steps())
    assert sorted(itertools.chain(*packs_of(steps))) == drawn(order)


@given(plans(), st.integers(1, 6))
def test_no_pack_exceeds_a_budget_and_every_step_has_its_packs(plan, packs_per_step):
    items, order, budget, settings = plan
    for step, _ in Plan(items, order, budget, packs_per_step, **settings).steps():
        assert len(step.packs) == packs_per_step
        for pack, cost in zip(step.packs, step.costs, strict=True):
            assert items.tokens[pack].sum() <= budget.tokens
            assert budget.patches is None or items.patches[pack].sum() <= budget.patches
            assert budget.items is None or len(pack) <= budget.items
            assert cost == pytest.approx(items.costs[pack].sum())


@given(plans(), st.integers(1, 6))
def test_no_rank_is_left_without_tokens_before_the_end(plan, packs_per_step):
    items, order, budget, settings = plan
    steps = [step for step, _ in Plan(items, order, budget, packs_per_step, **settings).steps()]
    idle = [number for number, step in enumerate(steps) if not all(len(pack) for pack in step.packs)]
    assert not idle or idle[0] >= len(steps) - 2


@given(plans(), st.integers(1, 6), st.data())
def test_a_plan_resumes_to_the_very_steps_that_would_have_followed(plan, packs_per_step, data):
    items, order, budget, settings = plan
    whole = list(Plan(items, order, budget, packs_per_step, **settings).steps())
    at = data.draw(st.integers(0, len(whole) - 1))
    state = json.loads(json.dumps(whole[at][1]))
    rest = list(Plan(items, order, budget, packs_per_step, **settings).steps(state))
    assert [[pack.tolist() for pack in step.packs] for step, _ in rest] == [
        [pack.tolist() for pack in step.packs] for step, _ in whole[at + 1 :]
    ]
    assert [after for _, after in rest] == [after for _, after in whole[at + 1 :]]


@given(plans(), st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=5))
def test_nothing_is_lost_or_repeated_when_the_packs_per_step_change_again_and_again(plan, changes):
    items, order, budget, settings = plan
    state, packs = None, []
    for packs_per_step, num_steps in changes:
        plan = Plan(items, order, budget, packs_per_step, **settings)
        for step, after in itertools.islice(plan.steps(state), num_steps):
            packs += step.packs
            state = after
    packs += packs_of(Plan(items, order, budget, changes[0][0], **settings).steps(state))
    assert sorted(itertools.chain(*packs)) == drawn(order)


def test_packs_of_the_running_window_keep_their_order_when_the_packs_per_step_change():
    items = Items.of(np.random.default_rng(0).integers(1, TOKENS, 400))
    order = Order.epochs(items.sizes, 1)
    (_, state), *rest = Plan(items, order, Budget(TOKENS), 4).steps()
    other = next(iter(Plan(items, order, Budget(TOKENS), 8).steps(state)))[0]
    assert [pack.tolist() for pack in other.packs] == [pack.tolist() for step, _ in rest[:2] for pack in step.packs]


def test_an_endless_order_is_planned_on_and_on_with_a_small_state():
    items = Items.of(np.random.default_rng(0).integers(1, TOKENS, 50))
    plan = Plan(items, Order(items.sizes), Budget(TOKENS), 4, window=64)
    seen = np.zeros(50, dtype=int)
    steps = list(itertools.islice(plan.steps(), 300))
    for pack in packs_of(steps):
        np.add.at(seen, pack, 1)
    assert seen.min() >= seen.max() - 3  # all play equally often, but for what the last windows hold
    assert len(json.dumps(steps[-1][1])) < 1000


def test_the_plan_depends_on_the_seed():
    items = Items.of(np.random.default_rng(0).integers(1, TOKENS, 100))
    order = Order.epochs(items.sizes, 1)
    first, other = (
        [pack.tolist() for pack in packs_of(Plan(items, order, Budget(TOKENS), 2, seed=seed).steps())]
        for seed in (0, 1)
    )
    assert first != other


def random_items(mix):
    rng = np.random.default_rng(4)
    tokens = {
        "short": np.clip(rng.lognormal(6.5, 1.0, 30_000), 16, 16_384),
        "hardly any fits together": rng.uniform(3_000, 26_000, 10_000),
        "many fill a pack": np.clip(rng.lognormal(9.0, 1.0, 20_000), 128, 51_200),
    }[mix].astype(np.int64)
    return Items.of(tokens, costs=45e9 * tokens + 3e5 * tokens.astype(float) ** 2)  # an 8 B model's, roughly


@pytest.mark.parametrize("mix", ["short", "hardly any fits together", "many fill a pack"])
@pytest.mark.parametrize(("ranks", "accumulation"), [(32, 1), (8, 4)])
def test_balanced_packs_are_full_and_ranks_equal(mix, ranks, accumulation):
    items = random_items(mix)
    order = Order.epochs(items.sizes, 1, seed=1)
    plan = Plan(items, order, Budget(51_200), ranks * accumulation, accumulation=accumulation)
    *whole, _ = [step for step, _ in plan.steps()]  # the last step holds what is left
    tokens = sum(items.tokens[pack].sum() for step in whole for pack in step.packs)
    assert tokens / (51_200 * ranks * accumulation * len(whole)) >= 0.99
    assert balance_of(np.array([step.costs for step in whole]), ranks).mean() >= 0.985


def test_less_balance_mixes_better():
    from headway.packing import measure

    items = random_items("many fill a pack")
    reports = [
        measure(Plan(items, Order.epochs(items.sizes, 1), Budget(51_200), 32, balance=balance), 32)[0]
        for balance in (0.0, 0.9, 1.0)
    ]
    assert reports[0].mixing < reports[1].mixing < reports[2].mixing
    assert reports[0].balance < 0.88
    assert 0.895 <= reports[1].balance < 0.98 < reports[2].balance


def test_short_samples_are_mixed_as_well_as_random_packing_mixes_them():
    from headway.packing import measure

    items = random_items("short")
    plan = Plan(items, Order.epochs(items.sizes, 1), Budget(51_200), 8)
    assert measure(plan, 8)[0].mixing <= 1.3


@settings(max_examples=examples(8, 20))
@given(st.integers(2, 400))
def test_samples_that_never_fit_together_are_not_put_off_for_ever(count):
    items = Items.of(np.random.default_rng(count).integers(21, 40, count, endpoint=True))
    steps = list(Plan(items, Order.epochs(items.sizes, 1), Budget(40), 4, window=40).steps())
    assert len(steps) == -(-count // 4)
    assert all(len(state["carried"]) <= 40 for _, state in steps)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"strategy": "worst_fit"}, "'worst_fit'. Allowed: balanced, best_fit, first_fit, next_fit, none"),
        ({"packs_per_step": 0}, "0 packs per step"),
        ({"packs_per_step": 6, "accumulation": 4}, "ranks times accumulation"),
        ({"window": 0}, "A window of 0 samples"),
        ({"balance": 98.5}, "A balance of 98.5"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(changes, text):
    items = Items.of([1, 2])
    settings = {"packs_per_step": 2, **changes}
    with pytest.raises(ConfigError, match=text):
        Plan(items, Order(items.sizes), Budget(10), **settings)


@pytest.mark.parametrize(("tokens", "text"), [([5, 11], "Item 1 has 11 tokens"), ([5, 0], "Item 1 has 0 tokens")])
def test_an_item_that_cannot_be_packed_is_refused(tokens, text):
    items = Items.of(tokens)
    with pytest.raises(DataError, match=text):
        Plan(items, Order(items.sizes), Budget(10), 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_order_without_items_has_no_steps(strategy):
    items = Items.of([5])
    order = Order.epochs(items.sizes, 0.25)
    assert order.length == 0
    assert list(Plan(items, order, Budget(10), 2, strategy=strategy).steps()) == []


def test_a_state_that_is_none_is_refused():
    items = Items.of([1, 2])
    plan = Plan(items, Order(items.sizes), Budget(10), 2)
    with pytest.raises(CheckpointError, match="packs_done"):
        next(plan.steps({"position": 3}))


def test_a_curriculum_is_planned_in_order():
    sizes = {"easy": 40, "hard": 40}
    stages = [Stage((StageSource("easy", epochs=1),)), Stage((StageSource("hard", epochs=1),))]
    items = Items(np.full(80, 10, np.int32), np.zeros(80, np.int32), np.ones(80), tuple(sizes), np.array([0, 40, 80]))
    steps = list(Plan(items, Order(sizes, stages), Budget(20), 2, window=20, strategy="best_fit").steps())
    first = [item for step, _ in steps[:10] for pack in step.packs for item in pack]
    assert sorted(first) == list(range(40))


@given(st.integers(20, 400), st.integers(20, 400), st.integers(1, 4))
def test_a_stage_is_over_before_the_next_begins_but_for_what_fills_no_step(first, second, packs_per_step):
    """A curriculum: windows, whose steps are shuffled, do not reach across stages. A pack takes four items of these."""
    items = Items(
        np.full(first + second, 7, dtype=np.int32),
        np.zeros(first + second, dtype=np.int32),
        np.full(first + second, 7.0),
        ("first", "second"),
        np.array([0, first, first + second]),
    )
    stages = [Stage((StageSource("first", epochs=1),)), Stage((StageSource("second", epochs=1),))]
    plan = Plan(items, Order(items.sizes, stages), Budget(30), packs_per_step)
    of_first = [np.concatenate(step.packs) < first for step, _ in plan.steps()]
    begins = next(at for at, is_first in enumerate(of_first) if not is_first.all())
    assert sum(is_first.sum() for is_first in of_first[begins:]) <= 5 * packs_per_step


@given(plans(), st.integers(1, 4), st.integers(1, 3))
def test_an_epoch_is_an_epoch(plan, ranks, accumulation):
    """After n places of an order over N samples, each has played floor(n / N) or floor(n / N) + 1 times."""
    items, order, budget, settings = plan
    plan = Plan(items, order, budget, ranks * accumulation, accumulation=accumulation, **settings)
    assume(plan.ends_epochs)
    played = np.zeros(len(items), dtype=int)
    for step, _ in plan.steps():
        np.add.at(played, np.concatenate(step.packs), 1)
        assert set(played) <= {step.reached // len(items), step.reached // len(items) + 1}
        assert played.sum() == step.reached


@pytest.mark.parametrize("times", [{"a": 2, "b": 4}, {"a": 3, "b": 3}, {"a": 1.5, "b": 1.5}, {"a": 1, "b": 1.7}])
def test_sources_with_epochs_of_their_own_end_them_together_where_they_can(times):
    sizes = {"a": 60, "b": 30}
    order = Order(sizes, [Stage(tuple(StageSource(name, epochs=number) for name, number in times.items()))])
    draws = {name: round(times[name] * size) for name, size in sizes.items()}
    ends = [order.lap_end(0)]
    while ends[-1] < order.length:
        ends.append(order.lap_end(ends[-1]))
    assert ends[-1] == order.length == sum(draws.values())
    for end in ends[:-1]:
        counts = np.bincount(order.draw(0, end), minlength=90)
        assert all(len(set(part)) == 1 for part in np.split(counts, [60]))
    assert len(ends) == {(2, 4): 2, (3, 3): 3, (1.5, 1.5): 2}.get(tuple(times.values()), 1)


def test_epochs_of_a_few_steps_are_mixed_where_ranks_would_have_unequal_work():
    """Of four packs a step, two of which one long sample fills: a rank of three short ones has half as much to do."""
    lengths = np.array([40] * 2 + [3] * 12)
    items = Items.of(lengths, costs=lengths.astype(float) ** 2)
    endless = Order(items.sizes)
    alone = Plan(items, endless, Budget(40), 4, accumulation=4)  # one rank has all packs of a step
    assert alone.ends_epochs
    assert not Plan(items, endless, Budget(40), 4).ends_epochs
    assert Plan(items, endless, Budget(40), 4, balance=0.0).ends_epochs
    assert Plan(items, Order.epochs(items.sizes, 1), Budget(40), 4).ends_epochs  # there is only one


@pytest.mark.slow
@settings(max_examples=examples(10, 50))
@given(plans(), st.integers(1, 4), st.data())
def test_a_plan_goes_on_for_more_epochs_from_any_step_with_every_item_as_often(plan, packs_per_step, data):
    items, _, budget, settings = plan
    stage = tuple(StageSource(name) for name in items.sizes)
    short, long = (Order(items.sizes, [Stage(stage, epochs=epochs)], seed=7) for epochs in (1.5, 3))
    before = list(Plan(items, short, budget, packs_per_step, **settings).steps())
    taken = data.draw(st.integers(1, len(before)))
    state = json.loads(json.dumps(before[taken - 1][1]))
    longer = Plan(items, long, budget, packs_per_step, **settings)
    after = list(longer.steps(state))
    assert sorted(itertools.chain(*packs_of(before[:taken]), *packs_of(after))) == drawn(long)
    assert longer.count_steps(state) == len(after)
    assert longer.count_steps(state, 2) == min(2, len(after))
    assert [step.reached for step, _ in [*before[:taken], *after]][-1] == long.length


@pytest.mark.parametrize(("samples", "length", "packs"), [(8192, 8192, 4096), (64, 8192, 32), (1000, 4096, 256)])
def test_samples_of_one_length_fill_packs_exactly_and_equally(samples, length, packs):
    from headway.packing import measure

    items = Items.of([length] * samples)
    report, _ = measure(Plan(items, Order.epochs(items.sizes, 1, seed=0), Budget(16_384), 8), 8)
    assert (report.packs, report.fill, report.balance) == (packs, 1.0, 1.0)
