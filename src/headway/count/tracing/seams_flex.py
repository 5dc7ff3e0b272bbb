"""The seam for `flex_attention`: its block mask is evaluated over every query and key, on real integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headway.count.tracing.attention import attend, plain_pairs

if TYPE_CHECKING:
    from collections.abc import Callable

    from headway.count.tracing.record import Recorder


def _flex_attention(
    recorder: Recorder,
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: Any = None,
    return_lse: bool = False,
    return_aux: Any = None,
    **_options: Any,
) -> Any:
    """Stand in for `torch.nn.attention.flex_attention.flex_attention`; a score modification hides no pair."""
    if block_mask is None:
        pairs, driver = plain_pairs(query, key, False, None)
    else:
        pairs, driver = recorder.once(block_mask, lambda: _allowed(recorder, block_mask, query, key))
    out = attend(recorder, recorder.module, query, key, value, pairs, driver, masked=block_mask is not None)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(
            lse=out[..., 0].float() if return_aux.lse else None,
            max_scores=out[..., 0].float() if return_aux.max_scores else None,
        )
    return (out, out[..., 0].float()) if return_lse else out


def _allowed(recorder: Recorder, block_mask: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[int, str]:
    """Count the pairs of a block mask: all of a full block, those that the mask function allows of a partial one."""
    from torch.nn.attention.flex_attention import create_mask

    number: torch.Tensor = block_mask.kv_num_blocks
    (batch, heads), queries, keys, sides = number.shape[:2], q.shape[-2], k.shape[-2], block_mask.BLOCK_SIZE
    inside = create_mask(block_mask.mask_mod, batch, heads, queries, keys, device=str(number.device))
    allowed = inside & _listed(number, block_mask.kv_indices, sides, queries, keys)
    if block_mask.full_kv_num_blocks is not None:
        allowed |= _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, sides, queries, keys)
    return recorder.count(allowed, len(q), queries, keys)


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


# module -> function -> what records it
SEAMS: dict[str, dict[str, Callable[..., Any]]] = {
    "torch.nn.attention.flex_attention": {"flex_attention": _flex_attention}
}
