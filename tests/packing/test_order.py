from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.packing import Order, Stage, StageSource
from headway.packing.order import key_of, permute, shuffled

SIZES = {"chat": 100, "images": 30, "code": 7}
FIRST = {"chat": 0, "images": 100, "code": 130}


def weighted(**weights):
    return Stage(tuple(StageSource(name, weight=weight) for name, weight in weights.items()))


def of_source(items, name):
    return [item for item in items.tolist() if FIRST[name] <= item < FIRST[name] + SIZES[name]]


@given(st.integers(0, 2000), st.integers(0, 300), st.integers(0, 5))
def test_any_piece_can_be_drawn_by_itself(start, count, seed):
    order = Order(SIZES, [weighted(chat=5, images=2, code=1)], seed=seed)
    assert order.draw(start, count).tolist() == order.draw(0, start + count)[start:].tolist()


@given(st.integers(1, 3000), st.tuples(*[st.floats(0.01, 10)] * 3))
def test_of_the_first_draws_each_source_has_its_share(count, weights):
    order = Order(SIZES, [weighted(**dict(zip(SIZES, weights, strict=True)))])
    items = order.draw(0, count)
    for name, weight in zip(SIZES, weights, strict=True):
        share = weight / sum(weights)
        assert abs(len(of_source(items, name)) - share * count) < len(SIZES) + count * 2**-19


def test_each_source_plays_all_its_items_before_it_plays_one_again():
    items = Order(SIZES, [weighted(chat=5, images=2, code=1)], seed=3).draw(0, 3000)
    for name, size in SIZES.items():
        mine = of_source(items, name)
        epochs = [mine[at : at + size] for at in range(0, len(mine), size)]
        assert len(epochs) > 3
        for epoch in epochs[:-1]:
            assert sorted(epoch) == list(range(FIRST[name], FIRST[name] + size))
        assert epochs[0] != epochs[1]  # shuffled anew


@given(
    st.tuples(*[st.sampled_from([0.25, 0.5, 1, 1.5, 2, 3])] * 3),
    st.tuples(*[st.sampled_from([None, 1, 5, 1000])] * 3),
    st.integers(0, 9),
)
def test_epochs_are_exact(epochs, limits, seed):
    sources = [StageSource(name, epochs=e, limit=limit) for name, e, limit in zip(SIZES, epochs, limits, strict=True)]
    order = Order(SIZES, [Stage(tuple(sources))], seed=seed)
    items = order.draw(0, 10_000)
    assert len(items) == order.length
    for source in sources:
        used = min(SIZES[source.name], source.limit or SIZES[source.name])
        counts = np.unique(of_source(items, source.name), return_counts=True)[1]
        assert counts.sum() == round(source.epochs * used)  # halves round to even, as Python's round does
        assert len(counts) <= used
        assert counts.size == 0 or counts.max() - counts.min() <= 1


def test_a_limited_source_plays_the_same_items_in_every_epoch_whatever_the_stage():
    source = StageSource("chat", epochs=1, limit=10)
    order = Order(SIZES, [Stage((source,)), Stage((source,))], seed=5)
    first, second = order.draw(0, 10).tolist(), order.draw(10, 10).tolist()
    assert set(first) == set(second)
    assert first != second
    assert set(first) != set(range(10))


def test_stages_play_in_order_and_the_last_may_be_endless():
    stages = [Stage((StageSource("code", epochs=2),)), Stage(weighted(images=1).sources, samples=40), weighted(chat=1)]
    order = Order(SIZES, stages)
    assert order.length is None
    items = order.draw(0, 254)
    assert sorted(items[:14].tolist()) == sorted([*range(130, 137)] * 2)
    assert len(of_source(items[14:54], "images")) == 40
    assert sorted(items[54:154].tolist()) == sorted(items[154:].tolist()) == list(range(100))


def test_without_stages_sources_play_in_proportion_to_their_size_without_end():
    items = Order(SIZES).draw(0, 137 * 3)
    assert np.bincount(items).tolist() == [3] * 137


