"""Pair counts against masks drawn out cell by cell."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.count import masks
from headway.errors import WorkloadError

lengths = st.lists(st.integers(1, 40), max_size=6)
spans = st.integers(1, 50)


def drawn(lengths, allowed):
    """Count cells (query, key) of each segment where `allowed(query, key)`; positions start at 0."""
    return sum(allowed(q, k) for s in lengths for q in range(s) for k in range(s))


@given(lengths)
def test_full_attention_is_every_cell(lengths):
    assert masks.full_pairs(lengths) == drawn(lengths, lambda _q, _k: True)


@given(lengths)
def test_causal_attention_is_the_lower_triangle_with_its_diagonal(lengths):
    assert masks.causal_pairs(lengths) == drawn(lengths, lambda q, k: k <= q)


@given(lengths, spans)
def test_a_window_holds_the_query_itself_and_the_keys_just_before(lengths, window):
    assert masks.sliding_pairs(lengths, window) == drawn(lengths, lambda q, k: q - window < k <= q)


@given(lengths, spans)
def test_chunks_restart_in_every_segment(lengths, chunk):
    assert masks.chunked_pairs(lengths, chunk) == drawn(lengths, lambda q, k: k <= q and k // chunk == q // chunk)


@given(lengths, st.integers(1, 9), st.integers(1, 4))
def test_a_query_sees_its_own_block_and_whole_blocks_before(lengths, size, most):
    expected = drawn(lengths, lambda q, k: k <= q and q // size - k // size < most)  # the last blocks, as any others
    assert masks.block_pairs(lengths, size, most) == expected


@given(lengths, st.integers(1, 9), st.integers(1, 4))
def test_a_query_sees_whole_pools_and_the_tokens_that_fill_none_yet(lengths, size, most):
    expected = drawn(lengths, lambda q, k: k <= q and k // size >= (q + 1) // size - most)  # the last pools, as any
    assert masks.pool_pairs(lengths, size, most) == expected


@given(lengths, st.integers(1, 9), st.integers(1, 9))
def test_a_compressed_key_is_seen_once_all_its_tokens_are(lengths, rate, most):
    ready = [(q + 1) // rate for s in lengths for q in range(s)]
    assert masks.compressed_pairs(lengths, rate) == sum(ready)
    assert masks.compressed_pairs(lengths, rate, most) == sum(min(n, most) for n in ready)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=4),
    st.none() | st.integers(0, 25),
    st.none() | st.integers(0, 25),
    st.booleans(),
)
def test_a_band_follows_the_diagonal_from_either_corner(sizes, left, right, bottom_right):
    expected = 0
    for queries, keys in sizes:
        for q in range(queries):
            diagonal = q + (keys - queries if bottom_right else 0)
            first = 0 if left is None else diagonal - left
            last = keys if right is None else diagonal + right
            expected += sum(first <= k <= last for k in range(keys))
    queries, keys = [q for q, _ in sizes], [k for _, k in sizes]
    assert masks.banded_pairs(queries, keys, left=left, right=right, bottom_right=bottom_right) == expected


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=6))
def test_a_prefix_sees_itself_in_full(pairs):
    pairs = [(s, min(p, s)) for s, p in pairs]
    expected = sum(k <= q or (q < p and k < p) for s, p in pairs for q in range(s) for k in range(s))
    assert masks.prefix_pairs([s for s, _ in pairs], [p for _, p in pairs]) == expected


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=6))
def test_cross_attention_is_queries_times_keys(pairs):
    expected = sum(1 for q, k in pairs for _ in range(q) for _ in range(k))
    assert masks.cross_pairs([q for q, _ in pairs], [k for _, k in pairs]) == expected


@given(lengths, spans)
def test_masks_are_ordered_by_what_they_allow(lengths, span):
    chunked, sliding = masks.chunked_pairs(lengths, span), masks.sliding_pairs(lengths, span)
    assert chunked <= sliding <= masks.causal_pairs(lengths) <= masks.full_pairs(lengths)


@given(st.lists(st.integers(1, 40), min_size=1))
def test_a_window_as_long_as_the_segment_is_causal(lengths):
    assert masks.sliding_pairs(lengths, max(lengths)) == masks.causal_pairs(lengths)


def test_lengths_beyond_64_bits_of_pairs_stay_exact():
    length = 2**32 + 1
    assert masks.causal_pairs([length]) == length * (length + 1) // 2
    assert masks.full_pairs(np.array([length, length])) == 2 * length**2
    assert masks.sliding_pairs([length], 2**31) == 2**31 * (2**31 + 1) // 2 + (length - 2**31) * 2**31


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masks.causal_pairs([3, 0]), "at least 1, got 0"),
        (lambda: masks.sliding_pairs([3], 0), "window must be at least 1"),
        (lambda: masks.chunked_pairs([3], -1), "chunk must be at least 1"),
        (lambda: masks.compressed_pairs([3], 0), "rate must be at least 1"),
        (lambda: masks.prefix_pairs([3], [4]), "prefix 4 is longer than its segment of 3"),
        (lambda: masks.cross_pairs([3, 4], [4]), "got 2 and 1"),
        (lambda: masks.banded_pairs([3, 4], [4], left=None, right=0), "got 2 and 1"),
    ],
)
def test_impossible_lengths_are_refused(call, message):
    with pytest.raises(WorkloadError, match=message):
        call()
