"""Seams for attention kernels written in Python: PyTorch's `varlen_attn` and `flex_attention`, flash-attn's, xformers'.

Masks of variable-length kernels are a causal flag and a window; segments come as cumulative boundaries, which are real
integers in a trace. A block mask of `flex_attention` is evaluated over every query and key, on real integers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headway.count import masks
from headway.count.integers import Ints
from headway.errors import TraceError
from headway.tracing import known_values, scores
from headway.tracing.attention import choose_interface, masked_pairs, plain_pairs, record_attention
from headway.tracing.record import Recorder


def _lengths(recorder: Recorder, boundaries: torch.Tensor, total: int, what: str) -> Ints:
    """Return segment lengths, after checking that their boundaries fit the tensor at hand."""
    if known_values.is_placeholder(boundaries):
        raise TraceError(
            f"module {recorder.module or '(the model)'} attends in segments whose boundaries depend on floats, but "
            "floats have no data in a trace. Give the lengths as integers among the inputs."
        )
    lengths = np.diff(boundaries.tolist())
    if lengths.size == 0 or lengths.min() < 0 or lengths.sum() != total:
        raise TraceError(
            f"module {recorder.module or '(the model)'} attends over {total} {what} in segments of "
            f"{lengths.tolist()[:8]}: their boundaries do not cover them."
        )
    return lengths


def _band(queries: Ints, keys: Ints, window: Any, causal: bool) -> tuple[int, str]:
    """Count the pairs of a causal flag and a window (left, right), in which None or -1 is no limit."""
    left, right = (None if side is None or side < 0 else int(side) for side in window)
    right = 0 if causal else right
    filled = (queries > 0) & (keys > 0)
    queries, keys = queries[filled], keys[filled]
    pairs = masks.banded_pairs(queries, keys, left=left, right=right)
    driver = ""
    if right == 0 and np.array_equal(queries, keys):
        driver = "pairs:causal" if left is None else f"pairs:sliding:{left + 1}"
    return pairs, driver


def _attend_packed(
    recorder: Recorder,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    boundaries: tuple[torch.Tensor, torch.Tensor | None],
    window: Any,
    causal: bool,
    used: torch.Tensor | None,
) -> torch.Tensor:
    """Attend over segments laid end to end, [tokens, heads, size]."""
    q, k, v = (t.transpose(-3, -2) for t in qkv)
    queries = _lengths(recorder, boundaries[0], q.shape[-2], "queries")
    if used is not None:
        keys = np.asarray(used.tolist())
    else:
        of_keys = boundaries[0] if boundaries[1] is None else boundaries[1]
        keys = _lengths(recorder, of_keys, k.shape[-2], "keys")
    pairs, driver = _band(queries, keys, window, causal)
    # kernels return a contiguous tensor
    return record_attention(recorder, recorder.module, q, k, v, pairs, driver).transpose(-3, -2).contiguous()


def _statistics(out: torch.Tensor) -> torch.Tensor:
    """Stand in for the log-sum-exp of scores, (..., tokens, heads); it hangs on the same products as the output."""
    return out[..., 0].float()


def _varlen_attn(
    recorder: Recorder,
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    window_size: tuple[int, int] = (-1, -1),
    seqused_k: torch.Tensor | None = None,
    k_cache: torch.Tensor | None = None,
    return_aux: Any = None,
    **_options: Any,
) -> Any:
    """Stand in for `torch.nn.attention.varlen.varlen_attn`."""
    if k_cache is not None:
        raise TraceError(
            f"module {recorder.module or '(the model)'} attends over a cache that its kernel extends, which no "
            "training step does."
        )
    out = _attend_packed(recorder, (query, key, value), (cu_seq_q, cu_seq_k), window_size, False, seqused_k)
    return (out, _statistics(out)) if return_aux is not None and return_aux.lse else out


def _within_segments(
    recorder: Recorder,
    *,
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cu_seqlens_N: torch.Tensor,
    causal: bool,
    window: int | None,
    **_options: Any,
) -> Any:
    """Stand in for the function that Headway's backend calls on the CPU, which no room above names."""
    reach = (-1 if window is None else window - 1, 0) if causal else (-1, -1)
    return _attend_packed(recorder, (q_THD, k_TKD, v_TKD), (cu_seqlens_N, cu_seqlens_N), reach, causal, None)


