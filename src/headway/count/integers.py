"""Read lengths, grids, boundaries, masks and positions: whole numbers from lists, arrays and CPU tensors, checked."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway.errors import WorkloadError

Ints: TypeAlias = NDArray[np.int64]
IntsLike: TypeAlias = Any  # a list, a numpy array or a CPU tensor of integers


NONE = np.zeros(0, dtype=np.int64)
NO_GRIDS = np.zeros((0, 3), dtype=np.int64)
for _empty in (NONE, NO_GRIDS):
    _empty.flags.writeable = False  # every workload without images holds the same


def as_ints(values: IntsLike, what: str, *, booleans: bool = False) -> Ints:
    """Read integers from a list, an array or a CPU tensor; booleans as 0 and 1 where `booleans` allows them.

    Raises:
        WorkloadError: the values are not whole numbers, or lie on an accelerator, where reading them would make the
            training loop wait for the device.
    """
    if isinstance(values, tuple) and not values:
        return NONE
    if getattr(getattr(values, "device", None), "type", "cpu") != "cpu":
        raise WorkloadError(
            f"{what} lies on {values.device}, and reading it from there would stall the training loop. Pass the copy "
            "that the collator made on the CPU."
        )
    if hasattr(values, "detach"):
        values = values.detach().numpy()
    array = np.asarray(values)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in ("iub" if booleans else "iu"):
        raise WorkloadError(f"{what} must be whole numbers, got {array.dtype} values such as {array.flat[0]!r}.")
    return array.astype(np.int64, copy=False)


def lengths_of(values: IntsLike, what: str, rule: str, least: int = 1) -> Ints:
    """Check an (N,) array of lengths."""
    lengths = as_ints(values, what)
    lengths = lengths if lengths.ndim == 1 else lengths.reshape(-1)
    if lengths.size and lengths.min() < least:
        bad = int(np.argmin(lengths))
        raise WorkloadError(f"{what}[{bad}] is {int(lengths[bad])}: {rule}.")
    return lengths


def grids_of(values: IntsLike, what: str) -> Ints:
    """Check an (M, 3) array of t, h, w."""
    grids = as_ints(values, what)
    if grids.size == 0:
        return NO_GRIDS
    if grids.ndim != 2 or grids.shape[1] != 3:
        raise WorkloadError(f"{what} must be a list of grids (t, h, w) in patches, got shape {grids.shape}.")
    if grids.min() < 1:
        bad = int(np.argmin(grids.min(axis=1)))
        raise WorkloadError(f"{what}[{bad}] is {tuple(grids[bad].tolist())}: t, h and w must each be at least 1 patch.")
    return grids


def boundaries_of(values: IntsLike, argmin: int | None, what: str) -> Ints:
    """Cut the unused tail off cumulative boundaries and check the rest."""
    bounds = as_ints(values, what).reshape(-1)
    if argmin is not None and int(argmin) > 0:
        bounds = bounds[: int(argmin)]
    if bounds.size and bounds.min() < 0:
        bounds = bounds[: np.argmax(bounds < 0)]
    if bounds.size and bounds[0] != 0:
        raise WorkloadError(f"{what} must start at 0, got {int(bounds[0])}.")
    steps = bounds[1:] - bounds[:-1]
    if steps.size and steps.min() < 0:
        bad = int(np.argmin(steps))
        raise WorkloadError(
            f"{what} must not decrease, got {int(bounds[bad])} followed by {int(bounds[bad + 1])} at index {bad + 1}."
        )
    return bounds


def concatenate_rows(parts: Sequence[Ints], columns: int = 0) -> Ints:
    """Lay arrays of integers, of so many columns each, end to end; an empty one of none."""
    filled = [part for part in parts if part.size]
    if filled:
        return np.concatenate(filled) if len(filled) > 1 else filled[0]
    return np.zeros((0, columns) if columns else 0, dtype=np.int64)


def per_segment(values: IntsLike, what: str, rule: str, segments: Ints) -> Ints:
    """Check an (N,) array of lengths that go with the segments; (0,) where all are 0."""
    lengths = lengths_of(values, what, rule, least=0)
    if not lengths.size:
        return NONE
    if lengths.size != segments.size:
        raise WorkloadError(f"{what} must be one length per segment: got {lengths.size} for {segments.size} segments.")
    return lengths if lengths.any() else NONE


def joined_per_segment(segments: Sequence[Ints], lengths: Sequence[Ints]) -> Ints:
    """Join lengths that are one per segment, with zeros where a part has none; nothing if none has any."""
    if not any(part.size for part in lengths):
        return lengths[0] if lengths else concatenate_rows([])
    return concatenate_rows(
        [part if part.size else np.zeros_like(s) for part, s in zip(lengths, segments, strict=True)]
    )


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
