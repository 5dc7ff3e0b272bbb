"""cuDNN's attention as Headway calls it, on the CPU: its operations and FlashAttention-2's are their contract here.

Contract of `cudnn::sdpa_fwd` and `sdpa_bwd`: what nvidia-cudnn-frontend 1.32 documents (cudnn/sdpa/fwd/torch_op.py) of
packed (T, H, D) tensors with boundaries, a window that counts the query's own key, and log-sum-exps that backward takes
with a row for each segment.
"""

from types import ModuleType

import pytest
import torch

from headway.errors import ConfigError
from headway.models.attention import cuda_kernel, ragged
from headway.models.attention.cuda_kernel import choose_kernel
from headway.models.attention.ragged import cudnn_attention, rounded_length, rounded_segments, suits, varlen_attention
from headway.models.attention.segments import segment_attention
from models.attention.test_varlen import backward as flash_backward
from models.attention.test_varlen import forward as flash_forward

LENGTHS = [1, 20, 7, 7, 2, 3, 1, 2, 1]
CU = torch.tensor([0, *LENGTHS]).cumsum(0).int()
TOTAL = sum(LENGTHS)
calls: list[tuple[str, int, int]] = []  # of cuDNN's operations: name, segments, bound


def scores(q, k, cu, causal, window, scale):
    segment = torch.searchsorted(cu, torch.arange(len(q), dtype=cu.dtype), right=True)
    ahead = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]  # how far the query is past the key
    seen = segment[:, None] == segment[None]
    seen &= (ahead >= 0) if causal else True
    seen &= (ahead < window) if window >= 0 else True
    k = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("thd,shd->hts", q.float(), k) * scale).masked_fill(~seen, -torch.inf)


def sdpa_fwd(
    q, k, v, attn_scale, *, is_causal, window_left, return_lse, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
):
    calls.append(("forward", len(cu_seqlens_q) - 1, max_seqlen_q))
    assert cu_seqlens_q is cu_seqlens_kv
    assert max_seqlen_q == max_seqlen_kv >= int(cu_seqlens_q.diff().max())
    assert return_lse
    all_scores = scores(q, k, cu_seqlens_q, is_causal, window_left, attn_scale)
    v = v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)
    out = torch.einsum("hts,shd->thd", all_scores.softmax(-1), v)
    return out.to(q.dtype), all_scores.logsumexp(-1).T.unsqueeze(-1).contiguous()


def sdpa_bwd(
    grad,
    q,
    k,
    v,
    out,
    lse,
    attn_scale,
    *,
    is_causal,
    window_left,
    cu_seqlens_q,
    cu_seqlens_kv,
    max_seqlen_q,
    max_seqlen_kv,
):
    calls.append(("backward", len(cu_seqlens_q) - 1, max_seqlen_q))
    segments, repeats = len(cu_seqlens_q) - 1, q.shape[1] // k.shape[1]
    assert lse.shape == (segments, q.shape[1], max_seqlen_q, 1)
    assert lse.is_contiguous()
    log_sum_HT = torch.cat([lse[i, :, : int(n), 0] for i, n in enumerate(cu_seqlens_q.diff())], dim=1)
    weights = (scores(q, k, cu_seqlens_q, is_causal, window_left, attn_scale) - log_sum_HT[..., None]).exp()
    wide_k, wide_v = k.float().repeat_interleave(repeats, 1), v.float().repeat_interleave(repeats, 1)
    mean = (grad.float() * out.float()).sum(-1).T
    down = weights * (torch.einsum("thd,shd->hts", grad.float(), wide_v) - mean[..., None]) * attn_scale
    dq = torch.einsum("hts,shd->thd", down, wide_k)
    dk = torch.einsum("hts,thd->shd", down, q.float()).unflatten(1, (-1, repeats)).sum(2)
    dv = torch.einsum("hts,thd->shd", weights, grad.float()).unflatten(1, (-1, repeats)).sum(2)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


