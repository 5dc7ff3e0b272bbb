"""Attention under splits: equal to the mask drawn cell by cell, forward and backward, and no leak."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from headway.count import Workload, splits
from headway.count.splits import branched
from headway.errors import WorkloadError
from headway.models.attention import attend
from headway.models.attention.splits import SplitMask, _flex, split_attention

RUN = st.tuples(st.sampled_from(splits.MODES), st.integers(1, 9))
SEGMENTS = st.lists(st.lists(RUN, min_size=1, max_size=4), min_size=1, max_size=4)
MIXED = Workload(splits=[[("causal", 5), ("noise", 7)], [("full", 6), ("causal", 4), ("noise", 3), ("causal", 2)]] * 2)
ANSWERED = Workload(splits=[branched(300, [140, 20]), branched(9, [1, 70, 2])], slots=600)


def drawn(workload):
    """The mask of a pack cell by cell, from the drawing that counting is held against."""
    runs = workload.splits if len(workload.splits) else splits.all_causal(workload.segments)
    ends, masks, first, start = runs[:, 1].cumsum(), [], 0, 0
    for length in workload.segments.tolist():
        last = int((ends < start + length).sum()) + 1
        masks.append(torch.from_numpy(splits.mask_of_runs(runs[first:last])))
        first, start = last, start + length
    padding = workload.slots - workload.tokens
    return torch.block_diag(*masks, torch.ones(padding, padding).tril()).bool()


def heads(slots, dtype=torch.float64, queries=4, keys=2, size=8, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    shapes = [(slots, queries, size), (slots, keys, size), (slots, keys, size)]
    return [torch.randn(*shape, generator=drawn, dtype=dtype).requires_grad_() for shape in shapes]


def by_dense(q, k, v, seen):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True)[0].transpose(0, 1)


def test_rows_may_lie_in_another_order_than_the_slots():
    slots_T = torch.randperm(MIXED.slots, generator=torch.Generator().manual_seed(0))
    tensors = heads(MIXED.slots)
    found = split_attention(*(x[slots_T] for x in tensors), SplitMask.of(MIXED).of_rows(slots_T), 0.3)
    torch.testing.assert_close(found, by_dense(*tensors, drawn(MIXED))[slots_T], atol=1e-10, rtol=1e-10)


@settings(max_examples=60, deadline=None)
@given(SEGMENTS, st.integers(0, 5))
def test_outputs_and_gradients_are_those_of_the_drawn_mask(segments, padding):
    lengths = [sum(tokens for _, tokens in runs) for runs in segments]
    workload = Workload(splits=segments, slots=sum(lengths) + padding)
    mask, tensors = SplitMask.of(workload), heads(workload.slots)
    assert torch.equal(mask.dense()[0, 0], drawn(workload))
    assert mask.dense()[0, 0, : sum(lengths)].sum() == int(
        splits.split_pairs(workload.segments, workload.splits)
        if len(workload.splits)
        else sum(n * (n + 1) // 2 for n in lengths)
    )
    ours, theirs = split_attention(*tensors, mask, 0.3), by_dense(*tensors, drawn(workload))
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    slope = torch.randn_like(ours)
    for one, other in zip(
        torch.autograd.grad(ours, tensors, slope), torch.autograd.grad(theirs, tensors, slope), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def test_single_precision_agrees_to_1e_5_and_long_prefixes_are_walked_in_blocks():
    workload = Workload(splits=[[("full", 50), ("causal", 700), ("noise", 90), ("causal", 300)], [("causal", 100)]])
    tensors = heads(workload.slots, torch.float32)
    ours, theirs = split_attention(*tensors, SplitMask.of(workload), 0.3), by_dense(*tensors, drawn(workload))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_an_answer_behind_a_shared_prompt_gets_what_it_gets_alone():
    prompt, answers = 11, [5, 8, 1]
    shared = Workload(splits=[branched(prompt, answers)])
    tensors, start = heads(shared.slots), prompt
    found = split_attention(*tensors, SplitMask.of(shared), 0.3)
    for length in answers:
        place = torch.cat([torch.arange(prompt), torch.arange(start, start + length)])
        alone = split_attention(*(x[place] for x in tensors), SplitMask.of(Workload([len(place)])), 0.3)
        torch.testing.assert_close(found[place], alone)
        start += length


def test_packed_segments_give_what_each_gives_alone():
    parts = [[("full", 6), ("causal", 4)], [("causal", 5), ("noise", 7)], [("full", 6), ("causal", 4)], [("causal", 9)]]
    workload = Workload(splits=parts, slots=50)
    tensors, start = heads(50), 0
    packed = split_attention(*tensors, SplitMask.of(workload), 0.3)
    for runs in parts:
        alone = Workload(splits=[runs])
        own = [x[start : start + alone.tokens] for x in tensors]
        torch.testing.assert_close(
            packed[start : start + alone.tokens], split_attention(*own, SplitMask.of(alone), 0.3)
        )
        start += alone.tokens


def reads(mask, slots):
    """Which slots' keys and values each slot's output depends on, by gradients."""
    q, k, v = heads(slots)
    out = split_attention(q, k, v, mask, 0.3)
    rows = []
    for row in range(slots):
        grads = torch.autograd.grad(out[row].sum(), [k, v], retain_graph=True)
        rows.append(sum(g.abs().sum((1, 2)) for g in grads) > 0)
    return torch.stack(rows)


def test_no_gradient_crosses_segments_or_leaves_noise():
    workload = Workload(splits=[[("causal", 3), ("noise", 4), ("causal", 3)], [("full", 4), ("noise", 3)]], slots=19)
    found = reads(SplitMask.of(workload), 19)
    assert torch.equal(found, drawn(workload))
    assert not found[7:10, 3:7].any()  # behind the noise
    assert not found[10:17, :10].any()  # of the other segment
    assert not found[:17, 17:].any()  # padding


def test_a_leak_would_be_seen():
    workload = Workload(splits=[[("causal", 3), ("noise", 4), ("causal", 3)]])
    leaking = Workload(splits=[[("causal", 3), ("full", 4), ("causal", 3)]])
    assert not torch.equal(reads(SplitMask.of(leaking), 10), drawn(workload))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(
    "workload",
    [
        MIXED,
        ANSWERED,
        Workload(splits=[[("causal", 300), ("noise", 500)], [("full", 129), ("causal", 130)]], slots=1100),
        Workload(splits=[[("noise", 128)], [("full", 256)], [("causal", 128)]]),
        Workload([700, 40]),
    ],
)
def test_flex_attention_sees_the_same_blocks_and_cells(workload):
    mask = SplitMask.of(workload)
    made = mask.block_mask()
    padded = made.seq_lengths[0]
    assert padded >= workload.slots
    asked = create_block_mask(made.mask_mod, None, None, padded, padded, "cpu")
    assert torch.equal(made.to_dense(), asked.to_dense())
    assert torch.equal(made.full_kv_num_blocks, asked.full_kv_num_blocks)
    assert made.sparsity() == asked.sparsity()
    tensors = [x.detach().float() for x in heads(workload.slots)]
    with patch.multiple("headway.models.attention.splits", _runs_flex=lambda _: True, _flex=lambda: flex_attention):
        out = split_attention(*tensors, mask, 0.3)
    torch.testing.assert_close(out, by_dense(*tensors, drawn(workload)), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_flex_attention_is_compiled_once_for_all_packs_of_a_length():
    packs = [
        Workload(splits=[[("causal", 30), ("noise", 100)], [("full", 80), ("causal", 20)]], slots=256),
        Workload(splits=[[("full", 140), ("causal", 20), ("noise", 60)]], slots=256),
        Workload([100, 120], slots=256),
    ]
    torch._dynamo.reset()
    compiled = _flex()
    q, k, v = (x.detach().float().transpose(0, 1)[None] for x in heads(256))
    for number, workload in enumerate(packs):
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=number > 0):
            out = compiled(q, k, v, block_mask=SplitMask.of(workload).block_mask(), scale=0.3, enable_gqa=True)
        expected = by_dense(*(x[0].transpose(0, 1) for x in (q, k, v)), drawn(workload))
        torch.testing.assert_close(out[0].transpose(0, 1), expected, atol=1e-5, rtol=1e-5)


def test_a_compiled_block_takes_packs_of_any_length_and_answers():
    """As on CUDA, where a compiled block holds FlexAttention; inductor has none on a CPU for such strides."""
    torch._dynamo.reset()
    block = torch.compile(lambda q, k, v, mask: split_attention(q * 1.5, k, v, mask, 0.3) + 1, backend="aot_eager")
    packs = [[branched(200, [50, 70])], [branched(150, [20, 30, 9]), branched(60, [100, 40])], [branched(37, [8, 90])]]
    with patch("headway.models.attention.splits._runs_flex", lambda _: True):
        for number, runs in enumerate([*packs, *packs]):
            workload = Workload(splits=runs)
            tensors = [x.detach().float() for x in heads(workload.slots, seed=number)]
            with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=number > 2):
                out = block(*tensors, SplitMask.of(workload))
            q, k, v = tensors
            torch.testing.assert_close(out, by_dense(q * 1.5, k, v, drawn(workload)) + 1, atol=1e-5, rtol=1e-5)


def test_the_backend_takes_it_as_the_mask():
    workload = Workload(splits=[[("causal", 5), ("noise", 7)], [("full", 6), ("causal", 4)]])
    tensors = heads(workload.slots, torch.float32)
    q, k, v = (x.transpose(0, 1)[None] for x in tensors)
    out, _ = attend(SimpleNamespace(is_causal=False), q, k, v, SplitMask.of(workload), scaling=0.3, is_causal=False)
    torch.testing.assert_close(out[0], by_dense(*tensors, drawn(workload)), atol=1e-5, rtol=1e-5)


def test_half_precision_and_moving_run():
    mask = SplitMask.of(MIXED).map_tensors(lambda tensor: tensor.clone())
    out = split_attention(*heads(MIXED.slots, torch.bfloat16), mask, 0.3)
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


def test_wrong_masks_are_refused():
    mask = SplitMask.of(MIXED)
    with pytest.raises(WorkloadError, match=f"has {MIXED.slots} slots, but attention has 3"):
        split_attention(*heads(3), mask, 0.3)
    with pytest.raises(WorkloadError, match="workload has 2"):
        SplitMask.of(Workload([3, 4], packs=2))
    with pytest.raises(WorkloadError, match="mask would be empty"):
        SplitMask.of(Workload())
