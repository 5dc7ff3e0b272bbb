"""Drivers: the additive quantities of a workload that operations' costs are proportional to.

A driver is written as a name and whole-number parameters joined by colons: `tokens`, `patches/4` (patches after merging
four into one), `text_tokens/4` (tokens that stand for no such patches), `pairs:causal`, `pairs:sliding:4096`,
`patch_pairs:frame`, `patch_pairs:window:8`.
Where a model draws images, `latents` counts latent patches, each a token; `drawn` those that come from noise;
`understood` the tokens that are no latent patches; `supervised` the tokens whose next token is learnt.
Where images and videos have towers of their own, `image_` or `video_` stands before a driver of patches or frames.

What an encoder's convolutions make of its frames follows a slash, since they round: `audio/2` counts ceil(L / 2)
positions of each clip of L frames, `audio/4:7` those of a stride of 4 whose first position needs 7 frames, and
`audio/8:1:100` ceil(p / 8) of each piece p of at most 100 frames. `audio_pairs:full/2`, `pairs:cross/2` and
the like count pairs of such positions.
"""

import math
import re
from collections.abc import Callable
from functools import cache

import numpy as np

from headway.count import masks, splits
from headway.count.integers import Ints
from headway.count.workload import Workload
from headway.errors import CostModelError, WorkloadError


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