@pytest.fixture(autouse=True)
def _operations(monkeypatch):
    from torch.nn.attention import varlen  # which has no kernel of its own for the CPU

    varlen._varlen_attn.register_kernel("cpu")(flash_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(flash_backward)
    monkeypatch.setattr(torch.ops.cudnn, "sdpa_fwd", sdpa_fwd, raising=False)
    monkeypatch.setattr(torch.ops.cudnn, "sdpa_bwd", sdpa_bwd, raising=False)
    monkeypatch.setattr("models.attention.test_varlen.LENGTHS", LENGTHS)
    calls.clear()


@pytest.fixture
def _for_small_packs(monkeypatch):
    monkeypatch.setattr(ragged, "_FEWEST_SLOTS", 1)
    monkeypatch.setattr(ragged, "_SHORTEST_MEAN", 1)


def operands(size=16, value_size=16):
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOTAL, 4, size), (TOTAL, 2, size), (TOTAL, 2, value_size)]
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]


def agree(found, inputs, expected, wide):
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    (found * weight).sum().backward(), (expected * weight).sum().backward()
    assert found.shape == expected.shape
    assert torch.allclose(found.float(), expected, atol=0.03)
    for ours, theirs in zip(inputs, wide, strict=True):
        assert (ours.grad - theirs.grad).norm() < 0.02 * theirs.grad.norm()


@pytest.mark.usefixtures("_for_small_packs")
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 7), (True, 20)])
@pytest.mark.parametrize("sizes", [(16, 16), (12, 9)])
def test_values_and_gradients_equal_the_cpu_kernels(causal, window, sizes):
    inputs = operands(*sizes)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    found = cudnn_attention(*inputs, CU, max(LENGTHS), causal, window, 0.3, None)
    agree(found, inputs, segment_attention(*wide, CU, causal, window, 0.3, None), wide)
    # 9 segments are 10, of which one is empty, and the longest of 20 tokens may have 64: one plan for many packs
    assert calls == [("forward", 10, 64), ("backward", 10, 64)]


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 7)])
def test_a_pack_that_suits_flash_attention_better_takes_it(causal, window):
    inputs = operands()
    wide = [x.detach().float().requires_grad_() for x in inputs]
    found = cudnn_attention(*inputs, CU, max(LENGTHS), causal, window, 0.3, None)
    agree(found, inputs, segment_attention(*wide, CU, causal, window, 0.3, None), wide)
    assert not calls


@pytest.mark.usefixtures("_for_small_packs")
def test_sinks_and_large_heads_go_to_flash_attention():
    inputs, sinks = operands(), torch.randn(4).bfloat16()
    ours = cudnn_attention(*inputs, CU, max(LENGTHS), True, None, 0.3, sinks)
    assert torch.equal(ours, varlen_attention(*inputs, CU, max(LENGTHS), True, None, 0.3, sinks))
    large = operands(136, 136)
    ours = cudnn_attention(*large, CU, max(LENGTHS), True, None, 0.3, None)
    assert torch.equal(ours, varlen_attention(*large, CU, max(LENGTHS), True, None, 0.3, None))
    assert not calls


def test_full_precision_is_refused_with_what_to_do():
    x = torch.randn(TOTAL, 2, 8)
    with pytest.raises(ConfigError, match=r"computes in torch\.float32\. Set the training dtype to bfloat16"):
        cudnn_attention(x, x, x, CU, 20, True, None, 0.3, None)


