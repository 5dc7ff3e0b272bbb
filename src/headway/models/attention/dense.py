"""Attention written out (scores, mask, softmax), slower than the kernels, for what they do not have.

That is: soft-capped scores, attention dropout, padded rows and generation from a cache. Tensor letters as in
`attention`.
"""

import torch
from torch.nn import functional as F

from headway.models.recompute import refuse_kept_attention


def exact_attention(
    q_BHTD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Attend under a mask, shape (B or 1, 1, T, S); returns shape (B, H, T, Dv).

    The mask is boolean (True: may see), or numbers to add to the scores where they are neither capped nor have sinks.
    """
    if dropout > 0.0:
        refuse_kept_attention("no kernel has attention dropout here")
    repeats = q_BHTD.shape[1] // k_BKSD.shape[1]
    # torch's fused kernel where it says all: scores as they are, and a softmax over keys alone.
    if softcap is None and sinks_H is None:
        if mask is not None and q_BHTD.is_cuda:  # no fused kernel there takes both a mask and fewer key heads
            k_BKSD, v_BKSD = (x.repeat_interleave(repeats, dim=1) for x in (k_BKSD, v_BKSD))
        grouped = q_BHTD.shape[1] != k_BKSD.shape[1]
        return F.scaled_dot_product_attention(
            q_BHTD, k_BKSD, v_BKSD, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
    refuse_kept_attention("no kernel has score soft-capping here, or sinks under a mask")
    # Else by hand: each key head for its query heads, scores and softmax in float32 or wider.
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k_BKSD, v_BKSD))
    wide = torch.promote_types(torch.float32, q_BHTD.dtype)
    scores = (q_BHTD @ k.transpose(2, 3)).to(wide) * scale
    if softcap is not None:
        # Soft capping: scores stay between -softcap and softcap, almost as they were near zero.
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks_H is not None:
        # A sink is one more column of scores, whose weight is thrown away after the softmax.
        sinks = sinks_H.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    weights = F.dropout(weights, dropout) if dropout > 0.0 else weights
    return weights.to(v.dtype) @ v
