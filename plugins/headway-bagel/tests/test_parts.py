"""Samples made of parts: what is left out of them, and what they cost, to the FLOP."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.count import load_cost_model
from headway.packing.parts import KINDS, Dropout, PartCosts, PartTable, workload_of

TEXT, IMAGE, CLEAN, NOISED = range(4)


def image(kind, rows, columns):
    return kind, rows * columns + 2, 0, rows, columns


def text(tokens, supervised=0):
    return TEXT, tokens, supervised, 0, 0


EDIT = [image(CLEAN, 4, 6), image(IMAGE, 3, 5), text(20), image(NOISED, 8, 4), image(IMAGE, 2, 2), text(7, 5)]
parts = st.one_of(
    st.builds(text, st.integers(6, 90), st.integers(0, 5)),
    st.builds(image, st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
)
samples = st.lists(st.lists(parts, min_size=1, max_size=7), min_size=1, max_size=4)


def joined(rows, keys=None):
    offsets = np.cumsum([0, *map(len, rows)])
    keys = np.arange(len(rows)) if keys is None else np.array(keys)
    return PartTable(offsets, np.array([part for row in rows for part in row]), keys)


@pytest.fixture(scope="module")
def model():
    return load_cost_model("bagel-7b-mot")


@settings(max_examples=30, deadline=None)
@given(samples, st.randoms(use_true_random=False))
def test_costs_of_what_is_left_are_those_of_its_whole_workload(rows, random):
    model = load_cost_model("bagel-7b-mot")
    all_parts = joined(rows)
    kept = np.array([random.random() < 0.6 for _ in all_parts.values])
    kept[all_parts.offsets[:-1]] = True  # something is left of each
    found = PartCosts.of(model, all_parts.values).of_samples(all_parts, kept)
    tokens, patches = all_parts.sizes(kept)
    for number, row in enumerate(rows):
        left = [p for p, stays in zip(row, kept[slice(*all_parts.offsets[number : number + 2])], strict=True) if stays]
        workload = workload_of(left)
        assert found[number] == model.count(workload).total
        assert (tokens[number], patches[number]) == (workload.tokens, workload.images.prod(axis=1).sum())


def test_conditions_are_what_is_before_the_last_drawn_image_and_not_learnt():
    rows = [EDIT, [image(IMAGE, 3, 3), text(9), text(8, 6)], [text(5, 3), text(4), image(NOISED, 1, 1)]]
    expected = [True, True, True, False, False, False] + [False] * 3 + [False, True, False]
    assert joined(rows).conditions().tolist() == expected


def test_each_kind_is_left_out_as_often_as_is_asked():
    count = 20_000
    dropout = Dropout(text=0.1, image=0.3, clean=0.5, seed=4)
    many = joined([EDIT] * count)
    gone = ~dropout.kept(many, np.zeros(count, dtype=int), "all").reshape(count, -1)
    for place, share in enumerate([0.5, 0.3, 0.1, 0, 0, 0]):
        # five standard deviations of a binomial count
        assert abs(gone[:, place].mean() - share) <= 5 * math.sqrt(share * (1 - share) / count)
    both = gone[:, 0] & gone[:, 1]  # each on its own
    assert abs(both.mean() - 0.15) <= 5 * math.sqrt(0.15 * 0.85 / count)


def test_the_choice_is_the_samples_and_its_epochs_own():
    dropout = Dropout(0.5, 0.5, 0.5, seed=1)
    many = joined([EDIT] * 50)
    chosen = dropout.kept(many, np.zeros(50, dtype=int), "all").reshape(50, -1)
    for number in (0, 17, 49):
        alone = dropout.kept(many.take(np.array([number])), np.array([0]), "all")
        assert alone.tolist() == chosen[number].tolist()
    others = [
        dropout.kept(many, np.ones(50, dtype=int), "all"),
        dropout.kept(many, np.zeros(50, dtype=int), "another"),
        Dropout(0.5, 0.5, 0.5, seed=2).kept(many, np.zeros(50, dtype=int), "all"),
    ]
    for other in others:
        assert 20 < (other.reshape(50, -1) != chosen)[:, :3].sum() < 130  # about half of 150


def test_kinds_are_in_the_order_of_their_numbers(model):
    assert KINDS[NOISED] == "noised"
    drawn, read = (model.count(workload_of([image(kind, 4, 4)])) for kind in (NOISED, IMAGE))
    assert {row.name.split(".")[0] for row in read.rows if row.total} >= {"vision"}
    assert drawn.total != read.total
