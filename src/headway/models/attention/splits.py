"""Attention under splits: runs of a segment that see themselves causally or in full, and are seen by later ones or not.

Made once per pack, on the CPU; the same object serves every layer. On a CPU, segments of the same runs are one batch,
and each run is a few fused kernel calls on the keys that it sees; on CUDA it is FlexAttention with a block mask, whose
changing parts are tensors, so that one compiled kernel serves all packs of a length. Packs are padded to one of a few
lengths for it, by slots that see themselves alone.

Tensor letters as in `attention`: H query heads, K key/value heads, T slots, M segments of equal runs, L their length, D
head size; P slots of a padded pack, Q blocks of its queries.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from headway.count import Workload, splits
from headway.errors import ConfigError, WorkloadError
from headway.models.attention.segments import group_by_group

_BLOCK = 128  # slots along the side of a block of FlexAttention's mask
_ROWS = 256  # queries of a causal run per kernel call where it has a prefix: what their written mask may take

Runs = tuple[tuple[int, int], ...]
"""(mode, tokens) of each run of a segment, modes as in `headway.count.splits`."""


@dataclass(frozen=True, eq=False, repr=False)
class SplitMask:
    """The mask of a pack.

    Attributes:
        groups: the segments by their runs, each with its slots, shape (M L,); padding is a segment of its own.
        place_4T: number of the segment and of the run of each slot, and whether the run sees itself causally and
            whether later ones see it, int32.
        padded_4P: the same of the padded pack.
        blocks: which blocks of keys each block of queries sees in part and in full, each as a number, shape (Q,), and
            indices, shape (Q, Q); int32.
        order: where each slot lies among the rows that attention is given, and the slot of each row, shape (T,) each;
            empty where rows are the slots in order.
    """

    groups: tuple[tuple[Runs, torch.Tensor], ...]
    place_4T: torch.Tensor
    padded_4P: torch.Tensor
    blocks: tuple[torch.Tensor, ...]
    order: tuple[torch.Tensor, ...] = ()
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, workload: Workload) -> "SplitMask":
        """Make the mask of a pack; its padding is a segment of its own, at the end.

        Raises:
            WorkloadError: the workload has several packs.
        """
        if workload.num_packs > 1:
            raise WorkloadError(
                f"a mask covers one pack, but the workload has {workload.num_packs} packs. Make one mask for each pack."
            )
        runs = workload.splits if len(workload.splits) else splits.all_causal(workload.segments)
        lengths = [*workload.segments.tolist()]
        if padding := workload.slots - workload.tokens:
            lengths.append(padding)
            runs = np.concatenate([runs, [[splits.CAUSAL, padding]]])
        if not lengths:
            raise WorkloadError("the mask would be empty, because the workload has neither tokens nor padding.")
        ends, first, start = runs[:, 1].cumsum(), 0, 0
        slots: dict[Runs, list[torch.Tensor]] = {}
        for length in lengths:
            last = int(np.searchsorted(ends, start + length)) + 1
            own: Runs = tuple((int(mode), int(tokens)) for mode, tokens in runs[first:last])
            slots.setdefault(own, []).append(torch.arange(start, start + length))
            first, start = last, start + length
        segment = np.repeat(np.arange(len(lengths)), lengths)
        columns = (np.arange(len(runs)), splits.IS_CAUSAL[runs[:, 0]], splits.IS_VISIBLE[runs[:, 0]])
        places = np.stack([segment, *(np.repeat(column, runs[:, 1]) for column in columns)]).astype(np.int32)
        groups = tuple((own, torch.cat(parts)) for own, parts in slots.items())
        # Each slot of the padding is a run of its own, which nobody else sees, of a segment that is no pack's.
        more = _padded(start) - start
        ones, number = np.ones(more, np.int32), np.arange(more, dtype=np.int32)
        padded = np.concatenate([places, np.stack([-ones, number, ones, 0 * ones])], axis=1)
        return cls(groups, torch.from_numpy(places), torch.from_numpy(padded), _blocks(lengths, runs, more))

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "SplitMask":
        """The same mask with its tensors changed: moved, or pinned."""
        groups = tuple((runs, change(slots)) for runs, slots in self.groups)
        blocks, order = tuple(map(change, self.blocks)), tuple(map(change, self.order))
        places = {"place_4T": change(self.place_4T), "padded_4P": change(self.padded_4P)}
        return replace(self, groups=groups, blocks=blocks, order=order, _cache={}, **places)

    def of_rows(self, slots_T: torch.Tensor) -> "SplitMask":
        """The same mask for rows that are the slots in another order, such as that of the processes that hold them."""
        return replace(self, order=(slots_T.argsort(), slots_T))

    def dense(self) -> torch.Tensor:
        """Mask of the keys that each query sees, shape (1, 1, T, T)."""
        slot = torch.arange(self.place_4T.shape[1], device=self.place_4T.device)
        return _rule(self.place_4T)(None, None, slot[:, None], slot)[None, None]

    def block_mask(self) -> Any:
        """The mask as FlexAttention takes it; made at the first call."""
        from torch.nn.attention.flex_attention import BlockMask

        if "block_mask" not in self._cache:
            slots = self.padded_4P.shape[1]
            part, part_indices, full, full_indices = (block[None, None] for block in self.blocks)
            self._cache["block_mask"] = BlockMask.from_kv_blocks(
                part, part_indices, full, full_indices, _BLOCK, _rule(self.padded_4P), seq_lengths=(slots, slots)
            )
        return self._cache["block_mask"]


def _padded(slots: int) -> int:
    """Round up to one of four lengths between a power of two and the next, and to whole blocks.

    >>> [_padded(slots) for slots in (100, 1100, 10240, 31000)]
    [128, 1280, 10240, 32768]
    """
    step = max(_BLOCK, 1 << slots.bit_length() >> 3)
    return -(-slots // step) * step


def _rule(place_4T: torch.Tensor) -> Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Say whether a query sees a key, as FlexAttention asks: by batch row, head and their slots."""

    def sees(_row: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        segment_T, run_T, causal_T, visible_T = place_4T
        own = (run_T[query] == run_T[key]) & ((causal_T[query] == 0) | (key <= query))
        earlier = (run_T[query] > run_T[key]) & (visible_T[key] != 0)
        visible: torch.Tensor = (segment_T[query] == segment_T[key]) & (own | earlier)
        return visible

    return sees


def split_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    mask: SplitMask,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attend under splits.

    Args:
        q_THD: queries.
        k_TKD: keys; K divides H.
        v_TKD: values.
        mask: of the pack.
        scale: factor on the scores.
        dropout: probability of dropping an attention weight; CPU only.

    Returns:
        Attended values, shape (T, H, Dv).

    Raises:
        WorkloadError: the mask is of another number of slots.
        ConfigError: dropout on CUDA.
    """
    if len(q_THD) != mask.place_4T.shape[1]:
        raise WorkloadError(f"the mask has {mask.place_4T.shape[1]} slots, but attention has {len(q_THD)}.")
    if q_THD.shape[1] == 0:  # more processes than heads: this one has none to attend with
        return q_THD.reshape(len(q_THD), 0, v_TKD.shape[2])
    if not mask.order:
        return _in_order(q_THD, k_TKD, v_TKD, mask, scale, dropout)
    rows_T, slots_T = mask.order
    q_THD, k_TKD, v_TKD = (x.index_select(0, rows_T) for x in (q_THD, k_TKD, v_TKD))
    return _in_order(q_THD, k_TKD, v_TKD, mask, scale, dropout).index_select(0, slots_T)


def _in_order(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, mask: SplitMask, scale: float, dropout: float
) -> torch.Tensor:
    if _runs_flex(q_THD):
        if dropout > 0.0:
            raise ConfigError(
                f"Attention under splits has no dropout on CUDA, but the model asks for {dropout}. Set "
                "model.dropout: off."
            )
        slots, more = len(q_THD), mask.padded_4P.shape[1] - len(q_THD)
        q, k, v = q_THD, k_TKD, v_TKD
        if torch.compiler.is_compiling() or more:  # a compiled block has one code for packs with and without padding
            q, k, v = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (q, k, v))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out: torch.Tensor = _flex()(q, k, v, block_mask=mask.block_mask(), scale=scale, enable_gqa=grouped)
        return out[0].transpose(0, 1)[:slots]
    attended: torch.Tensor = _by_segment(q_THD, k_TKD, v_TKD, mask, scale, dropout)
    return attended


def _runs_flex(x: torch.Tensor) -> bool:
    """Tell whether FlexAttention computes it: on a CPU it has no backward."""
    return x.is_cuda


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped; runs are read on the host
def _by_segment(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, mask: SplitMask, scale: float, dropout: float
) -> torch.Tensor:
    lengths = [(slots, sum(tokens for _, tokens in runs)) for runs, slots in mask.groups]

    def attend(number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cat([*_by_run(q, k, v, mask.groups[number][0], scale, dropout)], dim=2)

    return group_by_group((q_THD, k_TKD, v_TKD), lengths, attend)


def _by_run(
    q_MHLD: torch.Tensor, k_MKLD: torch.Tensor, v_MKLD: torch.Tensor, runs: Runs, scale: float, dropout: float
) -> Iterator[torch.Tensor]:
    grouped = q_MHLD.shape[1] != k_MKLD.shape[1]

    def attend(rows: slice, before: list[slice], own: slice, **how: Any) -> torch.Tensor:
        k, v = (torch.cat([x[:, :, part] for part in (*before, own)], dim=2) for x in (k_MKLD, v_MKLD))
        query = q_MHLD[:, :, rows]
        return F.scaled_dot_product_attention(query, k, v, dropout_p=dropout, scale=scale, enable_gqa=grouped, **how)

    start, before = 0, list[slice]()  # the visible runs behind
    for mode, tokens in runs:
        run = slice(start, start + tokens)
        if not splits.IS_CAUSAL[mode]:
            yield attend(run, before, run)
        elif not before:
            yield attend(run, before, run, is_causal=True)
        else:
            visible = sum(part.stop - part.start for part in before)
            for first in range(start, run.stop, _ROWS):
                rows = slice(first, min(first + _ROWS, run.stop))
                allowed = torch.ones(rows.stop - first, visible + rows.stop - start, dtype=torch.bool)
                yield attend(rows, before, slice(start, rows.stop), attn_mask=allowed.tril(visible + first - start))
        if splits.IS_VISIBLE[mode]:
            before.append(run)
        start = run.stop


def _flex() -> Any:
    """FlexAttention, compiled by itself unless it is a part of what is compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, dynamic=False)


