"""Lengths of segments, read off a batch: masks of padding or of segment numbers, positions."""

from typing import Any

import numpy as np

from headway.count.integers import Ints, IntsLike, as_ints
from headway.errors import WorkloadError


def segments_of_mask(attention_mask: IntsLike) -> tuple[Ints, int]:
    """Read lengths of segments [tokens], and the slots, off a mask; see `Workload.from_attention_mask`."""
    mask = as_ints(attention_mask, "attention_mask", booleans=True)
    if mask.ndim != 2:
        raise WorkloadError(f"attention_mask must be (batch, slots), got shape {mask.shape}.")
    bits = np.bitwise_or.reduce(mask, axis=None)  # negative if any number is, at most 1 if all are: one pass
    if bits < 0:
        raise WorkloadError(f"attention_mask must hold 0, 1, 2, ..., got {int(mask.min())}.")
    lengths: Any = []
    if bits <= 1:  # plain padding; a row without a token is no segment
        lengths = mask.sum(axis=1)
        lengths = lengths[lengths > 0]
    else:
        for row in mask:
            lengths += np.unique(row[row > 0], return_counts=True)[1].tolist()
    return np.asarray(lengths, dtype=np.int64), mask.size


def segments_of_positions(position_ids: IntsLike, attention_mask: IntsLike | None) -> tuple[Ints, int]:
    """Read lengths of segments [tokens], and the slots, off positions; see `Workload.from_position_ids`."""
    # The first of four planes holds the text's positions; three planes are M-RoPE's own.
    positions = as_ints(position_ids, "position_ids")
    if positions.ndim == 1:
        positions = positions[None]
    if positions.ndim == 3 and positions.shape[0] == 4:
        positions = positions[0]
    # a segment starts where its positions do not go on from the slot before, and in each row's first slot
    if positions.ndim == 3 and positions.shape[0] == 3:
        starts = (positions == 0).all(axis=0)
    elif positions.ndim == 2:
        starts = np.empty(positions.shape, dtype=bool)
        np.not_equal(positions[:, 1:], positions[:, :-1] + 1, out=starts[:, 1:])
    else:
        raise WorkloadError(
            f"position_ids must be (slots,), (batch, slots), (3, batch, slots) or (4, batch, slots), "
            f"got shape {np.shape(position_ids)}."
        )
    starts[:, :1] = True
    # the slots from one start to the next; under a mask, those that are no padding
    if attention_mask is None:
        lengths = np.diff(np.flatnonzero(starts), append=starts.size)
        return lengths, starts.size
    keep = as_ints(attention_mask, "attention_mask", booleans=True) > 0
    if keep.shape != starts.shape:
        raise WorkloadError(f"attention_mask is {keep.shape}, position_ids are {starts.shape}: they must agree.")
    segment_of_slot = starts.reshape(-1).cumsum() - 1
    # a segment of padding alone is none
    lengths = np.bincount(segment_of_slot[keep.reshape(-1)]) if keep.any() else np.zeros(0, dtype=np.int64)
    return lengths[lengths > 0], starts.size