@pytest.mark.usefixtures("_for_small_packs")
def test_it_compiles_without_a_graph_break_and_packs_of_other_sizes_do_not_compile_again():
    torch._dynamo.reset()
    compiled = torch.compile(cudnn_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    inputs = operands()
    weight = torch.randn(TOTAL, 4, 16).bfloat16()
    results = []
    for attend in (cudnn_attention, compiled):
        out = attend(*inputs, CU, max(LENGTHS), True, None, 0.3, None)
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for plain, found in zip(*results, strict=True):
        assert torch.equal(plain, found)
    with torch._dynamo.config.patch(error_on_recompile=True):
        shorter = [x.detach()[: TOTAL - LENGTHS[-1]].requires_grad_() for x in inputs]
        out = compiled(*shorter, CU[:-1], 20, True, None, 0.3, None)
    assert out.shape == (TOTAL - LENGTHS[-1], 4, 16)


def test_what_suits_follows_the_measured_table():
    assert suits(slots=61_440, segments=43, longest=6_004, heads=32)  # language model on images: 1.55 times as fast
    assert suits(slots=134_064, segments=171, longest=784, heads=16)  # tower on videos: 1.5 times
    assert not suits(slots=134_064, segments=2_736, longest=64, heads=16)  # its windows: 0.8 times
    assert not suits(slots=8_192, segments=14, longest=826, heads=32)  # a small pack: 0.6 times
    # one document of 400,000 tokens beside 200 short ones: backward's sums would take 11 GB
    assert not suits(slots=500_000, segments=201, longest=400_000, heads=28)


def test_few_plans_are_built_for_many_packs():
    bounds = {rounded_length(n) for n in range(1, 131_073)}
    assert len(bounds) < 50
    assert all(n <= rounded_length(n) <= max(64, 1.25 * n + 64) for n in range(1, 131_073, 37))
    assert len({rounded_segments(n) for n in range(1, 1025)}) < 40
    assert all(n <= rounded_segments(n) <= max(4, 1.25 * n) for n in range(1, 1025))


CUDA = torch.device("cuda")


@pytest.fixture
def _hopper(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(cuda_kernel, "find_spec", lambda name: object() if name == "cudnn" else None)
    monkeypatch.setattr(ragged, "import_module", ModuleType)
    monkeypatch.setattr(ragged, "_difference", _on_cpu(ragged._difference))
    monkeypatch.setattr("models.attention.test_varlen.LENGTHS", [200, 1, 77, 300])
    yield
    choose_kernel("auto", torch.device("cpu"))


def _on_cpu(difference):
    return lambda _device, *settings: difference(torch.device("cpu"), *settings)


@pytest.mark.usefixtures("_hopper")
def test_auto_takes_cudnn_where_it_agrees_with_flash_attention_and_says_so():
    for name in ("auto", "cudnn"):
        assert choose_kernel(name, CUDA) == ("Attention on CUDA: cuDNN's ragged attention (cudnn)",)
        assert cuda_kernel.cuda_kernel() is cudnn_attention
    assert [name for name, *_ in calls[:2]] == ["forward", "backward"]
    choose_kernel("torch", CUDA)
    assert cuda_kernel.cuda_kernel() is varlen_attention


@pytest.mark.usefixtures("_hopper")
def test_a_cudnn_that_computes_something_else_is_not_used(monkeypatch):
    monkeypatch.setattr(
        torch.ops.cudnn, "sdpa_fwd", lambda *args, **kwargs: (2 * args[0], sdpa_fwd(*args, **kwargs)[1])
    )
    (line,) = choose_kernel("auto", CUDA)
    assert "FlashAttention-2;" in line
    assert "cuDNN's ragged attention is not used, because its values or gradients differ" in line
    with pytest.raises(
        ConfigError, match=r"'cudnn' \(cuDNN's ragged attention\), but its values.*speed\.attention=auto"
    ):
        choose_kernel("cudnn", CUDA)
    assert cuda_kernel.cuda_kernel() is varlen_attention


@pytest.mark.usefixtures("_hopper")
def test_a_cudnn_that_fails_is_not_used_and_says_why(monkeypatch):
    def fails(*_args, **_kwargs):
        raise RuntimeError("No valid engine configs\nand a page more")

    monkeypatch.setattr(torch.ops.cudnn, "sdpa_bwd", fails)
    (line,) = choose_kernel("auto", CUDA)
    assert line.endswith("because cudnn fails with RuntimeError: No valid engine configs")


@pytest.mark.gpu
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 50)])
@pytest.mark.parametrize("lengths", [(200, 1, 77, 300), (64,) * 33, (700,)])
def test_empty_segments_and_rounded_bounds_change_nothing_on_cuda(causal, window, lengths, monkeypatch):
    pytest.importorskip("cudnn")
    monkeypatch.setattr(ragged, "_FEWEST_SLOTS", 1)
    monkeypatch.setattr(ragged, "_SHORTEST_MEAN", 1)
    assert ragged.make_ready(CUDA) is None
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    shapes = [(sum(lengths), heads, 64) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    wide = [x.detach().cpu().float().requires_grad_() for x in inputs]
    found = cudnn_attention(*inputs, cu, max(lengths), causal, window, 0.125, None)
    expected = segment_attention(*wide, cu.cpu(), causal, window, 0.125, None)
    weight = torch.randn(expected.shape)
    found.backward(weight.cuda().bfloat16()), expected.backward(weight)
    torch.testing.assert_close(found.cpu().float(), expected, rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(inputs, wide, strict=True):
        assert (ours.grad.cpu() - theirs.grad).norm() < 0.02 * theirs.grad.norm()
