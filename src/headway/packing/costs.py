"""FLOPs of samples: each distinct segment length and grid is counted once by the model's cost model, then looked up.

Cost models are linear in drivers that add up over segments and grids, so the sum over a sample's parts is its cost.
"""

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.count import Workload

if TYPE_CHECKING:
    from headway.count import CostModel

Floats = NDArray[np.float64]


def segment_costs(cost_model: "CostModel", lengths: NDArray[Any]) -> Floats:
    """Count training on text segments, forward and backward.

    Args:
        cost_model: of the model that is trained.
        lengths: of the segments [tokens], shape (N,), each >= 1.

    Returns:
        FLOPs of each segment, shape (N,).
    """
    table = np.zeros(int(lengths.max(initial=0)) + 1)
    for length in np.flatnonzero(np.bincount(lengths)).tolist():
        table[length] = cost_model.count(Workload([length])).total
    costs: Floats = table[lengths]
    return costs


def grid_costs(
    cost_model: "CostModel", grids: NDArray[Any], kind: Literal["images", "videos", "audio"] = "images"
) -> Floats:
    """Count training on images, videos or sounds, their tokens in the text left out.

    Args:
        cost_model: of the model that is trained.
        grids: (t, h, w) of each image or video [patches], shape (M, 3); of sounds the lengths [feature frames], (M,).
        kind: what they are.

    Returns:
        FLOPs of each, shape (M,).

    Raises:
        WorkloadError: the model has no tower for them, or cannot take such a grid.
    """
    if not len(grids):
        return np.zeros(0)
    sides = grids.reshape(len(grids), -1)
    keys = np.ravel_multi_index(tuple(sides.T), tuple(sides.max(axis=0) + 1))  # numbers sort faster than rows
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    text = cost_model.count(Workload([1])).total
    media: list[dict[str, Any]] = [{kind: [grid]} for grid in grids[first].tolist()]
    flops = [cost_model.count(Workload([1], **one)).total - text for one in media]
    return np.array(flops, dtype=np.float64)[which.reshape(-1)]


def patch_costs(cost_model: "CostModel", patches: NDArray[Any]) -> Floats:
    """Count training on samples of which only the number of patches is known.

    The patches are taken as one picture, as square as whole merged squares allow, and its cost in proportion to the
    patches. Attention among patches grows faster than their number, so several small pictures cost less than this.

    Args:
        cost_model: of the model that is trained.
        patches: vision patches of each sample [patches], shape (N,), each >= 0.

    Returns:
        FLOPs of each sample's vision, shape (N,).
    """
    side = math.isqrt(cost_model.merge_group)
    distinct, which = np.unique(patches, return_inverse=True)
    flops = np.zeros(len(distinct))
    seen = np.flatnonzero(distinct)
    grids = np.array([square_grid(int(number), side) for number in distinct[seen]], dtype=np.int64).reshape(-1, 3)
    flops[seen] = grid_costs(cost_model, grids) * distinct[seen] / grids.prod(axis=1)
    return flops[which.reshape(-1)]


def square_grid(patches: int, side: int) -> tuple[int, int, int]:
    """The most nearly square picture of at least so many patches, made of whole squares of side x side patches.

    >>> square_grid(1000, side=2)
    (1, 32, 32)
    """
    squares = -(-patches // side**2)
    high = max(1, round(math.sqrt(squares)))
    return 1, high * side, -(-squares // high) * side