def _flash(
    recorder: Recorder,
    *,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    kv: torch.Tensor | None = None,
    qkv: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    return_attn_probs: bool = False,
    **_options: Any,
) -> Any:
    """Stand in for any of flash-attn's functions: [batch, tokens, heads, size], or [tokens, heads, size] in segments.

    `qkv` and `kv` hold their parts along the third dimension from the end.
    """
    if qkv is not None:
        q, k, v = qkv.unbind(-3)
    elif kv is not None:
        k, v = kv.unbind(-3)
    if q is None or k is None or v is None:
        raise TraceError(
            f"module {recorder.module or '(the model)'} calls a flash-attn function without queries, keys and values."
        )
    boundaries = cu_seqlens if cu_seqlens is not None else cu_seqlens_q
    if boundaries is not None:
        of_keys = cu_seqlens if cu_seqlens is not None else cu_seqlens_k
        out = _attend_packed(recorder, (q, k, v), (boundaries, of_keys), window_size, causal, seqused_k)
    else:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        queries, keys = np.full(len(q), q.shape[-2]), np.full(len(q), k.shape[-2])
        pairs, driver = _band(queries, keys, window_size, causal)
        out = record_attention(recorder, recorder.module, q, k, v, pairs, driver).transpose(1, 2).contiguous()
    return (out, _statistics(out), None) if return_attn_probs else out


def _transformers_flash(
    recorder: Recorder,
    *,
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **_options: Any,
) -> torch.Tensor:
    """Stand in for the function through which transformers calls any flash kernel: [batch, tokens, heads, size].

    Source: transformers.modeling_flash_attention_utils: a window of w tokens reaches w - 1 to either side.
    """
    if attention_mask is not None:
        raise TraceError(
            f"module {recorder.module or '(the model)'} hands a flash kernel a mask of padding. Give whole segments."
        )
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    if cu_seq_lens_q is not None:
        flat = tuple(t.flatten(0, 1) for t in (query_states, key_states, value_states))
        packed = _attend_packed(recorder, flat, (cu_seq_lens_q, cu_seq_lens_k), window, is_causal, None)  # type: ignore[arg-type]  # three tensors
        return packed.view(*query_states.shape[:2], *packed.shape[1:])
    out: torch.Tensor = _flash(
        recorder, q=query_states, k=key_states, v=value_states, causal=is_causal, window_size=window
    )
    return out


def _xformers(
    recorder: Recorder,
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    **_options: Any,
) -> torch.Tensor:
    """Stand in for `xformers.ops.memory_efficient_attention`: [batch, tokens, (groups,) heads, size]."""
    shape = query.shape
    q, k, v = (t.unsqueeze(2) if t.dim() == 3 else t.flatten(2, -2) for t in (query, key, value))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    size = (q.shape[0], 1, q.shape[-2], k.shape[-2])
    if attn_bias is None:
        pairs = size[0] * masks.cross_pairs([size[2]], [size[3]])
        return (
            record_attention(recorder, recorder.module, q, k, v, pairs)
            .transpose(1, 2)
            .reshape(*shape[:-1], v.shape[-1])
        )
    bias = attn_bias if isinstance(attn_bias, torch.Tensor) else attn_bias.materialize(size)
    pairs, heads, driver = recorder.cached(
        attn_bias, (*q.shape[:-1], k.shape[-2]), lambda: masked_pairs(recorder, recorder.module, bias, q, k)
    )
    out = record_attention(recorder, recorder.module, q, k, v, pairs, driver, masked=True, heads=heads)
    return out.transpose(1, 2).reshape(*shape[:-1], v.shape[-1])


_FLASH: dict[str, Callable[..., Any]] = {
    f"flash_attn_{form}func": _flash
    for form in ("", "qkvpacked_", "kvpacked_", "varlen_", "varlen_qkvpacked_", "varlen_kvpacked_")
}