def _text_tokens(workload: Workload, group: int) -> int:
    """Count tokens that stand for no patches, of which squares of `group` merge into one token."""
    text = workload.tokens - _merged_patches(workload, group)
    if text < 0:
        raise WorkloadError(
            f"{workload.tokens:,} tokens cannot hold {workload.patches // group:,} that stand for patches: segments "
            "are counted with the tokens of their images and videos."
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
        raise WorkloadError(f"The grid {bad} does not fit this model, which takes {size} patches: give that.")
    if len(other) > workload.num_segments:
        raise WorkloadError(
            f"{len(other)} images in {workload.num_segments} segments: this model takes one image with each segment. "
            f"Give {size} at most once for a segment."
        )
    return len(other)


def _fixed_clips(workload: Workload, frames: int) -> int:
    """Count the clips of a tower that fills every clip up to one length, and computes all of that."""
    longer = workload.audio > frames
    if longer.any():
        raise WorkloadError(
            f"An audio clip of {int(workload.audio[np.argmax(longer)])} frames does not fit this model, which fills "
            f"every clip up to {frames} feature frames and takes no longer one: give {frames} or fewer, with *N for N "
            "clips."
        )
    return len(workload.audio)


def _fixed_sources(workload: Workload, frames: int) -> int:
    """Count the sources of an encoder that takes one length only."""
    lengths = _read_sources(workload)
    other = lengths != frames
    if other.any():
        raise WorkloadError(
            f"A source of {int(lengths[np.argmax(other)])} frames does not fit this model, whose encoder pads every "
            f"source to {frames} feature frames and computes them all: give {frames} for each segment, with *N for N."
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
    """Put in place of each source and clip what convolutions make of it."""
    audio = shorten(workload.audio, *steps)
    return Workload(
        workload.segments, sources=shorten(workload.sources, *steps), audio=audio[audio > 0], past=workload.past
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


# name, with its separator before a parameter -> (number of parameters, evaluation)
_DRIVERS: dict[str, tuple[int, Callable[..., int]]] = {
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
    "supervised": (0, lambda w: w.supervised),
    "understood": (0, lambda w: w.tokens - w.latent_patches),
    "drawn": (0, lambda w: w.drawn),
    "latents": (0, lambda w: w.latent_patches),
    "latent_grids": (0, lambda w: len(w.latents) + len(w.references)),
    "latent_pairs:frame": (0, _latent_pairs),
    "patch_pairs:frame": (0, _frame_pairs),
    "patch_pairs:frame/": (1, _merging_pairs),
    "patch_pairs:grid": (0, _grid_pairs),
    "patch_pairs:window:": (1, _window_pairs),
    "sources": (0, lambda w: int(_read_sources(w).sum())),
    "sources:": (1, _fixed_sources),
    "source_offsets": (0, lambda w: int((2 * _read_sources(w) - 1).sum())),
    "source_pairs:full": (0, lambda w: masks.full_pairs(_read_sources(w))),
    "source_pairs:block:": (1, lambda w, block: masks.full_block_pairs(_read_sources(w), block)),
    "source_pairs:staggered:": (1, lambda w, block: masks.staggered_block_pairs(_read_sources(w), block)),
    "source_pairs:local:": (2, lambda w, before, after: masks.local_pairs(_read_sources(w), before, after)),
    "source_pairs:relative": (0, lambda w: masks.relative_pairs(_read_sources(w))),
    "audio": (0, lambda w: int(w.audio.sum())),
    "audio_offsets": (0, lambda w: int((2 * w.audio - 1).sum())),
    "audio_pairs:full": (0, lambda w: masks.full_pairs(w.audio)),
    "audio_pairs:sliding:": (1, lambda w, window: masks.sliding_pairs(w.audio, window)),
    "audio_pairs:block:": (1, lambda w, block: masks.full_block_pairs(w.audio, block)),
    "audio_pairs:local:": (2, lambda w, before, after: masks.local_pairs(w.audio, before, after)),
    "audio_pairs:relative": (0, lambda w: masks.relative_pairs(w.audio)),
    "clips": (0, lambda w: len(w.audio)),
    "clips:": (1, _fixed_clips),
}
_STRIDED = ("source", "pairs:cross", "audio")
_TOWERS = {
    "vision": ("patches", "patch_pairs", "grids", "frames", "lone"),
    "audio": ("audio", "clips"),
    "latents": ("latent", "drawn"),
    "source": ("source", "pairs:cross"),
}
_PARAMETERS = re.compile(r"(.*?)((?<=[:/])\d+(?::\d+)*)?")
_STEPS = re.compile(r"[1-9]\d*(:-?\d+(:[1-9]\d*)?)?")


@cache
def parse(driver: str) -> Callable[[Workload], int]:
    """Turn a driver's text into the function that evaluates it on a workload.

    Raises:
        CostModelError: no driver has this name, or its parameters are wrong.

    >>> from headway.count.workload import Workload
    >>> parse("pairs:sliding:2")(Workload([3]))
    5
    >>> parse("patches/4")(Workload([9], images=[(1, 4, 6)]))
    6
    >>> parse("audio_pairs:full/2")(Workload([9], audio=[7]))
    16
    """
    for kind in ("image", "video"):
        if driver.startswith(f"{kind}_"):
            of_kind = parse(driver.removeprefix(f"{kind}_"))
            return lambda workload: of_kind(Workload(workload.segments, **{f"{kind}s": getattr(workload, f"{kind}s")}))
    base, _, steps = driver.partition("/")
    if base.startswith(_STRIDED) and _STEPS.fullmatch(steps):
        evaluate, numbers = parse(base), [int(n) for n in steps.split(":")]
        return lambda workload: evaluate(_shortened(workload, *numbers))
    name, digits = _PARAMETERS.fullmatch(driver).groups()  # type: ignore[union-attr]  # anything matches
    parameters = [int(n) for n in digits.split(":")] if digits else []
    number, function = _DRIVERS.get(name, (-1, None))
    if function is None or number != len(parameters) or 0 in parameters:
        raise CostModelError(
            f"unknown driver {driver!r}; known are {', '.join(_DRIVERS)} (a number follows each final / or :), "
            "and those of audio and sources with what follows a slash, such as audio_pairs:full/2."
        )
    return lambda workload: function(workload, *parameters)


def tower(driver: str) -> str:
    """Say whose work a driver counts: `vision`, `audio`, `latents`, `source` (an encoder's) or `language`."""
    counted = driver.removeprefix("image_").removeprefix("video_")
    return next((name for name, starts in _TOWERS.items() if counted.startswith(starts)), "language")
