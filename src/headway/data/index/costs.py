"""FLOPs of each row of an index: distinct lengths, grids and clips are counted once and looked up."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.count import Workload
from headway.errors import CostModelError

if TYPE_CHECKING:
    from headway.count import CostModel
    from headway.data.index.length_index import LengthIndex, Ragged

Ints = np.ndarray[Any, np.dtype[Any]]


def row_costs(index: "LengthIndex", cost_model: "CostModel") -> Ints:
    """Count the useful FLOPs of training on each row, forward and backward.

    Args:
        index: lengths of the rows.
        cost_model: of the model that is trained.

    Returns:
        FLOPs, float64, shape (N,); 0 in rows that cannot be used.

    Raises:
        WorkloadError: the model has no tower for what the rows hold.
        CostModelError: the model's cost does not add up over text and media.
    """

    def flops(**content: Any) -> int:
        return cost_model.count(Workload(**content)).total

    base = flops(segments=[1])
    costs = np.zeros(int(index.tokens.max(initial=0)) + 1)
    for length in np.flatnonzero(np.bincount(index.tokens)).tolist():
        costs[length] = flops(segments=[length]) if length else 0
    rows = costs[index.tokens]
    for kind, ragged in (
        ("images", index.image_grids),
        ("videos", index.video_grids),
        ("audio", index.audio_lengths),
    ):
        rows += _added(ragged, lambda value, kind=kind: flops(segments=[1], **{kind: [value]}) - base)  # type: ignore[misc]
    _check_additive(index, rows, flops)
    return rows


def _added(ragged: "Ragged", flops_of: Callable[[Any], int]) -> Ints | float:
    """Sum the cost of each row's values, each distinct value counted once."""
    if not len(ragged.values):
        return 0.0
    distinct, place = np.unique(ragged.values, axis=0, return_inverse=True)
    flops = np.array([flops_of(value) for value in distinct.tolist()], dtype=np.float64)
    return np.bincount(ragged.rows, weights=flops[place.reshape(-1)], minlength=len(ragged))


def _check_additive(index: "LengthIndex", rows: Ints, flops: Callable[..., int]) -> None:
    """Count the row with the most patches as a whole, too: what text reads of media elsewhere would not add up."""
    if not index.patches.any():
        return
    row = int(index.patches.argmax())
    whole = flops(
        segments=[int(index.tokens[row])],
        images=index.image_grids[row],
        videos=index.video_grids[row],
        audio=index.audio_lengths[row],
    )
    if not np.isclose(rows[row], whole, rtol=1e-9):
        raise CostModelError(
            f"The cost of row {row} is {whole} FLOPs, but its text and media alone make {rows[row]:.0f}: this model's "
            "cost does not add up over them, so rows cannot be costed one by one. Plan by tokens instead."
        )
