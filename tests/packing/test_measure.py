import numpy as np
import pytest

from headway.errors import ConfigError
from headway.packing import Budget, Items, Order, Plan, measure


def plan(tokens, strategy="next_fit", ranks=2, budget=10, **settings):
    items = Items.of(tokens)
    order = Order.epochs(items.sizes, 1)
    order.draw = lambda start, count: np.arange(start, min(start + count, len(items)))  # as they are numbered
    return Plan(items, order, Budget(budget), ranks, strategy=strategy, **settings)


def test_a_plan_in_numbers():
    # next fit makes the packs [6] [5 4] | [7 3] [8], by twos; the costs are the tokens, and what is left is [2]
    report, fills = measure(plan([6, 5, 4, 7, 3, 8, 9, 1, 2], window=8), 2)
    assert (report.samples, report.tokens) == (9, 45)
    assert report.steps == 3
    assert report.fill == pytest.approx((6 + 9 + 10 + 8) / 40)
    assert report.waste == pytest.approx(1 - report.fill)
    assert fills.tolist() == [0.6, 0.9, 1.0, 0.8]
    assert report.balance == pytest.approx((7.5 / 9 + 9 / 10) / 2)
    assert report.straggler_loss == pytest.approx(1 - (7.5 + 9) / (9 + 10))
    assert report.step_flops == pytest.approx((15 + 18) / 2)
    assert report.last_step_fill == pytest.approx((10 + 2) / 20)


def test_padding_is_what_padded_batches_of_the_packs_would_hold():
    # packs [6 2] and [5 5]: 12 slots with 8 tokens, 10 with 10
    report, _ = measure(plan([6, 2, 5, 5]), 2)
    assert report.padding_loss == pytest.approx(1 - 18 / 22)


def test_random_packing_mixes_as_random_packing_and_sorting_does_not():
    rng = np.random.default_rng(0)
    tokens = np.clip(rng.lognormal(5, 1, 40_000), 1, 5000).astype(int)
    as_random = measure(plan(tokens, ranks=4, budget=8000), 4)[0].mixing
    by_length = measure(plan(np.sort(tokens), ranks=4, budget=8000), 4)[0].mixing
    assert as_random == pytest.approx(1, abs=0.15)
    assert by_length > 3


def test_ranks_share_the_packs_of_a_step():
    report, _ = measure(plan([9, 1, 2, 8], "none", ranks=4, accumulation=2), 2)
    assert report.balance == 1.0
    with pytest.raises(ConfigError, match="4 packs per step cannot be shared by 3 ranks"):
        measure(plan([9, 1, 2, 8], "none", ranks=4), 3)


def test_an_endless_order_is_not_measured():
    items = Items.of([1, 2])
    with pytest.raises(ConfigError, match="This order is empty or never ends"):
        measure(Plan(items, Order(items.sizes), Budget(10), 2), 2)
