"""Drivers: the additive quantities of a workload that operations' costs are proportional to.

A driver is written as a name and whole-number parameters joined by colons: `tokens`, `patches/4` (patches after merging
four into one), `text_tokens/4` (tokens that stand for no such patches), `pairs:causal`, `pairs:sliding:4096`,
`patch_pairs:frame`, `patch_pairs:window:8`.
A model that denoises latents may join them with a text, its sources: `joint` counts the tokens of both, `pairs:joint`
the pairs of full attention over both, and `patch_pairs:merged:4` the pairs within a frame whose patches were merged.
Where a model denoises latents among its tokens, `latents` counts latent patches, each a token; `noised` those that
are denoised; `understood` the tokens that are no latent patches; `supervised` the tokens whose next token is learnt.
Where images and videos have towers of their own, `image_` or `video_` stands before a driver of patches or frames.
A kind of input that comes in lengths, such as audio, has drivers that begin with its name: `audio` counts frames,
`audio_pairs:full` pairs of a clip's frames, `clips` clips.

What an encoder's convolutions make of its frames follows a slash, since they round: `audio/2` counts ceil(L / 2)
positions of each clip of L frames, `audio/4:7` those of a stride of 4 whose first position needs 7 frames, and
`audio/8:1:100` ceil(p / 8) of each piece p of at most 100 frames. `audio_pairs:full/2`, `pairs:cross/2` and
the like count pairs of such positions.
"""

import math
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np

from headway.count import masks, splits
from headway.count.integers import Ints
from headway.count.modalities import MODALITIES, Modality
from headway.count.workload import Workload
from headway.errors import CostModelError, WorkloadError


def _merged_patches(workload: Workload, group: int) -> int:
    """Count patches after merging squares of `group` of them into one; each frame must be made of whole squares."""
    side = math.isqrt(group)
    uneven = (workload.grids[:, 1:] % side).any(axis=1)
    if uneven.any():
        bad = workload.grids[int(np.argmax(uneven))]
        raise WorkloadError(
            f"The grid {'x'.join(map(str, bad.tolist()))} cannot be merged by this model. The model makes 1 token of "
            f"{side} x {side} patches, so h and w must be multiples of {side}, for example 1x{8 * side}x{6 * side}."
        )
    return workload.patches // group


def _text_tokens(workload: Workload, group: int) -> int:
    """Count tokens that stand for no patches, of which squares of `group` merge into one token."""
    text = workload.tokens - _merged_patches(workload, group)
    if text < 0:
        raise WorkloadError(
            f"{workload.tokens:,} tokens cannot hold the {workload.patches // group:,} tokens that stand for "
            "patches. Give the length of a segment with the tokens of its images and videos."
        )
    return text


def _frame_pairs(workload: Workload) -> int:
    """Count patch pairs of full attention inside each frame: t (h w)^2."""
    t, h, w = workload.grids.T
    return int((t * (h * w) ** 2).sum())


def _merging_pairs(workload: Workload, group: int) -> int:
    """Count pairs of a frame's patches and what squares of `group` of them merge into: t h w (h w / group)."""
    _merged_patches(workload, group)  # refuses what cannot be merged
    return _frame_pairs(workload) // group


