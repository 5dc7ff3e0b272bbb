"""Attention within segments on the CPU: one fused kernel call per distinct segment length, forward and backward.

Tensor letters as in `attention`: H query heads, K key/value heads, T slots, M segments of equal length L, D head size.

Images, frames and attention windows often share a length, and so do many short texts: they become one batched call. A
window narrower than a segment is walked in blocks of queries, so that cost grows with window times length, not length
squared. A learnt sink joins the softmax through the kernel's log-sum-exp, exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional as F

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_NUM_INPUTS = 5  # tensors of both operations: queries, keys, values, sinks, boundaries
_SMALLEST_BLOCK = 64  # queries per kernel call in a narrow window; below it the call costs more than the work


@dataclass(frozen=True, slots=True)
class Group:
    """Segments of one length: where they lie, as a slice if they touch, else as indices of their slots."""

    length: int
    count: int
    start: int | None
    slots: torch.Tensor | None


def groups(cu_seqlens_N: torch.Tensor) -> tuple[Group, ...]:
    """Group a pack's segments by length [tokens], shortest first; recent answers are kept for the next layers."""
    return _groups(tuple(cu_seqlens_N.tolist()))


@lru_cache(maxsize=16)
def _groups(boundaries: tuple[int, ...]) -> tuple[Group, ...]:
    starts: dict[int, list[int]] = {}
    for start, end in pairwise(boundaries):
        if end > start:
            starts.setdefault(end - start, []).append(start)
    grouped = []
    for length, firsts in sorted(starts.items()):
        touching = all(b - a == length for a, b in pairwise(firsts))
        slots = None
        if not touching:
            slots = (torch.tensor(firsts)[:, None] + torch.arange(length)).flatten()
        grouped.append(Group(length, len(firsts), firsts[0] if touching else None, slots))
    return tuple(grouped)


def take(x_THD: torch.Tensor, group: Group) -> torch.Tensor:
    """The group's segments as a batch, shape (M, H, L, D); a view where they touch."""
    if group.slots is not None:
        part = x_THD.index_select(0, group.slots)
    else:
        assert group.start is not None
        part = x_THD.narrow(0, group.start, group.count * group.length)
    return part.view(group.count, group.length, *part.shape[1:]).transpose(1, 2)


def put(out_THD: torch.Tensor, group: Group, part_MHLD: torch.Tensor) -> None:
    """Write a group's batch back to its slots."""
    part = part_MHLD.transpose(1, 2).flatten(0, 1)
    if group.slots is not None:
        out_THD.index_copy_(0, group.slots, part)
    else:
        assert group.start is not None
        out_THD.narrow(0, group.start, part.shape[0]).copy_(part)


