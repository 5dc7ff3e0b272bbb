"""FLOPs of each row of an index: distinct lengths, grids and clips are counted once and looked up."""

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headway.count import Workload
from headway.data.plan.costs import grid_costs, segment_costs
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
    rows = np.zeros(len(index))
    rows[index.ok] = segment_costs(cost_model, index.tokens[index.ok])
    parts: list[tuple[Literal["images", "videos", "audio"], Ragged]] = [
        ("images", index.image_grids),
        ("videos", index.video_grids),
        ("audio", index.audio_lengths),
    ]
    for kind, ragged in parts:
        if len(ragged.values):
            rows += np.bincount(ragged.rows, grid_costs(cost_model, ragged.values, kind), minlength=len(index))
    _check_additive(index, rows, cost_model)
    return rows


def _check_additive(index: "LengthIndex", rows: Ints, cost_model: "CostModel") -> None:
    """Count the row with the most patches as a whole, too: what text reads of media elsewhere would not add up."""
    if not index.patches.any():
        return
    row = int(index.patches.argmax())
    whole = Workload(
        [int(index.tokens[row])],
        images=index.image_grids[row],
        videos=index.video_grids[row],
        audio=index.audio_lengths[row],
    )
    flops = cost_model.count(whole).total
    if not np.isclose(rows[row], flops, rtol=1e-9):
        raise CostModelError(
            f"The cost of row {row} is {flops} FLOPs, but its text and media alone make {rows[row]:.0f}: this model's "
            "cost does not add up over them, so rows cannot be costed one by one. Plan by tokens instead."
        )
