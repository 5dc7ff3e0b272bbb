"""Workloads from everything a batch may carry."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.count import Workload
from headway.errors import WorkloadError

segments = st.lists(st.integers(1, 50), max_size=8)
grids = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), max_size=4)


@given(segments)
def test_every_way_of_saying_the_same_pack_gives_the_same_workload(lengths):
    plain = Workload(lengths)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    positions = np.concatenate([np.arange(n) for n in lengths] or [np.zeros(0, dtype=np.int64)])
    numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    assert Workload.from_cu_seqlens(cu_seqlens) == plain
    assert Workload.from_cu_seqlens(torch.tensor(cu_seqlens, dtype=torch.int32)[None]) == plain
    assert Workload.from_position_ids(positions) == plain
    assert Workload.from_position_ids(np.stack([positions] * 3)[:, None]) == plain
    assert Workload.from_attention_mask(numbers[None]) == plain


@given(segments, st.integers(0, 5))
def test_unused_tails_of_boundaries_are_cut(lengths, unused):
    bounds = [0, *np.cumsum(lengths).tolist()]
    plain = Workload(lengths)
    assert Workload.from_cu_seqlens(bounds + [-1] * unused) == plain
    assert Workload.from_cu_seqlens(bounds + [bounds[-1]] * unused) == plain
    assert Workload.from_cu_seqlens([*bounds, *[7] * unused], argmin=len(bounds)) == plain


def test_an_argmin_of_zero_cuts_nothing():
    assert Workload.from_cu_seqlens([0, 4, 9], argmin=0).segments.tolist() == [4, 5]


def test_unpadded_boundaries_give_lengths_and_padded_ones_slots():
    step = Workload.from_cu_seqlens([0, 8, 16, -1], unpadded=[0, 5, 12, -1])
    assert (step.segments.tolist(), step.tokens, step.slots) == ([5, 7], 12, 16)


def test_a_padding_mask_counts_tokens_by_row_and_slots_in_all():
    step = Workload.from_attention_mask(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    assert (step.segments.tolist(), step.slots) == ([2, 4], 8)
    assert Workload.from_attention_mask([[True, True, False]]).segments.tolist() == [2]


def test_a_mask_over_positions_leaves_padding_out():
    step = Workload.from_position_ids([[0, 1, 0, 1, 2, 0]], attention_mask=[[1, 1, 1, 1, 1, 0]])
    assert (step.segments.tolist(), step.slots) == ([2, 3], 6)


def test_multimodal_positions_restart_at_the_origin_only():
    # text, text, a 1 x 2 x 2 image whose time does not advance, text; then the same again
    one = [[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]]
    assert Workload.from_position_ids(np.array([r + r for r in one])[:, None]).segments.tolist() == [7, 7]
    image_first = [[0, 0, 0, 0, 2], [0, 0, 1, 1, 2], [0, 1, 0, 1, 2]]
    assert Workload.from_position_ids(np.array([r + r for r in image_first])[:, None]).segments.tolist() == [5, 5]


def test_four_planes_carry_the_text_positions_first():
    text = np.array([0, 1, 2, 0, 1])
    planes = np.stack([text, text * 0, text * 0, text * 0])[:, None]
    assert Workload.from_position_ids(planes).segments.tolist() == [3, 2]


@given(segments, segments, grids, grids)
def test_workloads_add(a, b, images, videos):
    left, right = Workload(a, images=images, slots=sum(a) + 3), Workload(b, videos=videos)
    both = left + right
    assert both.segments.tolist() == a + b
    assert (both.tokens, both.slots) == (sum(a + b), sum(a + b) + 3)
    assert both.patches == left.patches + right.patches
    assert both == sum([left, right]) == left + right + Workload()


def test_a_workload_cannot_be_changed():
    lengths = np.array([4, 5])
    step = Workload(lengths)
    lengths[0] = 9
    assert step.segments.tolist() == [4, 5]
    with pytest.raises(ValueError, match="read-only"):
        step.segments[0] = 9
    with pytest.raises(AttributeError, match="immutable"):
        step.slots = 9


def test_a_workload_travels_between_processes_and_into_sets():
    step = Workload([4, 5], images=[(1, 2, 2)], slots=12)
    assert pickle.loads(pickle.dumps(step)) == step
    assert len({step, Workload([4, 5], images=[(1, 2, 2)], slots=12), Workload([4, 5])}) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Workload([3, 0]), r"segments\[1\] is 0"),
        (lambda: Workload([1.5]), "whole numbers, got float64"),
        (lambda: Workload([4], slots=3), "3 slots cannot hold 4 tokens"),
        (lambda: Workload([4], packs=0), "0 packs cannot hold 4 tokens"),
        (lambda: Workload([4], images=[(1, 0, 2)]), r"images\[0\] is \(1, 0, 2\)"),
        (lambda: Workload([4], videos=[(4, 2)]), r"videos must be a list of grids"),
        (lambda: Workload.from_cu_seqlens([1, 4]), "must start at 0, got 1"),
        (lambda: Workload.from_cu_seqlens([0, 5, 3]), "got 5 followed by 3 at index 2"),
        (lambda: Workload.from_attention_mask([1, 1]), r"must be \(batch, slots\)"),
        (lambda: Workload.from_attention_mask([[1, -1]]), "got -1"),
        (lambda: Workload.from_position_ids(np.zeros((2, 2, 2), dtype=int)), r"got shape \(2, 2, 2\)"),
        (lambda: Workload.from_position_ids([0, 1], attention_mask=[[1]]), "must agree"),
        (lambda: Workload(torch.empty(3, dtype=torch.int64, device="meta")), "stall the training loop"),
    ],
)
def test_impossible_workloads_are_refused(call, message):
    with pytest.raises(WorkloadError, match=message):
        call()


def test_packs_are_forward_passes():
    assert (Workload().num_packs, Workload([3, 2]).num_packs, Workload([3, 2], packs=2).num_packs) == (0, 1, 2)
    assert sum([Workload([3]), Workload([2]), Workload()]) == Workload([3, 2], packs=2) != Workload([3, 2])
    assert pickle.loads(pickle.dumps(Workload())) == Workload()


def test_sources_follow_their_segments_through_sums():
    with_sources = Workload([3, 2], sources=[7, 0])
    assert (with_sources + Workload([5])).sources.tolist() == [7, 0, 0]
    assert (Workload([5]) + with_sources).sources.tolist() == [0, 7, 0]
    assert Workload([5], sources=[0]) == Workload([5])
    assert pickle.loads(pickle.dumps(with_sources)) == with_sources
    assert "7 source tokens" in repr(with_sources)
    assert "2 audio clips of 9 frames" in repr(Workload([9], audio=[4, 5]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"segments": [4], "sources": [1, 2]}, "one length per segment: got 2 for 1 segments"),
        ({"segments": [4], "sources": [-1]}, r"sources\[0\] is -1"),
        ({"audio": [0]}, r"audio\[0\] is 0: a length is at least 1 \[frames\]"),
    ],
)
def test_wrong_sources_and_clips_are_refused(arguments, message):
    with pytest.raises(WorkloadError, match=message):
        Workload(**arguments)