def _flex_attention(
    recorder: Recorder,
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    return_lse: bool = False,
    return_aux: Any = None,
    **_options: Any,
) -> Any:
    """Stand in for `torch.nn.attention.flex_attention.flex_attention`; a modified score of -inf hides its pair."""
    sizes = (*query.shape[:-1], key.shape[-2])
    shown = None if score_mod is None else _shown(recorder, score_mod, query, sizes)
    if shown is not None:
        allowed = shown if block_mask is None else shown & _allowed(block_mask, query, key)
        pairs, heads, driver = recorder.count(allowed, *_split(sizes))
    elif block_mask is not None:
        pairs, heads, driver = recorder.cached(
            block_mask, sizes, lambda: recorder.count(_allowed(block_mask, query, key), *_split(sizes))
        )
    else:
        (pairs, driver), heads = plain_pairs(query, key, False, None), 0
    masked = shown is not None or block_mask is not None
    out = record_attention(recorder, recorder.module, query, key, value, pairs, driver, masked=masked, heads=heads)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(
            lse=out[..., 0].float() if return_aux.lse else None,
            max_scores=out[..., 0].float() if return_aux.max_scores else None,
        )
    return (out, out[..., 0].float()) if return_lse else out


def _split(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    return sizes[:-2], sizes[-2], sizes[-1]


def _shown(recorder: Recorder, score_mod: Any, query: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor | None:
    """Say which pairs (batch, heads, queries, keys) a score modification does not hide; None where it hides none.

    It runs on all scores at once, as shapes, and its choices of -inf are followed. One that takes single places only,
    as transformers' own, runs on real zeros, head by head.
    """
    from torch.nn.attention.flex_attention import create_mask

    batch, heads, queries, keys = sizes
    places = [torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(sizes)]
    try:
        stays = scores.pairs_under(score_mod(query[..., :1].expand(sizes), *places))
    except Exception:  # noqa: BLE001  # its places may be read one after another
        stays = "unclear"
    if not isinstance(stays, str):
        return stays

    def of_head(row: int, head: int) -> torch.Tensor:
        def at(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return torch.where(score_mod(score, b + row, h + head, q, k) > scores.HIDDEN, 0.0, -torch.inf)

        with torch._C.DisableTorchFunction():  # under which new zeros are data
            plane: torch.Tensor = create_mask(at, 1, 1, queries, keys, device="cpu")[0, 0]
            return plane

    planes = torch.stack([of_head(row, head) for row in range(batch) for head in range(heads)])
    if not planes.any(-1).all():  # an unknown value hides all that it is compared with
        raise TraceError(
            f"module {recorder.module or '(the model)'} modifies attention scores by floats without data, so it may "
            "hide pairs. Give its mask as a block mask."
        )
    return None if planes.all() else planes.view(sizes)


def _allowed(block_mask: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Write out a block mask: all pairs of a full block, and the mask function's pairs of a partial block."""
    from torch.nn.attention.flex_attention import create_mask

    number: torch.Tensor = block_mask.kv_num_blocks
    (batch, heads), queries, keys, sides = number.shape[:2], q.shape[-2], k.shape[-2], block_mask.BLOCK_SIZE
    inside = create_mask(block_mask.mask_mod, batch, heads, queries, keys, device=str(number.device))
    allowed = inside & _listed(number, block_mask.kv_indices, sides, queries, keys)
    if block_mask.full_kv_num_blocks is not None:
        allowed |= _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, sides, queries, keys)
    return allowed


def _listed(
    number: torch.Tensor, indices: torch.Tensor, sides: tuple[int, int], queries: int, keys: int
) -> torch.Tensor:
    """Spread lists of key blocks, `number` of them per row of query blocks, over queries and keys."""
    listed = torch.arange(indices.shape[-1], device=number.device) < number[..., None]
    rows = listed.nonzero(as_tuple=True)
    columns = indices[rows].long()
    blocks = torch.zeros(*indices.shape[:-1], -(-keys // sides[1]), dtype=torch.bool, device=number.device)
    blocks[(*rows[:-1], columns)] = True
    spread = blocks.repeat_interleave(sides[0], -2).repeat_interleave(sides[1], -1)
    return spread[..., :queries, :keys]


# module -> function -> what records it; modules that are not imported are passed over
SEAMS: dict[str, dict[str, Callable[..., Any]]] = {
    "headway.models.attention.segments": {"segment_attention": _within_segments},
    "torch.nn.attention.flex_attention": {"flex_attention": _flex_attention},
    "torch.nn.attention.varlen": {"varlen_attn": _varlen_attn},
    "flash_attn.flash_attn_interface": _FLASH,  # flash-attn 2
    "flash_attn_interface": _FLASH,  # flash-attn 3
    "transformers.modeling_utils": {"AttentionInterface.get_interface": choose_interface},
    "transformers.modeling_flash_attention_utils": {"_flash_attention_forward": _transformers_flash},
    "xformers.ops.fmha": {"memory_efficient_attention": _xformers},
}