def group_by_group(
    qkv_THD: tuple[torch.Tensor, ...],
    groups: Sequence[tuple[torch.Tensor, int]],
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Attend in each group of segments as a batch, and put the results back in order.

    Args:
        qkv_THD: queries, keys and values.
        groups: slots of each, shape (M L,), and the length of its segments, L.
        attend: gives the values of a group, shape (M, H, L, Dv), by its number and its queries, keys and values.
    """
    parts = []
    for number, (slots, length) in enumerate(groups):
        batches = (x.index_select(0, slots).view(-1, length, *x.shape[1:]).transpose(1, 2) for x in qkv_THD)
        parts.append(attend(number, *batches).transpose(1, 2).flatten(0, 1))
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts).index_select(0, torch.cat([slots for slots, _ in groups]).argsort())


def segment_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cu_seqlens_N: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attend within segments.

    Args:
        q_THD: queries.
        k_TKD: keys; K divides H.
        v_TKD: values; their head size may differ from the keys'.
        cu_seqlens_N: segment boundaries, shape (N+1,).
        causal: whether queries see only keys at or before their own place.
        window: keys each query may see, itself included [tokens]; causal only.
        scale: factor on the scores.
        sinks_H: a learnt score per head that joins the softmax and has no value.

    Returns:
        Attended values, shape (T, H, Dv).
    """
    value_size = v_TKD.shape[-1]
    q_THD, k_TKD, v_TKD = with_equal_heads(q_THD, k_TKD, v_TKD)
    attend: Any = _SegmentAttention.apply  # torch leaves it untyped
    out: torch.Tensor = attend(q_THD, k_TKD, v_TKD, sinks_H, cu_seqlens_N, causal, window, scale)
    return out.narrow(-1, 0, value_size)


def with_equal_heads(*tensors: torch.Tensor, multiple: int = 1) -> tuple[torch.Tensor, ...]:
    """Give queries, keys and values one head size, as kernels want: zeros change neither scores nor values.

    Args:
        tensors: of shape (T, heads, D), each with its own D; one that has the size is not copied.
        multiple: what the size must be a multiple of.
    """
    size = -(-max(x.shape[-1] for x in tensors) // multiple) * multiple
    return tuple(F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in tensors)


class _SegmentAttention(torch.autograd.Function):
    """One autograd node for the whole pack; for the compiler, two operations that it need not look into.

    It could not: what they do depends on boundaries that are read on the host. Uncompiled, they are called directly,
    which spares a tenth of a millisecond per call.
    """

    @staticmethod
    def forward(ctx: Any, *tensors_and_settings: Any) -> torch.Tensor:
        inputs, settings = tensors_and_settings[:_NUM_INPUTS], tensors_and_settings[_NUM_INPUTS:]
        attend: Any = torch.ops.headway.segment_attention if torch.compiler.is_compiling() else _attend
        out_THD, log_sums = attend(*inputs, *settings)
        ctx.save_for_backward(*inputs, out_THD, log_sums)
        ctx.settings = settings
        assert isinstance(out_THD, torch.Tensor)
        return out_THD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        compiling = torch.compiler.is_compiling()
        attend: Any = torch.ops.headway.segment_attention_backward if compiling else _attend_backward
        *grads, sinks_grad = attend(grad_THD, *ctx.saved_tensors, *ctx.settings)
        return *grads, sinks_grad if ctx.needs_input_grad[3] else None, None, None, None, None


def _attend(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    cu_seqlens_N: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel over groups and blocks.

    Returns:
        The attended values, and the log-sum-exp of every query's scores, shape (T * H,), in the order of the calls.
    """
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    log_sums = []
    for group in groups(cu_seqlens_N):
        q, k, v = take(q_THD, group), take(k_TKD, group), take(v_TKD, group)
        parts = []
        for rows, keys, bias in _blocks(group.length, window, q):
            part, log_sum = _kernel(
                q[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                0.0,
                causal and bias is None,
                attn_mask=bias,
                scale=scale,
            )
            if sinks_H is not None:
                part, log_sum = with_sinks(part, log_sum, sinks_H[:, None])
            parts.append(part)
            log_sums.append(log_sum.flatten())
        put(out_THD, group, parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
    if len(log_sums) == 1:
        return out_THD, log_sums[0]
    return out_THD, torch.cat(log_sums) if log_sums else _no_log_sums(q_THD)


def _attend_shapes(q_THD: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    slots, heads, _size = q_THD.shape
    log_sums = _no_log_sums(q_THD).new_empty(slots * heads)
    return torch.empty_like(q_THD, memory_format=torch.contiguous_format), log_sums


def _no_log_sums(q_THD: torch.Tensor) -> torch.Tensor:
    """Empty tensor of the dtype that the kernel gives log-sum-exps in."""
    return q_THD.new_empty(0, dtype=torch.promote_types(torch.float32, q_THD.dtype))


def _attend_backward(
    grad_THD: torch.Tensor,
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    cu_seqlens_N: torch.Tensor,
    out_THD: torch.Tensor,
    log_sums: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys, values and sinks; the last is empty where there are none."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THD, k_TKD, v_TKD)]
    sinks_grad = q_THD.new_zeros(0 if sinks_H is None else sinks_H.shape[0], dtype=torch.float64)
    heads, done = q_THD.shape[1], 0
    for group in groups(cu_seqlens_N):
        q, k, v, out, grad = (take(x, group) for x in (q_THD, k_TKD, v_TKD, out_THD, grad_THD))
        blocks = list(_blocks(group.length, window, q))
        # Keys of overlapping windows get gradients of several blocks: summed, unless there is one block.
        sums = None if len(blocks) == 1 else [torch.zeros_like(x) for x in (q, k, v)]
        for rows, keys, bias in blocks:
            # The log-sum-exps of this call: forward left them end to end, in this order.
            num = group.count * heads * (rows.stop - rows.start)
            log_sum = log_sums.narrow(0, done, num).view(group.count, heads, -1)
            done += num
            parts = _kernel_backward(
                grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], log_sum,
                0.0, causal and bias is None, attn_mask=bias, scale=scale,
            )  # fmt: skip
            # A sink's gradient sums over all segments and queries, in float64.
            if sinks_H is not None:
                sinks_grad += sink_gradient(grad[:, :, rows], out[:, :, rows], log_sum, sinks_H[:, None]).sum((0, 2))
            if sums is None:
                sums = list(parts)
            else:
                # Gradients of queries go to the block's rows, those of keys and values to the keys that it saw.
                for total, where, part in zip(sums, (rows, keys, keys), parts, strict=True):
                    total[:, :, where] += part
        assert sums is not None
        # The group's gradients go back to its slots.
        for full_grad, total in zip(grads, sums, strict=True):
            put(full_grad, group, total)
    return grads[0], grads[1], grads[2], sinks_grad if sinks_H is None else sinks_grad.to(sinks_H.dtype)


def _gradient_shapes(
    _grad: torch.Tensor,
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    sinks = q_THD.new_empty(0, dtype=torch.float64) if sinks_H is None else torch.empty_like(sinks_H)
    return *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THD, k_TKD, v_TKD)), sinks


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor cu_seqlens"
_SETTINGS = "bool causal, SymInt? window, float scale"
torch.library.define("headway::segment_attention", f"({_INPUTS}, {_SETTINGS}) -> (Tensor, Tensor)")
torch.library.define(
    "headway::segment_attention_backward",
    f"(Tensor grad, {_INPUTS}, Tensor out, Tensor log_sums, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.impl("headway::segment_attention", "CPU", _attend)
torch.library.impl("headway::segment_attention_backward", "CPU", _attend_backward)
torch.library.register_fake("headway::segment_attention", _attend_shapes)
torch.library.register_fake("headway::segment_attention_backward", _gradient_shapes)


def with_sinks(out: torch.Tensor, log_sum: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Let a learnt score join a finished softmax: its weight goes nowhere, so the values shrink by what it takes.

    Source: softmax over (scores, sink) = softmax(scores) * exp(lse - lse'), with lse' = log(exp(lse) + exp(sink)).
    """
    joined = torch.logaddexp(log_sum, sinks.to(log_sum.dtype))
    return out * (log_sum - joined).exp().unsqueeze(-1).to(out.dtype), joined


def sink_gradient(grad: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Gradient of each query's sink score: minus its weight times the gradient's projection on the output.

    Source: d softmax_j / d s_sink = -p_j p_sink, so the sum over j of (grad . v_j) gives -p_sink (grad . out).
    """
    wide = torch.promote_types(torch.float32, grad.dtype)
    projection = (grad.to(wide) * out.to(wide)).sum(-1)
    return -(sinks.to(wide) - log_sum.to(wide)).exp() * projection


def _blocks(length: int, window: int | None, like: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """Blocks of queries, the keys they see and the additive mask between them; one block without a mask if all fit."""
    if window is None or window >= length:
        yield slice(0, length), slice(0, length), None
        return
    step = max(window, _SMALLEST_BLOCK)
    for first in range(0, length, step):
        end, low = min(first + step, length), max(0, first - window + 1)
        yield slice(first, end), slice(low, end), _band(first - low, end - first, window, like.dtype)


@lru_cache(maxsize=64)
def _band(offset: int, queries: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    place = torch.arange(queries)[:, None] + offset
    keys = torch.arange(offset + queries)[None, :]
    return torch.zeros(queries, offset + queries, dtype=dtype).masked_fill(
        (keys > place) | (keys <= place - window), -torch.inf
    )
