"""Drivers: the additive quantities of a workload that operations' costs are proportional to.

A driver is written as a name and whole-number parameters joined by colons: `tokens`, `patches/4` (patches after merging
four into one), `pairs:causal`, `pairs:sliding:4096`, `patch_pairs:frame`, `patch_pairs:window:8`.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import numpy as np

from headway.count import masks
from headway.errors import CostModelError, WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headway.count.integers import Ints
    from headway.count.workload import Workload


def _merged_patches(workload: Workload, group: int) -> int:
    """Count patches after merging squares of `group` of them into one; each frame must be made of whole squares."""
    side = math.isqrt(group)
    uneven = (workload.grids[:, 1:] % side).any(axis=1)
    if uneven.any():
        bad = workload.grids[int(np.argmax(uneven))]
        raise WorkloadError(
            f"The grid {'x'.join(map(str, bad.tolist()))} cannot be merged by this model, which makes 1 token of "
            f"{side} x {side} patches: h and w must be multiples of {side}, for example 1x{8 * side}x{6 * side}."
        )
    return workload.patches // group


def _frame_pairs(workload: Workload) -> int:
    """Count patch pairs of full attention inside each frame: t (h w)^2."""
    t, h, w = workload.grids.T
    return int((t * (h * w) ** 2).sum())


def _grid_pairs(workload: Workload) -> int:
    """Count patch pairs of full attention over all frames of a grid: (t h w)^2."""
    return int((workload.grids.prod(axis=1) ** 2).sum())


def _window_pairs(workload: Workload, side: int) -> int:
    """Count patch pairs inside square windows of `side` patches, cut from each frame's top left corner.

    Source: a window of r x c patches has (r c)^2 = r^2 c^2 pairs, so the sum over windows factors into rows and
    columns.
    """

    def squares(extent: Ints) -> Ints:
        return extent // side * side**2 + (extent % side) ** 2

    t, h, w = workload.grids.T
    return int((t * squares(h) * squares(w)).sum())


def _fixed_frames(workload: Workload, height: int, width: int) -> int:
    """Count the frames of a tower that takes one size only."""
    other = (workload.grids[:, 1:] != (height, width)).any(axis=1)
    if other.any():
        bad = workload.grids[int(np.argmax(other))]
        raise WorkloadError(
            f"The grid {'x'.join(map(str, bad.tolist()))} does not fit this model, whose images and tiles are resized "
            f"to {height} x {width} patches each: give 1x{height}x{width}, with *N for N images or tiles."
        )
    return int(workload.grids[:, 0].sum())


def _fixed_clips(workload: Workload, frames: int) -> int:
    """Count the clips of a tower that takes one length only."""
    other = workload.audio != frames
    if other.any():
        raise WorkloadError(
            f"An audio clip of {int(workload.audio[np.argmax(other)])} frames does not fit this model, which pads "
            f"every clip to {frames} feature frames and computes them all: give {frames}, with *N for N clips."
        )
    return len(workload.audio)


def _after_past(pairs: Callable[..., int], workload: Workload, *parameters: int) -> int:
    """Count a causal mask's pairs whose queries are the segments' tokens and whose keys reach back into the past.

    Source: causal masks are those of the whole run cut at the last query, so the new queries' pairs are the pairs of
    past and segment together less those of the past.
    """
    if not workload.past.size:
        return pairs(workload.segments, *parameters)
    before = workload.past[workload.past > 0]
    return pairs(workload.past + workload.segments, *parameters) - pairs(before, *parameters)


def _full_pairs(workload: Workload) -> int:
    """Count pairs of bidirectional attention, whose earlier tokens would see later ones and cannot be cached."""
    if workload.past.size:
        raise WorkloadError(
            "This model attends in both directions, so its earlier tokens cannot be cached and a segment has no past. "
            "Give whole segments and leave the past out."
        )
    return masks.full_pairs(workload.segments)


def _read(workload: Workload) -> Ints:
    """Return the sources that an encoder reads; those of a segment with a past were read when it began."""
    return workload.sources[workload.past == 0] if workload.past.size else workload.sources


def _groups(lengths: Ints, size: int) -> int:
    """Count groups of `size`, the last one of each length perhaps partly filled."""
    return int((-(-lengths // size)).sum())


# name, with its separator before a parameter -> (number of parameters, evaluation)
_DRIVERS: dict[str, tuple[int, Callable[..., int]]] = {
    "tokens": (0, lambda w: w.tokens),
    "segments": (0, lambda w: w.num_segments),
    "packs": (0, lambda w: w.num_packs),
    "patches": (0, lambda w: w.patches),
    "patches/": (1, _merged_patches),
    "grids": (0, lambda w: len(w.grids)),
    "frames": (0, lambda w: int(w.grids[:, 0].sum())),
    "frames:": (2, _fixed_frames),
    "pairs:full": (0, _full_pairs),
    "pairs:causal": (0, lambda w: _after_past(masks.causal_pairs, w)),
    "pairs:sliding:": (1, lambda w, window: _after_past(masks.sliding_pairs, w, window)),
    # each query keeps k of the keys it may see
    "pairs:topk:": (1, lambda w, k: _after_past(masks.sliding_pairs, w, k)),
    "pairs:chunked:": (1, lambda w, chunk: _after_past(masks.chunked_pairs, w, chunk)),
    "pairs:cross": (0, lambda w: masks.cross_pairs(w.segments, w.sources) if w.sources.size else 0),
    "patch_pairs:frame": (0, _frame_pairs),
    "patch_pairs:grid": (0, _grid_pairs),
    "patch_pairs:window:": (1, _window_pairs),
    "sources": (0, lambda w: int(_read(w).sum())),
    "sources/": (1, lambda w, size: _groups(_read(w), size)),
    "source_pairs:full": (0, lambda w: masks.full_pairs(_read(w)[_read(w) > 0])),
    "audio": (0, lambda w: int(w.audio.sum())),
    "audio/": (1, lambda w, size: _groups(w.audio, size)),
    "audio_pairs:full": (0, lambda w: masks.full_pairs(w.audio)),
    "clips": (0, lambda w: len(w.audio)),
    "clips:": (1, _fixed_clips),
}
_TOWERS = {
    "vision": ("patches", "patch_pairs", "grids", "frames"),
    "audio": ("audio", "clips"),
    "source": ("source", "pairs:cross"),
}
_PARAMETERS = re.compile(r"(.*?)((?<=[:/])\d+(?::\d+)*)?")


def parse(driver: str) -> Callable[[Workload], int]:
    """Turn a driver's text into the function that evaluates it on a workload.

    Raises:
        CostModelError: no driver has this name, or its parameters are wrong.

    >>> from headway.count.workload import Workload
    >>> parse("pairs:sliding:2")(Workload([3]))
    5
    >>> parse("patches/4")(Workload([9], images=[(1, 4, 6)]))
    6
    """
    name, digits = _PARAMETERS.fullmatch(driver).groups()  # type: ignore[union-attr]  # anything matches
    parameters = [int(n) for n in digits.split(":")] if digits else []
    number, function = _DRIVERS.get(name, (-1, None))
    if function is None or number != len(parameters) or 0 in parameters:
        raise CostModelError(
            f"unknown driver {driver!r}; known are {', '.join(_DRIVERS)} (a number follows each final / or :)."
        )
    return lambda workload: function(workload, *parameters)


def tower(driver: str) -> str:
    """Say whose work a driver counts: `vision` (patches), `audio` (frames), `source` (an encoder's) or `language`."""
    return next((name for name, starts in _TOWERS.items() if driver.startswith(starts)), "language")


def is_vision(driver: str) -> bool:
    """Say whether a driver counts work on patches rather than on tokens."""
    return tower(driver) == "vision"
