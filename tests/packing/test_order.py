import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.packing import Order, Play, Stage

SIZES = {"chat": 100, "images": 30, "code": 7}
FIRST = {"chat": 0, "images": 100, "code": 130}


def weighted(**weights):
    return Stage(tuple(Play(name, weight=weight) for name, weight in weights.items()))


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
    plays = [Play(name, epochs=e, limit=limit) for name, e, limit in zip(SIZES, epochs, limits, strict=True)]
    order = Order(SIZES, [Stage(tuple(plays))], seed=seed)
    items = order.draw(0, 10_000)
    assert len(items) == order.length
    for play in plays:
        used = min(SIZES[play.source], play.limit or SIZES[play.source])
        counts = np.unique_counts(of_source(items, play.source)).counts
        assert counts.sum() == round(play.epochs * used)  # halves round to even, as Python's round does
        assert len(counts) <= used
        assert counts.size == 0 or counts.max() - counts.min() <= 1


def test_a_limited_source_plays_the_same_items_in_every_epoch_whatever_the_stage():
    play = Play("chat", epochs=1, limit=10)
    order = Order(SIZES, [Stage((play,)), Stage((play,))], seed=5)
    first, second = order.draw(0, 10).tolist(), order.draw(10, 10).tolist()
    assert set(first) == set(second)
    assert first != second
    assert set(first) != set(range(10))


def test_stages_play_in_order_and_the_last_may_be_endless():
    stages = [Stage((Play("code", epochs=2),)), Stage(weighted(images=1).plays, samples=40), weighted(chat=1)]
    order = Order(SIZES, stages)
    assert order.length is None
    items = order.draw(0, 254)
    assert sorted(items[:14].tolist()) == sorted([*range(130, 137)] * 2)
    assert len(of_source(items[14:54], "images")) == 40
    assert sorted(items[54:154].tolist()) == sorted(items[154:].tolist()) == list(range(100))


def test_without_stages_sources_play_in_proportion_to_their_size_without_end():
    items = Order(SIZES).draw(0, 137 * 3)
    assert np.bincount(items).tolist() == [3] * 137


def test_without_shuffling_items_come_as_they_are_numbered():
    assert Order.epochs({"a": 4}, 1.5, shuffle=False).draw(0, 9).tolist() == [0, 1, 2, 3, 0, 1]


def test_seeds_differ_and_repeat():
    first, again, other = (Order(SIZES, seed=seed).draw(0, 137).tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other


BAD = [
    ([Stage((Play("chats", weight=1),))], "'chats', which holds no samples. Sources with samples: chat, images, code"),
    ([Stage(())], "plays no source"),
    ([Stage((Play("chat"),))], "weight None and epochs None"),
    ([Stage((Play("chat", weight=1, epochs=1),))], "weight 1 and epochs 1"),
    ([Stage((Play("chat", weight=1), Play("code", epochs=1)))], "weights to all"),
    ([Stage((Play("chat", weight=0),))], "above 0"),
    ([Stage((Play("chat", epochs=float("nan")),))], "above 0"),
    ([Stage((Play("chat", weight=1, limit=0),))], "limit is at least 1"),
    ([Stage((Play("chat", weight=1),)), Stage((Play("code", epochs=1),))], "Stage 0 of the data never ends"),
    ([Stage((Play("chat", epochs=1),), samples=5)], "epochs say how long"),
    ([Stage((Play("chat", weight=1),), samples=0)], "has 0 samples"),
    ([Stage((Play("chat", weight=1),), samples=2**63)], "more than an order can number"),
]


@pytest.mark.parametrize(("stages", "text"), BAD, ids=[text for _, text in BAD])
def test_a_stage_that_cannot_play_is_refused(stages, text):
    with pytest.raises(ConfigError, match=text):
        Order(SIZES, stages)


def test_an_order_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="nothing to order"):
        Order({"chat": 0})
