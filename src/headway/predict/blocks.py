"""Time of elementwise operations and of the host, read off the time of a model's own blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from headway.count import CostModel, Workload
from headway.count.activations import SavedActivations
from headway.predict.held import State
from headway.predict.speeds import Speeds
from headway.predict.step_time import StepTimes, StepWork


@dataclass(frozen=True)
class TimedBlocks:
    """Forward and backward of a model's first blocks on a device.

    Attributes:
        cost_model: of these blocks.
        saved: what autograd saves of them.
        number_bytes: of each number of weights and activations.
        seconds: of the best repetition, which nothing interrupted, by the lengths of a pack's segments [s].
        measured_at: when, in UTC.
        is_cached: whether it was read from the cache.
    """

    cost_model: CostModel
    saved: SavedActivations
    number_bytes: int
    seconds: Mapping[tuple[int, ...], float]
    measured_at: datetime
    is_cached: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "passes": [{"segments": [*segments], "seconds": seconds} for segments, seconds in self.seconds.items()],
            "measured_at": self.measured_at.isoformat(timespec="seconds"),
            "cached": self.is_cached,
        }


def with_blocks(speeds: Speeds, blocks: TimedBlocks) -> Speeds:
    """Take from the time of a model's blocks what elementwise operations take for a byte, and the host for a module.

    Products and attention have rates of their own. Where the host computes itself, the rest is a line over the bytes
    that the passes move, whose slope and height make the least squares of relative errors, neither below 0. Where it
    runs ahead of the device, the longest pass gives the slope, and the shortest what the host takes at most.

    Args:
        speeds: rates of products and attention, measured at the model's sizes.
        blocks: that took their time on the same device.
    """
    times = StepTimes(blocks.cost_model, blocks.saved, speeds)
    state = State(weight_bytes=blocks.number_bytes, compute_bytes=blocks.number_bytes)
    rows = []
    for segments in blocks.seconds:
        pack = Workload(list(segments))
        work = StepWork(blocks.cost_model.count(pack), pack, packs=1, tokens=pack.tokens)
        computed = sum(cases.expected for cases in times.computed_s(work, state).values())
        rows.append((computed, times.moved_bytes(work, state), times.launches(state)))
    took = np.array([*blocks.seconds.values()])
    computed, moved, launches = np.array(rows).T
    if speeds.runs_ahead:
        last = int(moved.argmax())
        per_byte = max(0.0, float((took - computed)[last] / moved[last]))
        per_launch = float(took.min() / launches[0])
    else:
        per_byte, per_launch = _least_squares(np.stack([moved, launches], axis=1) / took[:, None], 1 - computed / took)
    return replace(speeds, elementwise_s=per_byte, host_s=per_launch)


def _least_squares(of: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """Two numbers, none below 0, that solve equations best.

    >>> [round(x, 9) for x in _least_squares(np.array([[1.0, 1.0], [2.0, 1.0]]), np.array([3.0, 5.0]))]
    [2.0, 1.0]
    """
    both = np.linalg.lstsq(of, wanted, rcond=None)[0]
    if both.min() < 0:  # then the best are on an edge
        on_axes = np.maximum(0.0, of.T @ wanted / (of**2).sum(0))
        edges = [np.array([on_axes[0], 0.0]), np.array([0.0, on_axes[1]])]
        both = min(edges, key=lambda edge: float(np.sum((of @ edge - wanted) ** 2)))
    return float(both[0]), float(both[1])
