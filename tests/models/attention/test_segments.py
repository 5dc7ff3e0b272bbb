"""The per-segment kernels against attention written out with one dense mask over the whole pack."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from headway.models.attention.masks import masked_segments, plain_mask
from headway.models.attention.segments import groups, segment_attention

PACKS = {
    "one": [70],
    "equal": [16, 16, 16],
    "equal_but_apart": [16, 5, 16, 16, 5],
    "long_and_short": [1, 200, 3, 130, 1],
    "with_empty": [4, 0, 9],
}


def dense(q_THD, k_TKD, v_TKD, lengths, causal, window, scale, softcap, sinks_H):
    """Scores of all slots against all slots, in float64; what is in no common segment is masked."""
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    seen = segment[:, None] == segment[None]
    if causal:
        seen &= place[:, None] >= place[None]
    if window is not None:
        seen &= place[:, None] - place[None] < window
    repeats = q_THD.shape[1] // k_TKD.shape[1]
    k, v = k_TKD.repeat_interleave(repeats, 1), v_TKD.repeat_interleave(repeats, 1)
    scores = torch.einsum("thd,shd->hts", q_THD, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks_H is not None:
        total = total + sinks_H.exp()[:, None, None]
    return torch.einsum("hts,shd->thd", weights / total, v)


def tensors(lengths, value_size=8, dtype=torch.float64):
    torch.manual_seed(0)
    total = sum(lengths)
    shapes = [(total, 4, 8), (total, 2, 8), (total, 2, value_size), (4,)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def compare(ours, expected, inputs):
    weight = torch.randn_like(expected)
    assert torch.allclose(ours, expected, rtol=0, atol=1e-10)
    gradients = (torch.autograd.grad((out * weight).sum(), inputs) for out in (ours, expected))
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, None), (True, 1), (True, 7), (True, 64), (True, 100)]
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_values_and_gradients_equal_dense_attention(lengths, causal, window, with_sinks):
    *qkv, sinks = tensors(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    used = sinks if with_sinks else None
    ours = segment_attention(*qkv, cu, causal, window, 0.3, used)
    expected = dense(*qkv, lengths, causal, window, 0.3, None, used)
    compare(ours, expected, [*qkv, sinks] if with_sinks else qkv)


@pytest.mark.parametrize("value_size", [3, 8, 13])
def test_values_may_be_narrower_or_wider_than_keys(value_size):
    *qkv, _ = tensors([5, 12], value_size)
    cu = torch.tensor([0, 5, 17])
    compare(segment_attention(*qkv, cu, True, None, 0.3, None), dense(*qkv, [5, 12], True, None, 0.3, None, None), qkv)


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_soft_capped_scores_equal_dense_attention(lengths, with_sinks):
    *qkv, sinks = tensors(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    used = sinks if with_sinks else None
    ours = masked_segments(*qkv, cu, plain_mask(True, 7), 0.3, 1.5, used, 0.0)
    compare(ours, dense(*qkv, lengths, True, 7, 0.3, 1.5, used), [*qkv, sinks] if with_sinks else qkv)


def test_dropout_drops_weights_and_keeps_their_mean():
    *qkv, _ = tensors([40, 40], dtype=torch.float32)
    cu = torch.tensor([0, 40, 80])
    torch.manual_seed(0)
    mask = plain_mask(causal=True, window=None)
    runs = torch.stack([masked_segments(*qkv, cu, mask, 0.3, None, None, 0.3).detach() for _ in range(400)])
    expected = masked_segments(*qkv, cu, mask, 0.3, None, None, 0.0)
    assert runs.std(0).max() > 0.1
    assert (runs.mean(0) - expected).abs().mean() < 0.05


def test_bfloat16_stays_bfloat16_and_close():
    *qkv, sinks = tensors([33, 100, 33], dtype=torch.float32)
    cu = torch.tensor([0, 33, 133, 166])
    half = [x.bfloat16() for x in qkv]
    out = segment_attention(*half, cu, True, 16, 0.3, sinks.bfloat16())
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), segment_attention(*qkv, cu, True, 16, 0.3, sinks), atol=0.05)


def test_segments_of_one_length_become_one_call():
    plan = groups(torch.tensor([0, 4, 8, 10, 14]))
    assert [(group.length, group.count) for group in plan] == [(2, 1), (4, 3)]
    assert plan[0].start == 8
    assert plan[1].slots.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13]


@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_compiler_is_told_the_truth_about_the_kernels(with_sinks):
    *qkv, sinks = tensors([5, 12, 5])
    inputs = (*qkv, sinks if with_sinks else None, torch.tensor([0, 5, 17, 22]))
    settings = (True, 7, 0.3)
    ops = torch.ops.headway
    parts = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.segment_attention, (*inputs, *settings), test_utils=parts)
    out, log_sums = ops.segment_attention(*inputs, *settings)
    inside = (torch.randn_like(out), *inputs, out, log_sums, *settings)
    torch.library.opcheck(ops.segment_attention_backward, inside, test_utils=parts)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_one_compilation_without_a_graph_break_serves_packs_of_any_lengths(with_sinks):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(segment_attention, backend=counter, fullgraph=True)
    for lengths in PACKS.values():
        *qkv, sinks = tensors(lengths)
        cu = torch.tensor([0, *lengths]).cumsum(0)
        used = sinks if with_sinks else None
        expected = segment_attention(*qkv, cu, True, 64, 0.3, used)
        for x in (*qkv, cu):
            torch._dynamo.maybe_mark_dynamic(x, 0)
        compare(compiled(*qkv, cu, True, 64, 0.3, used), expected, [*qkv, sinks] if with_sinks else qkv)
    assert counter.frame_count == 1