def _merged_pairs(workload: Workload, group: int) -> int:
    """Count pairs of full attention inside each frame, between squares of `group` patches: t (h w / group)^2."""
    _merged_patches(workload, group)  # refuses what cannot be merged
    t, h, w = workload.grids.T
    return int((t * (h * w // group) ** 2).sum())


def _joint_pairs(workload: Workload) -> int:
    """Count pairs of full attention over each segment and its source together: (s + n)^2."""
    sources = workload.sources if workload.sources.size else 0
    return int(((workload.segments + sources) ** 2).sum())


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


def _lone_grids(workload: Workload, frames: int, height: int, width: int) -> int:
    """Count the grids of a model that takes one image, of one size, with each segment."""
    other = (workload.grids != (frames, height, width)).any(axis=1)
    size = f"{frames}x{height}x{width}"
    if other.any():
        bad = "x".join(map(str, workload.grids[int(np.argmax(other))].tolist()))
        raise WorkloadError(f"The grid {bad} does not fit this model. Give {size} patches.")
    if len(other) > workload.num_segments:
        raise WorkloadError(
            f"{len(other)} images in {workload.num_segments} segments, but this model takes one image with each "
            f"segment. Give {size} at most once for a segment."
        )
    return len(other)


def _fixed_items(modality: Modality, workload: Workload, units: int) -> int:
    """Count the items of a tower that fills every item up to one length, and computes all of that."""
    lengths = workload.sizes(modality.name)
    longer = lengths > units
    if longer.any():
        raise WorkloadError(
            f"One {modality.noun} of {int(lengths[np.argmax(longer)])} {modality.unit} does not fit this model, "
            f"because the model pads every {modality.noun} to {units} {modality.unit}. Give {units} or fewer, with "
            "*N for N of them."
        )
    return len(lengths)


def _fixed_sources(workload: Workload, frames: int) -> int:
    """Count the sources of an encoder that takes one length only."""
    lengths = _read_sources(workload)
    other = lengths != frames
    if other.any():
        raise WorkloadError(
            f"A source of {int(lengths[np.argmax(other)])} frames does not fit this model, because its encoder pads "
            f"every source to {frames} feature frames. Give {frames} for each segment, with *N for N segments."
        )
    return len(lengths)


def shorten(lengths: Ints, stride: int, first: int = 1, piece: int = 0) -> Ints:
    """Count the positions that strided convolutions make of each length.

    Args:
        lengths: feature frames, shape (N,), each >= 0.
        stride: frames from one position to the next, over all convolutions.
        first: frames that the first position needs, beyond padding; 1 where the last position may be partly filled, 0
            or less where padding alone fills positions.
        piece: frames after which an encoder starts afresh; 0 where it reads each length whole.

    Source: a convolution gives floor((L + 2 padding - kernel) / stride) + 1 positions (torch.nn.Conv1d), and floors of
    floors compose: floor((floor((L - f) / s) + 1 - g) / t) = floor((L - f - s (g - 1)) / (s t)).

    >>> shorten(np.array([7, 8, 0]), 2).tolist()
    [4, 4, 0]
    """
    if piece:
        full = int(shorten(np.array([piece]), stride, first)[0])
        return lengths // piece * full + shorten(lengths % piece, stride, first)
    return np.where(lengths > 0, np.maximum((lengths - first) // stride + 1, 0), 0)


def _shortened(workload: Workload, *steps: int) -> Workload:
    """Replace the length of each source and each clip by the number of positions that convolutions make of it."""
    lengths_rows = [name for name, row in MODALITIES.items() if row.shape == "lengths"]
    media: dict[str, Any] = {name: shorten(workload.sizes(name), *steps) for name in lengths_rows}
    return Workload(
        workload.segments,
        sources=shorten(workload.sources, *steps),
        past=workload.past,
        **{name: lengths[lengths > 0] for name, lengths in media.items()},
    )


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


def _split_pairs(workload: Workload) -> int:
    """Count the pairs of a model that reads splits; a segment without splits is causal."""
    runs = workload.splits if workload.splits.size else splits.all_causal(workload.segments)
    return splits.split_pairs(workload.segments, runs, workload.past)


def _latent_pairs(workload: Workload) -> int:
    """Count latent patch pairs of full attention inside each frame: t (h w)^2."""
    t, h, w = np.concatenate([workload.latents, workload.references]).T
    return int((t * (h * w) ** 2).sum())


def _read_sources(workload: Workload) -> Ints:
    """Return the sources that an encoder reads; those of a segment with a past were read when it began."""
    sources = workload.sources
    return (
        sources[(sources > 0) & (workload.past == 0)] if workload.past.size and sources.size else sources[sources > 0]
    )


_Driver: TypeAlias = tuple[int, Callable[..., int]]  # number of parameters, evaluation

# by the name, with its separator before a parameter
_DRIVERS: dict[str, _Driver] = {
    "tokens": (0, lambda w: w.tokens),
    "text_tokens/": (1, _text_tokens),
    "segments": (0, lambda w: w.num_segments),
    "transitions": (0, lambda w: w.tokens - w.num_segments),  # from a token to the next one of its segment
    "packs": (0, lambda w: w.num_packs),
    "patches": (0, lambda w: w.patches),
    "patches/": (1, _merged_patches),
    "grids": (0, lambda w: len(w.grids)),
    "frames": (0, lambda w: int(w.grids[:, 0].sum())),
    "frames:": (2, _fixed_frames),
    "lone:": (3, _lone_grids),
    "pairs:full": (0, _full_pairs),
    "pairs:causal": (0, lambda w: _after_past(masks.causal_pairs, w)),
    "pairs:sliding:": (1, lambda w, window: _after_past(masks.sliding_pairs, w, window)),
    # each query keeps k of the keys it may see
    "pairs:topk:": (1, lambda w, k: _after_past(masks.sliding_pairs, w, k)),
    "pairs:blocks:": (2, lambda w, size, most: _after_past(masks.block_pairs, w, size, most)),
    "pairs:pools:": (2, lambda w, size, most: _after_past(masks.pool_pairs, w, size, most)),
    "pairs:compressed:": (1, lambda w, rate: _after_past(masks.compressed_pairs, w, rate)),
    "pairs:compressed:topk:": (2, lambda w, rate, k: _after_past(masks.compressed_pairs, w, rate, k)),
    "pairs:chunked:": (1, lambda w, chunk: _after_past(masks.chunked_pairs, w, chunk)),
    "pairs:splits": (0, _split_pairs),
    "pairs:cross": (0, lambda w: masks.cross_pairs(w.segments, w.sources) if w.sources.size else 0),
    "pairs:joint": (0, _joint_pairs),
    "joint": (0, lambda w: w.tokens + int(w.sources.sum())),
    "supervised": (0, lambda w: w.supervised),
    "logits": (0, lambda w: w.tokens if w.logits is None else w.logits),
    "understood": (0, lambda w: w.tokens - w.latent_patches),
    "noised": (0, lambda w: w.noised),
    "latents": (0, lambda w: w.latent_patches),
    "latent_grids": (0, lambda w: len(w.latents) + len(w.references)),
    "latent_pairs:frame": (0, _latent_pairs),
    "patch_pairs:frame": (0, _frame_pairs),
    "patch_pairs:frame/": (1, _merging_pairs),
    "patch_pairs:merged:": (1, _merged_pairs),
    "patch_pairs:grid": (0, _grid_pairs),
    "patch_pairs:window:": (1, _window_pairs),
    "sources:": (1, _fixed_sources),
}


def _length_drivers(name: str, pairs: str, lengths: Callable[[Workload], Ints]) -> dict[str, _Driver]:
    """Name the drivers of something that comes in lengths: of its units, and of pairs of units of one item."""
    return {
        name: (0, lambda w: int(lengths(w).sum())),
        f"{pairs}_offsets": (0, lambda w: int((2 * lengths(w) - 1).sum())),
        f"{pairs}_pairs:full": (0, lambda w: masks.full_pairs(lengths(w))),
        f"{pairs}_pairs:sliding:": (1, lambda w, window: masks.sliding_pairs(lengths(w), window)),
        f"{pairs}_pairs:block:": (1, lambda w, block: masks.full_block_pairs(lengths(w), block)),
        f"{pairs}_pairs:staggered:": (1, lambda w, block: masks.staggered_block_pairs(lengths(w), block)),
        f"{pairs}_pairs:local:": (2, lambda w, before, after: masks.local_pairs(lengths(w), before, after)),
        f"{pairs}_pairs:relative": (0, lambda w: masks.relative_pairs(lengths(w))),
    }


def _item_drivers(row: Modality) -> dict[str, _Driver]:
    return _length_drivers(row.name, row.name, lambda w: w.sizes(row.name)) | {
        row.items_driver: (0, lambda w: len(w.sizes(row.name))),
        f"{row.items_driver}:": (1, partial(_fixed_items, row)),
    }


def _all_drivers() -> dict[str, _Driver]:
    drivers = _DRIVERS | _length_drivers("sources", "source", _read_sources)
    for row in MODALITIES.values():
        if row.shape == "lengths":
            drivers |= _item_drivers(row)
    return drivers


_TOWERS = {
    "vision": ("patches", "patch_pairs", "grids", "frames", "lone"),
    "latents": ("latent", "noised"),
    "source": ("source", "pairs:cross", "joint", "pairs:joint"),
}
_PARAMETERS = re.compile(r"(.*?)((?<=[:/])\d+(?::\d+)*)?")
_STEPS = re.compile(r"[1-9]\d*(:-?\d+(:[1-9]\d*)?)?")


@cache
def parse_driver(driver: str) -> Callable[[Workload], int]:
    """Turn a driver's text into the function that evaluates it on a workload.

    Raises:
        CostModelError: no driver has this name, or its parameters are wrong.

    >>> from headway.count.workload import Workload
    >>> parse_driver("pairs:sliding:2")(Workload([3]))
    5
    >>> parse_driver("patches/4")(Workload([9], images=[(1, 4, 6)]))
    6
    >>> parse_driver("audio_pairs:full/2")(Workload([9], audio=[7]))
    16
    """
    grids = _of_one_kind(driver)
    if grids is not None:  # images are what a driver of patches counts, and so stand in for any kind of grid
        of_kind = parse_driver(driver.removeprefix(f"{grids.kind}_"))
        return lambda workload: of_kind(Workload(workload.segments, images=workload.sizes(grids.name)))
    base, _, steps = driver.partition("/")
    strided = ("source", "pairs:cross", *(name for name, row in MODALITIES.items() if row.shape == "lengths"))
    if base.startswith(strided) and _STEPS.fullmatch(steps):
        evaluate, numbers = parse_driver(base), [int(n) for n in steps.split(":")]
        return lambda workload: evaluate(_shortened(workload, *numbers))
    name, digits = _PARAMETERS.fullmatch(driver).groups()  # type: ignore[union-attr]  # anything matches
    parameters = [int(n) for n in digits.split(":")] if digits else []
    drivers = _all_drivers()
    number, function = drivers.get(name, (-1, None))
    if function is None or number != len(parameters) or 0 in parameters:
        raise CostModelError(
            f"unknown driver {driver!r}; known are {', '.join(drivers)} (a number follows each final / or :). "
            "Drivers of audio and sources may end in a slash and a number, such as audio_pairs:full/2."
        )
    return lambda workload: function(workload, *parameters)


def _of_one_kind(driver: str) -> Modality | None:
    """Find the kind of grids of which alone a driver counts, such as images in `image_patches`."""
    rows = (row for row in MODALITIES.values() if row.shape == "grids" and row.tower != "latents")
    return next((row for row in rows if driver.startswith(f"{row.kind}_")), None)


def counts_pairs_of_lengths(driver: str) -> bool:
    """Say whether a driver counts pairs within a source, or within an item of a kind that comes in lengths.

    >>> counts_pairs_of_lengths("audio_pairs:block:10/2"), counts_pairs_of_lengths("patch_pairs:frame")
    (True, False)
    """
    names = ["source", *(name for name, row in MODALITIES.items() if row.shape == "lengths")]
    return driver.startswith(tuple(f"{name}_pairs:" for name in names))


def tower(driver: str) -> str:
    """Name the tower whose work a driver counts: that of a kind of input, `source` (an encoder's) or `language`."""
    grids = _of_one_kind(driver)
    if grids is not None:
        return grids.tower
    lengths = [(row.tower, (row.name, row.items_driver)) for row in MODALITIES.values() if row.shape == "lengths"]
    return next((name for name, starts in (*_TOWERS.items(), *lengths) if driver.startswith(starts)), "language")