def _blocks(lengths: list[int], runs: NDArray[np.int64], more: int) -> tuple[torch.Tensor, ...]:
    """Tell the blocks of keys that each block of queries sees in part or in full, from the runs and padding alone."""
    starts = np.arange(0, sum(lengths) + more, _BLOCK)
    pairs = np.zeros((len(starts), len(starts)), np.int64)  # pairs of each block of queries and block of keys

    def overlap(first: int, end: int) -> NDArray[np.int64]:
        shared: NDArray[np.int64] = np.clip(np.minimum(starts + _BLOCK, end) - np.maximum(starts, first), 0, None)
        return shared

    # Runs in order; `visible` holds, by block, the keys of the segment's earlier runs that later ones see.
    ends, start, number = np.cumsum(lengths), 0, 0
    visible = np.zeros(len(starts), np.int64)
    for mode, tokens in runs.tolist():
        own, queries = overlap(start, start + tokens), np.arange(start, start + tokens)
        pairs += np.outer(own, visible)
        # Within a causal run, query q sees q + 1 - first of its own keys: counted exactly for each block.
        if splits.IS_CAUSAL[mode]:
            causal_pairs = np.clip(queries[:, None] + 1 - np.maximum(starts, start), 0, own)
            blocks, firsts = np.unique(queries // _BLOCK, return_index=True)
            pairs[blocks] += np.add.reduceat(causal_pairs, firsts)
        else:
            pairs += np.outer(own, own)
        # Noise and branches are seen by nobody but themselves.
        visible = visible + own * int(splits.IS_VISIBLE[mode])
        start += tokens
        # A new segment sees nothing of the last one.
        if start == ends[number]:
            visible, number = np.zeros_like(visible), number + 1
    pairs += np.diag(overlap(start, start + more))  # slots of the padding see themselves
    # A block in which all pairs are seen is computed without the rule.
    full = pairs == _BLOCK * _BLOCK
    return (*_listed((pairs > 0) & ~full), *_listed(full))


def _listed(chosen: NDArray[np.bool_]) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of chosen blocks in each row, and their indices first."""
    order = np.argsort(~chosen, axis=1, kind="stable")
    return torch.from_numpy(chosen.sum(1).astype(np.int32)), torch.from_numpy(order.astype(np.int32))