def test_seeds_differ_and_repeat():
    first, again, other = (Order(SIZES, seed=seed).draw(0, 137).tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other


BAD = [
    (
        [Stage((StageSource("chats", weight=1),))],
        "'chats', which holds no samples. Sources with samples: chat, images, code",
    ),
    ([Stage(())], "names no source"),
    ([Stage((StageSource("chat"), StageSource("code", weight=1)))], "'code' weight 1 and epochs None"),
    ([Stage((StageSource("chat", weight=1), StageSource("code")))], "'code' weight None and epochs None"),
    ([Stage((StageSource("chat", weight=1, epochs=1),))], "weight 1 and epochs 1"),
    ([Stage((StageSource("chat", weight=1), StageSource("code", epochs=1)))], "weights to all"),
    ([Stage((StageSource("chat", weight=0),))], "above 0"),
    ([Stage((StageSource("chat", epochs=float("nan")),))], "above 0"),
    ([Stage((StageSource("chat", weight=1, limit=0),))], "limit is at least 1"),
    (
        [Stage((StageSource("chat", weight=1),)), Stage((StageSource("code", epochs=1),))],
        "Stage 0 of the data never ends",
    ),
    ([Stage((StageSource("chat", epochs=1),), samples=5)], "both say how long"),
    ([Stage((StageSource("chat", weight=1),), samples=0)], "has 0 samples"),
    ([Stage((StageSource("chat", weight=1),), samples=2**63)], "more than an order can number"),
]


@pytest.mark.parametrize(("stages", "text"), BAD, ids=[text for _, text in BAD])
def test_a_stage_that_cannot_play_is_refused(stages, text):
    with pytest.raises(ConfigError, match=text):
        Order(SIZES, stages)


def test_an_order_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="nothing to order"):
        Order({"chat": 0})


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_every_place_goes_to_a_place_of_its_own(size, key):
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))
    assert sorted(shuffled(size, key).tolist()) == list(range(size))


@given(st.integers(2, 500), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5))
def test_a_key_for_each_place_gives_what_each_key_alone_gives(size, keys):
    places = np.arange(size)
    which = places % len(keys)
    together = permute(places, size, np.array(keys, dtype=np.uint64)[which])
    alone = [permute(places, size, key) for key in keys]
    assert together.tolist() == [int(alone[number][place]) for place, number in zip(places, which, strict=True)]


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


@pytest.mark.parametrize(
    ("weights", "settings", "expected"),
    [
        ((None, None), {"epochs": 3}, {"chat": 300, "images": 90}),
        ((None, None), {"epochs": 0.5}, {"chat": 50, "images": 15}),
        ((1, 1), {"epochs": 2}, {"chat": 200, "images": 200}),
        ((1, 1), {"epochs": 2, "samples": 20}, {"chat": 20, "images": 20}),
        ((0.25, 0.75), {"epochs": 1}, {"chat": 100, "images": 300}),
    ],
)
def test_epochs_of_a_mixture_are_those_of_all_its_items_or_of_the_source_that_lasts_longest(
    weights, settings, expected
):
    sizes = {"chat": 100, "images": 30}
    parts = tuple(StageSource(name, weight) for name, weight in zip(sizes, weights, strict=True))
    order = Order(sizes, [Stage(parts, **settings)], seed=3)
    items = order.draw(0, order.length + 1)
    assert {"chat": int((items < 100).sum()), "images": int((items >= 100).sum())} == expected
    assert order.epochs_at(len(items)) == pytest.approx(settings["epochs"])


def test_every_item_comes_once_an_epoch_and_an_order_of_more_epochs_begins_alike():
    sizes = {"chat": 100, "images": 30}
    stage = (StageSource("chat"), StageSource("images", limit=20))
    once, endless = Order(sizes, [Stage(stage, epochs=1)]), Order(sizes, [Stage(stage)])
    thrice = Order(sizes, [Stage(stage, epochs=3)])
    items = thrice.draw(0, 10**6)
    assert items.tolist() == endless.draw(0, 360).tolist()
    assert items[:120].tolist() == once.draw(0, 10**6).tolist()
    for epoch in range(3):
        assert len(set(items[epoch * 120 : (epoch + 1) * 120].tolist())) == 120
