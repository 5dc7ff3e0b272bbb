"""Limits of a pack, sizes of samples, and FLOPs of training on them.

Cost models are linear in drivers that add up over segments and grids, so a sample's FLOPs are the sum over its parts:
each distinct segment length and grid is counted once by the model's cost model, then looked up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.count.cost_model import CostModel
from headway.count.workload import Workload
from headway.errors import ConfigError
from headway.words import Argument

Floats = NDArray[np.float64]

MOST = 2**26
"""Tokens or patches of a pack at most; the search for room in packs takes 16 bytes of memory for each."""


class Size(NamedTuple):
    """Tokens and patches of a sample, or of the room left in a pack.

    Attributes:
        tokens: length [tokens].
        patches: vision patches of its images and videos [patches].
    """

    tokens: int
    patches: int = 0


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a pack.

    Attributes:
        tokens: the most tokens [tokens].
        patches: the most vision patches [patches]; None sets no limit.
        items: the most samples; None sets no limit.

    Raises:
        ConfigError: a budget below 1 token, below 0 patches or below 1 sample, or more than fits any memory.
    """

    tokens: int
    patches: int | None = None
    items: int | None = None

    def __post_init__(self) -> None:
        if (
            self.tokens < 1
            or (self.patches is not None and self.patches < 0)
            or (self.items is not None and self.items < 1)
        ):
            raise ConfigError(
                f"A pack's budget is {self.tokens} tokens, {self.patches} patches and {self.items} samples. A budget "
                "has at least 1 token, 0 or more patches, and 1 or more samples. No number means no limit."
            )

        for unit, number in (("tokens", self.tokens), ("patches", self.patches or 0)):
            if number > MOST:
                raise ConfigError(
                    f"A pack's budget is {number:,} {unit}, but at most {MOST:,} of each can be planned. Lower it."
                )

    def holds(self, size: Size) -> bool:
        """Tell whether one sample of this size fits an empty pack."""
        return size.tokens <= self.tokens and (self.patches is None or size.patches <= self.patches)


def over_budget(what: str, size: Size, budget: Budget) -> str:
    """The sentence that tells a person that a sample exceeds a pack, with the way out."""
    limit = f"{budget.tokens} tokens" + (f" and {budget.patches} patches" if budget.patches is not None else "")
    return (
        f"{what} has {size.tokens} tokens and {size.patches} vision patches, more than a pack's budget of {limit}. "
        f"Raise the budget, shrink the images, or choose what to do with over-long samples ({Argument('overlong')}): "
        '"drop" leaves them out, "truncate" cuts their text, "split" makes several samples of a long text. Headway '
        "counts and reports all of these."
    )


def segments_within(segments: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Lengths of the segments of a sample that is cut to tokens start .. stop - 1; none of one that has none.

    >>> segments_within([4, 6, 5], 2, 11)
    (2, 6, 1)
    """
    ends = list(accumulate(segments))
    cut = (min(end, stop) - max(end - length, start) for length, end in zip(segments, ends, strict=True))
    return tuple(length for length in cut if length > 0)


def segment_costs(cost_model: CostModel, lengths: NDArray[Any]) -> Floats:
    """Count training on text segments, forward and backward.

    Args:
        cost_model: the trained model's costs.
        lengths: length of each segment [tokens], shape (N,), each >= 1.

    Returns:
        FLOPs of each segment, shape (N,).
    """
    table = np.zeros(int(lengths.max(initial=0)) + 1)
    for length in np.flatnonzero(np.bincount(lengths)).tolist():
        table[length] = cost_model.count(Workload([length])).total
    costs: Floats = table[lengths]
    return costs


def branch_costs(cost_model: CostModel, lengths: NDArray[Any], firsts: NDArray[Any]) -> Floats:
    """Count training on prompts and on the answers that share them, forward and backward.

    Args:
        cost_model: the trained model's costs, under splits.
        lengths: of each prompt, and behind it of its answers [tokens], shape (N,), each >= 1.
        firsts: which of them are prompts, shape (P,).

    Returns:
        FLOPs of each, shape (N,); those of an answer hold what it sees of its prompt.
    """
    # A pair of query and key costs what a segment of two tokens has more than two of one.
    pair = cost_model.count(Workload([2])).total - 2 * cost_model.count(Workload([1])).total
    visible = np.repeat(lengths[firsts].astype(np.float64), np.diff([*firsts, len(lengths)]))
    visible[firsts] = 0.0
    costs: Floats = segment_costs(cost_model, lengths) + pair * visible * lengths
    return costs


def grid_costs(cost_model: CostModel, grids: NDArray[Any], kind: str = "images") -> Floats:
    """Count training on images, videos or sounds, their tokens in the text left out.

    Args:
        cost_model: the trained model's costs.
        grids: (t, h, w) of each image or video [patches], shape (M, 3); of sounds the lengths [feature frames], (M,).
        kind: the kind of media, by its name in `headway.count.modalities`.

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
    flops = [cost_model.count(Workload([1], **medium)).total - text for medium in media]
    return np.array(flops, dtype=np.float64)[which.reshape(-1)]


def patch_costs(cost_model: CostModel, patches: NDArray[Any]) -> Floats:
    """Count training on samples of which only the number of patches is known.

    The patches are taken as one picture, as square as whole merged squares allow, and its cost in proportion to the
    patches. Attention among patches grows faster than their number, so several small pictures cost less than this.

    Args:
        cost_model: the trained model's costs.
        patches: vision patches of each sample [patches], shape (N,), each >= 0.

    Returns:
        FLOPs of each sample's vision, shape (N,).
    """
    side = math.isqrt(cost_model.merge_group)
    distinct, which = np.unique(patches, return_inverse=True)
    flops = np.zeros(len(distinct))
    nonzero = np.flatnonzero(distinct)
    grids = np.array([square_grid(int(number), side) for number in distinct[nonzero]], dtype=np.int64).reshape(-1, 3)
    flops[nonzero] = grid_costs(cost_model, grids) * distinct[nonzero] / grids.prod(axis=1)
    return flops[which.reshape(-1)]


def square_grid(patches: int, side: int) -> tuple[int, int, int]:
    """The most nearly square picture of at least so many patches, made of whole squares of side x side patches.

    >>> square_grid(1000, side=2)
    (1, 32, 32)
    """
    squares = -(-patches // side**2)
    high = max(1, round(math.sqrt(squares)))
    return 1, high * side, -(-squares // high) * side
