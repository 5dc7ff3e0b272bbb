"""The CUDA path's plumbing, on the CPU: torch's variable-length operators are replaced by their contract, written out.

The operators' documentation and the FlashAttention-2 paper (Dao 2023, algorithms 1 and 2) say what they return: values,
log-sum-exp of the scores, and a backward that rebuilds the weights from that log-sum-exp and the output.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from headway.errors import ConfigError
from headway.models.attention.ragged import varlen_attention
from headway.models.attention.segments import segment_attention, with_equal_heads

LENGTHS = [1, 20, 7, 7]
CU = torch.tensor([0, *LENGTHS]).cumsum(0).int()


def scores(q, k, cu, longest, causal, scale, window):
    assert longest == max(LENGTHS)
    assert q.dtype == torch.bfloat16
    assert q.shape[-1] % 8 == 0
    segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), cu.diff())
    ahead = torch.arange(q.shape[0])[:, None] - torch.arange(q.shape[0])[None]  # how far the query is past the key
    seen = segment[:, None] == segment[None]
    left, right = window
    seen &= (ahead <= left) if left >= 0 else True
    seen &= (-ahead <= right) if right >= 0 else True
    assert causal == (window == [-1, 0])
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("thd,shd->hts", q.float(), k.float()) * scale).masked_fill(~seen, -torch.inf)


def forward(q, k, v, cu, cu_k, longest, longest_k, causal, scale, window, grouped=None, *rest):
    assert grouped in (None, q.shape[1] != k.shape[1])  # torch 2.11 does not ask
    all_scores = scores(q, k, cu, longest, causal, scale, window)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    out = torch.einsum("hts,shd->thd", all_scores.softmax(-1), v.float())
    return out.to(q.dtype), all_scores.logsumexp(-1), torch.zeros(2, dtype=torch.uint64)


def backward(grad, q, k, v, out, log_sum, cu, cu_k, longest, longest_k, causal, state, scale, window):
    repeats = q.shape[1] // k.shape[1]
    weights = (scores(q, k, cu, longest, causal, scale, window) - log_sum[..., None]).exp()
    wide_k, wide_v = k.float().repeat_interleave(repeats, 1), v.float().repeat_interleave(repeats, 1)
    mean = (grad.float() * out.float()).sum(-1).T
    down = weights * (torch.einsum("thd,shd->hts", grad.float(), wide_v) - mean[..., None]) * scale
    dq = torch.einsum("hts,shd->thd", down, wide_k)
    dk = torch.einsum("hts,thd->shd", down, q.float()).unflatten(1, (-1, repeats)).sum(2)
    dv = torch.einsum("hts,thd->shd", weights, grad.float()).unflatten(1, (-1, repeats)).sum(2)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


@pytest.fixture(scope="module")
def _operators():
    from torch.nn.attention import varlen  # which has no kernel of its own for the CPU

    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)


@pytest.mark.usefixtures("_operators")
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 7), (True, 20)])
def test_values_and_gradients_equal_the_cpu_kernels(causal, window, with_sinks):
    shapes = [
        (35, 4, 12),
        (35, 2, 12),
        (35, 2, 9),
        (4,),
    ]  # heads of 12 and 9 channels must be padded to a multiple of 8
    inputs = [torch.randn(shape).bfloat16().float().requires_grad_() for shape in shapes]
    halves = [x.detach().bfloat16().requires_grad_() for x in inputs]
    expected = segment_attention(*inputs[:3], CU, causal, window, 0.3, inputs[3] if with_sinks else None)
    ours = varlen_attention(*halves[:3], CU, 20, causal, window, 0.3, halves[3] if with_sinks else None)
    weight = torch.randn(expected.shape).bfloat16()
    (expected * weight).sum().backward()
    (ours * weight).sum().backward()
    assert ours.shape == expected.shape == (35, 4, 9)
    assert torch.allclose(ours.float(), expected, atol=0.03)
    for mine, theirs in list(zip(halves, inputs, strict=True))[: 4 if with_sinks else 3]:
        assert (mine.grad - theirs.grad).norm() < 0.02 * theirs.grad.norm()


@pytest.mark.usefixtures("_operators")
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 7, 20])
def test_it_compiles_without_a_graph_break_and_stays_the_same(with_sinks, window):
    torch._dynamo.reset()
    inputs = [torch.randn(shape).bfloat16().requires_grad_() for shape in [(35, 4, 12), (35, 2, 12), (35, 2, 9), (4,)]]
    weight = torch.randn(35, 4, 9).bfloat16()
    used = inputs if with_sinks else inputs[:3]
    results = []
    for attend in (varlen_attention, torch.compile(varlen_attention, backend="aot_eager", fullgraph=True)):
        out = attend(*inputs[:3], CU, 20, True, window, 0.3, inputs[3] if with_sinks else None)
        results.append([out, *torch.autograd.grad((out * weight).sum(), used)])
    for plain, compiled in zip(*results, strict=True):
        assert torch.allclose(plain, compiled, atol=0.02, rtol=0.02)


def test_full_precision_is_refused_with_what_to_do():
    x = torch.randn(35, 2, 8)
    with pytest.raises(ConfigError, match=r"computes in torch\.float32\. Set the training dtype to bfloat16"):
        varlen_attention(x, x, x, CU, 20, True, None, 0.3, None)


def test_heads_larger_than_the_kernel_takes_are_refused():
    x = torch.randn(35, 2, 320).bfloat16()
    with pytest.raises(ConfigError, match="heads have 320 channels, but the flash kernel on CUDA takes at most 256"):
        varlen_attention(x, x, x, CU, 20, True, None, 0.3, None)


@pytest.mark.parametrize(("device", "learns"), [("cuda", False), ("meta", True)])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(8, 8), (12, 9)])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 7)])
def test_the_installed_torch_takes_every_call(device, learns, with_sinks, num_groups, sizes, causal, window):
    """Its real operators, asked for shapes only: a keyword or a number of arguments that it does not know fails here.

    Gradients are asked for on the meta device: autograd wants a driver for a tensor that says it is on CUDA.
    """
    with FakeTensorMode():
        shapes = [(35, 4, sizes[0]), (35, num_groups, sizes[0]), (35, num_groups, sizes[1]), (4,)]
        inputs = [torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=learns) for shape in shapes]
        cu = torch.zeros(5, dtype=torch.int64, device=device)
        used = inputs if with_sinks else inputs[:3]
        out = varlen_attention(*inputs[:3], cu, 20, causal, window, 0.3, inputs[3] if with_sinks else None)
        assert (out.shape, out.dtype, out.device.type) == ((35, 4, sizes[1]), torch.bfloat16, device)
        if learns:
            grads = torch.autograd.grad(out.sum(), used)
            assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in used]


def test_what_needs_no_padding_is_not_copied():
    x, y = torch.randn(3, 2, 16), torch.randn(3, 2, 12)
    assert with_equal_heads(x, x, x, multiple=8)[0] is x
    kept, grown = with_equal_heads(x, y)
    assert kept is x
    assert torch.equal(grown, torch.cat([y, torch.zeros(3, 2, 4)], dim=-1))
