"""Attention within segments on CUDA: torch's variable-length flash kernel, with sinks added exactly.

Tensor letters as in `attention`: H query heads, K key/value heads, T slots, D head size.
"""

import inspect
from typing import Any, Protocol

import torch
from torch.nn.attention import varlen

from headway.errors import ConfigError
from headway.models.attention.segments import sink_gradient, with_equal_heads, with_sinks

_LARGEST_HEAD = 256  # head size that the flash kernel takes
_HEAD_MULTIPLE = 8
# torch 2.11's kernel takes fewer key/value heads than query heads by itself; later ones want to be told.
_IS_TOLD_OF_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


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
            f"This model's attention heads have {largest} channels; the flash kernel on CUDA takes up to "
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
        causal = reach == (-1, 0)
        out_THD, log_sum_HT, state = torch.ops.torch_attn._varlen_attn(
            q_THD,
            k_TKD,
            v_TKD,
            cu_N,
            cu_N,
            longest,
            longest,
            causal,
            scale,
            list(reach),
            **grouped(q_THD, k_TKD),
        )
        # Turned about here rather than the values: a compiled function of torch 2.11 gives no gradient to a view.
        out_THD, log_sum_TH = with_sinks(out_THD, log_sum_HT.T, sinks_H)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, sinks_H, cu_N, out_THD, log_sum_TH.T.contiguous(), state)
        ctx.longest, ctx.causal, ctx.reach, ctx.scale = longest, causal, reach, scale
        return out_THD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks_H, cu_N, out_THD, log_sum_HT, state = ctx.saved_tensors
        grad_THD = grad_THD.contiguous()
        dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
            grad_THD, q, k, v, out_THD, log_sum_HT, cu_N, cu_N, ctx.longest, ctx.longest, ctx.causal, state, ctx.scale,
            list(ctx.reach),
        )  # fmt: skip
        sinks = sink_gradient(grad_THD.transpose(0, 1), out_THD.transpose(0, 1), log_sum_HT, sinks_H.unsqueeze(1))
        return dq, dk, dv, sinks.sum(1).to(sinks_H.dtype), None, None, None, None
