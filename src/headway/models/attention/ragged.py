"""Attention within segments on CUDA: PyTorch's variable-length flash kernel, and cuDNN's where that is faster.

Tensor letters as in `attention`: H query heads, K key/value heads, T slots, N segments, D head size.

Sinks are added to the flash kernel exactly. cuDNN, through the package nvidia-cudnn-frontend, builds a plan for each
number of segments and bound of their length, which takes a tenth of a second. Both are therefore rounded up, to a few
values in all: segments that a pack does not have are empty ones at its end. Backward's plan also holds the number of
slots, in steps of 64: packs that are filled evenly differ little in it.

Source: measured on an H200 (benchmarks/results/attention_gpu_nvidia-h200_202611.md): with packs of long segments cuDNN
9.19 is 1.5 to 1.8 times as fast as PyTorch's FlashAttention-2 forward and 1.35 to 1.6 times with backward; with windows
of 64 patches, and in a pack of 8,192 tokens, it is slower. Empty segments behind the last: as NVIDIA's Transformer
Engine pads batches of ragged sequences (fused_attn/utils.cu, cuDNN 9.6 and newer).
"""

import inspect
from importlib import import_module
from typing import Any, Protocol

import torch
from torch.nn.attention import varlen

from headway.errors import ConfigError
from headway.models.attention.segments import sink_gradient, with_equal_heads, with_sinks

_LARGEST_HEAD = 256  # head size that the flash kernel takes
_HEAD_MULTIPLE = 8
# torch 2.11's kernel takes fewer key/value heads than query heads by itself; later ones want to be told.
_IS_TOLD_OF_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters

PACKAGE = "cudnn"
_LARGEST_OF_CUDNN = 128  # head size that was measured
_FEWEST_SLOTS, _SHORTEST_MEAN = 16_384, 512  # slots of a pack, and of a segment on average, from which it is faster
_LARGEST_SUMS = 1 << 30  # bytes of backward's log-sum-exp, which has a row of the longest segment for each of them
_CAUSAL = (-1, 0)  # FlashAttention's reach of a query without a window
_LARGEST_DIFFERENCE = 0.02  # between two kernels in bfloat16, of which each is 0.003 from float32


class CudaKernel(Protocol):
    """Attention within segments on CUDA; arguments as in `segments.segment_attention`, and the longest segment."""

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cu_seqlens_N: torch.Tensor,
        max_seqlen: int,
        causal: bool,
        window: int | None,
        scale: float,
        sinks_H: torch.Tensor | None,
        /,
    ) -> torch.Tensor:
        """Attended values, shape (T, H, Dv)."""
        ...


def varlen_attention(*call: Any) -> torch.Tensor:
    """Attend within segments; a `CudaKernel`.

    Raises:
        ConfigError: the tensors are neither bfloat16 nor float16, or the heads are larger than the kernel takes.
    """
    *qkv_THD, cu_seqlens_N, max_seqlen, causal, window, scale, sinks_H = call
    q, k, v = flash_operands(*qkv_THD)
    cu = cu_seqlens_N.to(torch.int32)
    # The kernel itself cuts windows wider than every segment; a comparison here would be compiled as two cases.
    left = window - 1 if window is not None else -1
    reach = (left, 0) if causal else (-1, -1)
    if sinks_H is None:
        out = varlen.varlen_attn(
            q, k, v, cu, cu, max_seqlen, max_seqlen, scale=scale, window_size=reach, **grouped(q, k)
        )  # fmt: skip
    else:
        attend: Any = _VarlenWithSinks.apply  # torch leaves it untyped
        out = attend(q, k, v, sinks_H, cu, max_seqlen, reach, scale)
    assert isinstance(out, torch.Tensor)
    return out.narrow(-1, 0, qkv_THD[-1].shape[-1])


