"""flash-attn's functions for training, on the FlashAttention-2 that PyTorch has (`torch.nn.attention.varlen`).

The distribution's own wheel has kernels for every device and is hundreds of MB; a machine without network that has
PyTorch has the same kernel already. transformers asks for the distribution's name and version, and for these functions.
On a CPU each segment is attended by itself, for tests.

Source: names and arguments of Dao-AILab/flash-attention 2.8.3, flash_attn/flash_attn_interface.py.
"""

from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

__version__ = "2.8.3+varlen"
__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

flash_attn_with_kvcache = None  # of generation, which transformers imports beside the others; training never calls it


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Attend within segments that lie end to end.

    Args:
        q: queries, shape (T, H, D).
        k: keys, shape (T, K, D); K divides H.
        v: values, shape (T, K, D).
        cu_seqlens_q: where segments of queries begin, int32, shape (N + 1,).
        cu_seqlens_k: where segments of keys begin, int32, shape (N + 1,).
        max_seqlen_q: longest segment of queries [tokens].
        max_seqlen_k: longest segment of keys [tokens].
        dropout_p: 0.
        softmax_scale: factor of the scores; 1 / sqrt(D) if None.
        causal: whether a query sees no later key.
        window_size: keys before and behind a query that it sees; -1 for all.

    Raises:
        ValueError: a dropout, which PyTorch's kernel does not have.
    """
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p}: PyTorch's variable-length attention has none; give 0.")
    if causal:
        window_size = (window_size[0], 0)
    attend = _varlen_attn if q.is_cuda else attend_by_segment
    lengths = int(max_seqlen_q), int(max_seqlen_k)
    return attend(
        q, k, v, cu_seqlens_q, cu_seqlens_k, *lengths, scale=softmax_scale, window_size=window_size, enable_gqa=True
    )


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Attend within rows of one length, shape (B, S, H, D); arguments and errors as `flash_attn_varlen_func`."""
    starts_q, starts_k = (
        torch.arange(0, (x.shape[0] + 1) * x.shape[1], x.shape[1], dtype=torch.int32, device=x.device) for x in (q, k)
    )
    flat = (x.flatten(0, 1) for x in (q, k, v))
    out = flash_attn_varlen_func(
        *flat, starts_q, starts_k, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal, window_size
    )
    return out.unflatten(0, q.shape[:2])


def _varlen_attn(*arguments: object, **options: object) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(*arguments, **options)


def attend_by_segment(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    max_q: int,  # noqa: ARG001 - an argument of the function that it stands in for
    max_k: int,  # noqa: ARG001
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = True,
) -> torch.Tensor:
    """Attend to each segment by itself, on any device; arguments as `torch.nn.attention.varlen.varlen_attn`."""
    parts = []
    for (first, end), (first_k, end_k) in zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True):
        heads = [x.transpose(0, 1)[None] for x in (q[first:end], k[first_k:end_k], v[first_k:end_k])]
        # how far behind its query a key is; ends of both segments are at one place
        place_q = torch.arange(end - first, device=q.device)[:, None] + (end_k - first_k) - (end - first)
        behind = place_q - torch.arange(end_k - first_k, device=q.device)
        before, after = (n if n >= 0 else end_k for n in window_size)
        mask = (behind <= before) & (-behind <= after)
        part = scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)