def flash_operands(*qkv_THD: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values as the kernels on CUDA take them: in two bytes, with heads of one size.

    Raises:
        ConfigError: the tensors are neither bfloat16 nor float16, or the heads are larger than the kernels take.
    """
    dtype, largest = qkv_THD[0].dtype, max(x.shape[-1] for x in qkv_THD)
    if dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"Attention over packs on CUDA runs in bfloat16 or float16, but this model computes in {dtype}. Set "
            "the training dtype to bfloat16, or run inside torch.autocast."
        )
    if largest > _LARGEST_HEAD:
        raise ConfigError(
            f"This model's attention heads have {largest} channels, but the flash kernel on CUDA takes at most "
            f'{_LARGEST_HEAD}. Load the model with the attention backend "sdpa" and one sample per row.'
        )
    return tuple(x.contiguous() for x in with_equal_heads(*qkv_THD, multiple=_HEAD_MULTIPLE))


def grouped(q_THD: torch.Tensor, k_TKD: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments that tell the installed torch of grouped heads."""
    return {"enable_gqa": q_THD.shape[1] != k_TKD.shape[1]} if _IS_TOLD_OF_GROUPS else {}


class _VarlenWithSinks(torch.autograd.Function):
    """The flash kernel with a learnt score in each softmax.

    `varlen_attn` gives its log-sum-exp but no gradient through it. The kernel's backward, however, only ever uses the
    log-sum-exp and the output to rebuild the weights and their mean: given those of the joined softmax, it returns the
    joined softmax's gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        sinks_H: torch.Tensor,
        cu_N: torch.Tensor,
        longest: int,
        reach: tuple[int, int],
        scale: float,
    ) -> torch.Tensor:
        settings = cu_N, longest, reach, scale
        out_THD, log_sum_HT, state = _flash(q_THD, k_TKD, v_TKD, *settings)
        # Turned about here rather than the values: a compiled function of torch 2.11 gives no gradient to a view.
        out_THD, log_sum_TH = with_sinks(out_THD, log_sum_HT.T, sinks_H)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, sinks_H, cu_N, out_THD, log_sum_TH.T.contiguous(), state)
        ctx.settings = longest, reach, scale
        return out_THD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks_H, cu_N, out_THD, log_sum_HT, state = ctx.saved_tensors
        grad_THD = grad_THD.contiguous()
        dq, dk, dv = _flash_backward(grad_THD, q, k, v, out_THD, log_sum_HT, cu_N, *ctx.settings, state)
        sinks = sink_gradient(grad_THD.transpose(0, 1), out_THD.transpose(0, 1), log_sum_HT, sinks_H.unsqueeze(1))
        return dq, dk, dv, sinks.sum(1).to(sinks_H.dtype), None, None, None, None


def make_ready(device: torch.device) -> str | None:
    """Make cuDNN's operations known to PyTorch, and hold them against FlashAttention-2 on this device.

    Returns:
        Why they cannot be used, as a part of a sentence; None where they can.
    """
    try:
        import_module("cudnn.sdpa.fwd.torch_op")
        masks = ((False, -1), (True, -1), (True, 50))
        difference = max(_difference(device, causal, window) for causal, window in masks)
    except Exception as error:  # noqa: BLE001 - a package, a library and a driver that may not fit each other
        return f"{PACKAGE} fails with {type(error).__name__}: {error}".partition("\n")[0]
    if not difference < _LARGEST_DIFFERENCE:
        return f"its values or gradients differ from FlashAttention-2's by {100 * difference:.1f} %"
    return None


def _difference(device: torch.device, causal: bool, window: int) -> float:
    """Largest difference of values and gradients between the kernels, relative in norm, on a small pack."""
    lengths = (200, 1, 77, 300)
    generator = torch.Generator(device).manual_seed(0)
    grad, q, k, v = (
        torch.randn(sum(lengths), heads, 64, device=device, dtype=torch.bfloat16, generator=generator)
        for heads in (4, 4, 2, 2)
    )
    cu_N = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    settings = (cu_N, max(lengths), causal, window, 0.125)
    results = []
    for forward, backward in ((_forward_by_cudnn, _backward_by_cudnn), (_forward_by_flash, _backward_by_flash)):
        out, log_sums = forward(q, k, v, *settings)
        results.append((out, log_sums, *backward(grad, q, k, v, out, log_sums, *settings)))
    return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(*results, strict=True))


def cudnn_attention(*call: Any) -> torch.Tensor:
    """Attend within segments; a `CudaKernel`, with the errors of `varlen.varlen_attention`, which runs what suits it.

    That is sinks and heads larger than 128 by the model, and short segments and small packs by the pack.
    """
    q_THD, k_TKD, v_TKD, cu_seqlens_N, max_seqlen, causal, window, scale, sinks_H = call
    if sinks_H is not None or max(q_THD.shape[-1], v_TKD.shape[-1]) > _LARGEST_OF_CUDNN:
        return varlen_attention(*call)
    operands = flash_operands(q_THD, k_TKD, v_TKD)
    reach = window if causal and window is not None else -1
    out, _ = _ragged_attention(*operands, cu_seqlens_N.to(torch.int32), max_seqlen, causal, reach, scale)
    values_THD: torch.Tensor = out.narrow(-1, 0, v_TKD.shape[-1])
    return values_THD


def suits(slots: int, segments: int, longest: int, heads: int) -> bool:
    """Tell whether cuDNN is the faster kernel for a pack, and has memory for it.

    >>> suits(81_920, 72, 12_968, 28), suits(134_064, 2_736, 64, 16), suits(8_192, 14, 826, 32)
    (True, False, False)
    """
    sums = 4 * heads * rounded_segments(segments) * rounded_length(longest)
    return slots >= _FEWEST_SLOTS and slots >= _SHORTEST_MEAN * segments and sums <= _LARGEST_SUMS


def rounded_segments(segments: int) -> int:
    """Round a number of segments up to one of four values between powers of two.

    >>> rounded_segments(1), rounded_segments(33), rounded_segments(72)
    (4, 40, 80)
    """
    return _rounded_up(segments, multiple=1)


def rounded_length(longest: int) -> int:
    """Round a length up to one of four values between powers of two, and a multiple of 64 [tokens].

    >>> rounded_length(1), rounded_length(12_968), rounded_length(16_384), rounded_length(16_385)
    (64, 14336, 16384, 20480)
    """
    return _rounded_up(longest, multiple=64)


def _rounded_up(number: int, multiple: int) -> int:
    step = max(multiple, 1 << max(0, (number - 1).bit_length() - 3))
    return max(4, -(-number // step) * step)


@torch.library.custom_op("headway::ragged_attention", mutates_args=())
def _ragged_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cu_N: torch.Tensor,
    longest: int,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, shape (T, H, D), and log-sum-exp of the scores, shape (H, T), by the kernel that suits the pack."""
    is_for_cudnn = suits(len(q_THD), len(cu_N) - 1, longest, q_THD.shape[1])
    attend = _forward_by_cudnn if is_for_cudnn else _forward_by_flash
    return attend(q_THD, k_TKD, v_TKD, cu_N, longest, causal, window, scale)


@torch.library.custom_op("headway::ragged_attention_backward", mutates_args=())
def _ragged_attention_backward(
    grad_THD: torch.Tensor,
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    out_THD: torch.Tensor,
    log_sum_HT: torch.Tensor,
    cu_N: torch.Tensor,
    longest: int,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    is_for_cudnn = suits(len(q_THD), len(cu_N) - 1, longest, q_THD.shape[1])
    differentiate = _backward_by_cudnn if is_for_cudnn else _backward_by_flash
    return differentiate(
        grad_THD.contiguous(), q_THD, k_TKD, v_TKD, out_THD, log_sum_HT, cu_N, longest, causal, window, scale
    )


def _forward_by_cudnn(*qkv_and_settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *qkv, cu_N, longest, causal, window, scale = qkv_and_settings
    out, log_sum_TH1 = torch.ops.cudnn.sdpa_fwd(
        *qkv, scale, is_causal=causal, window_left=window, return_lse=True, **_rounded(cu_N, longest)
    )
    return out, log_sum_TH1.squeeze(-1).T.contiguous()


def _backward_by_cudnn(*tensors_and_settings: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *tensors, log_sum_HT, cu_N, longest, causal, window, scale = tensors_and_settings
    rounded = _rounded(cu_N, longest)
    log_sum_NHL1 = _by_segment(log_sum_HT, rounded["cu_seqlens_q"], rounded["max_seqlen_q"])
    dq, dk, dv = torch.ops.cudnn.sdpa_bwd(
        *tensors, log_sum_NHL1, scale, is_causal=causal, window_left=window, **rounded
    )
    return dq, dk, dv


def _forward_by_flash(*qkv_and_settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, cu_N, longest, causal, window, scale = qkv_and_settings
    out, log_sum_HT, _ = _flash(q, k, v, cu_N, longest, _flash_reach(causal, window), scale)
    return out, log_sum_HT


def _backward_by_flash(*tensors_and_settings: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *tensors, cu_N, longest, causal, window, scale = tensors_and_settings
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=cu_N.device)
    return _flash_backward(*tensors, cu_N, longest, _flash_reach(causal, window), scale, no_dropout)


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_N: torch.Tensor,
    longest: int,
    reach: tuple[int, int],
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """FlashAttention-2's values, log-sum-exp of the scores, shape (H, T), and state of its generator."""
    ends, more = (cu_N, cu_N, longest, longest), grouped(q, k)
    values: tuple[torch.Tensor, ...]
    values = torch.ops.torch_attn._varlen_attn(q, k, v, *ends, reach == _CAUSAL, scale, list(reach), **more)
    return values


def _flash_backward(*tensors_and_settings: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *tensors, cu_N, longest, reach, scale, state = tensors_and_settings
    ends = (cu_N, cu_N, longest, longest, reach == _CAUSAL)
    dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(*tensors, *ends, state, scale, list(reach))
    return dq, dk, dv


def _rounded(cu_N: torch.Tensor, longest: int) -> dict[str, Any]:
    """Boundaries and bound of the lengths as cuDNN's operations take them, of a few sizes only."""
    missing = rounded_segments(len(cu_N) - 1) + 1 - len(cu_N)
    cu_N = torch.cat([cu_N, cu_N[-1:].expand(missing)])
    bound = rounded_length(longest)
    return {"cu_seqlens_q": cu_N, "cu_seqlens_kv": cu_N, "max_seqlen_q": bound, "max_seqlen_kv": bound}


def _by_segment(log_sum_HT: torch.Tensor, cu_N: torch.Tensor, bound: int) -> torch.Tensor:
    """Log-sum-exp with a row of `bound` slots for each segment, zeros behind its end: shape (N, H, bound, 1)."""
    heads, slots = log_sum_HT.shape
    slot_T = torch.arange(slots, device=cu_N.device, dtype=cu_N.dtype)
    segment_T = torch.searchsorted(cu_N, slot_T, right=True) - 1
    rows_NLH = log_sum_HT.new_zeros(len(cu_N) - 1, bound, heads)
    rows_NLH[segment_T, slot_T - cu_N[segment_T]] = log_sum_HT.T
    return rows_NLH.transpose(1, 2).contiguous().unsqueeze(-1)


def _flash_reach(causal: bool, window: int) -> tuple[int, int]:
    """Keys before and after its own that a query sees, as FlashAttention counts them; -1 is without limit."""
    return (window - 1 if window >= 0 else -1, 0) if causal else (-1, -1)


@_ragged_attention.register_fake
def _shapes(q_THD: torch.Tensor, *_others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    slots, heads, _size = q_THD.shape
    return torch.empty_like(q_THD), q_THD.new_empty(heads, slots, dtype=torch.float32)


@_ragged_attention_backward.register_fake
def _gradient_shapes(_grad: torch.Tensor, *operands: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(x) for x in operands[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_N, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, cu_N)


def _backward(ctx: Any, grad_THD: torch.Tensor, _grad_of_sums: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gradients = _ragged_attention_backward(grad_THD, *ctx.saved_tensors, *ctx.settings)
    return (*gradients, None, None, None, None, None)


_ragged_attention.register_autograd(_backward, setup_context=_keep)
