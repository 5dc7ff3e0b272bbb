"""Splits: the runs of tokens that a segment is made of, where they see each other differently.

A segment is a list of runs, each with a mode:

* `causal`: its tokens see every earlier visible token of the segment, and themselves causally;
* `full`: its tokens see every earlier visible token of the segment, and each other;
* `noise`: as full, but no token of another run sees it: a noised image must not be read by what follows;
* `branch`: as causal, but no token of another run sees it: one of several answers to the same prompt.

A segment without runs is one causal run. A noise run is a noised image of a model that denoises beside its text;
PaliGemma's prefix is a full run before a causal one, and the blocks of block diffusion (Arriola et al. 2025) are a
noise run, then the same block as a full run. Answers that share a prompt are a causal run, then a branch for each.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.count.integers import NONE, Ints, as_ints
from headway.errors import WorkloadError

MODES = ("causal", "full", "noise", "branch")
CAUSAL, FULL, NOISE, BRANCH = range(4)
IS_CAUSAL = np.array([True, False, False, True])
"""Modes of runs whose tokens see, of their own run, only the tokens up to themselves."""
IS_VISIBLE = np.array([True, True, False, False])
"""Modes of runs that later runs of the segment see."""

NO_RUNS: Ints = np.zeros((0, 2), dtype=np.int64)
NO_RUNS.flags.writeable = False
_SAFE_TOKENS = 1 << 30  # tokens up to here: pairs stay below 2**63


def runs_of(splits: Any, segments: Ints | None = None) -> tuple[Ints, Ints]:
    """Read splits: for each segment, a list of (mode, tokens).

    Args:
        splits: one list of runs per segment, `[[("causal", 102), ("noise", 4098)], [("causal", 300)]]`; an empty list
            for a segment that is one causal run of a given length. Or an array of (code, tokens), shape (R, 2), the
            runs of all segments laid end to end, with the code's name in `MODES`.
        segments: lengths of the segments [tokens], shape (N,); the sums of the runs when None.

    Returns:
        The runs, shape (R, 2), none where all are causal; and the lengths of the segments, shape (N,).

    Raises:
        WorkloadError: an unknown mode, a run below 1 token, or runs that do not add up to their segments.

    >>> runs, segments = runs_of([[("causal", 102), ("noise", 4098)], [("causal", 300)]])
    >>> runs.tolist(), segments.tolist()
    ([[0, 102], [2, 4098], [0, 300]], [4200, 300])
    """
    if isinstance(splits, np.ndarray):
        runs, ends = _checked(splits), None
    else:
        lists = _with_whole_segments(splits, segments)
        runs = _checked(np.array([_run(i, run) for i, segment in enumerate(lists) for run in segment], dtype=np.int64))
        ends = np.cumsum([len(segment) for segment in lists]) if lists else NONE
    if segments is None:
        totals = np.diff(np.concatenate([[0], runs[:, 1].cumsum()])[np.concatenate([[0], _needed(ends)])])
        segments = totals.astype(np.int64)
    else:
        _check_sums(runs, segments, ends)
    return (runs if (runs[:, 0] != CAUSAL).any() else NO_RUNS), segments


def _with_whole_segments(splits: Any, segments: Ints | None) -> list[Any]:
    """Put one causal run in place of each empty list."""
    lists = [list(segment) for segment in splits]
    if segments is None:
        if empty := [i for i, segment in enumerate(lists) if not segment]:
            raise WorkloadError(
                f"splits[{empty[0]}] holds no run. If a segment has no runs, give its length in segments."
            )
        return lists
    if len(lists) != len(segments):
        raise WorkloadError(
            f"splits must be one list of runs per segment: got {len(lists)} for {len(segments)} segments."
        )
    return [segment or [("causal", int(length))] for segment, length in zip(lists, segments, strict=True)]


def _run(segment: int, run: Any) -> tuple[int, int]:
    mode, tokens = run
    if mode not in MODES:
        raise WorkloadError(f"splits[{segment}] has a run of mode {mode!r}: a mode is one of {', '.join(MODES)}.")
    return MODES.index(mode), int(as_ints([tokens], f"splits[{segment}]")[0])


def _checked(values: Any) -> Ints:
    runs = as_ints(values, "splits")
    if not runs.size:
        return NO_RUNS
    if runs.ndim != 2 or runs.shape[1] != 2 or runs[:, 0].min() < 0 or runs[:, 0].max() >= len(MODES):
        raise WorkloadError(
            f"splits as an array are rows of (mode, tokens) with modes 0 to {len(MODES) - 1} for {', '.join(MODES)}; "
            f"got shape {runs.shape}."
        )
    if runs[:, 1].min() < 1:
        raise WorkloadError(f"splits hold a run of {int(runs[:, 1].min())} tokens, but a run holds at least 1 token.")
    return runs


def _needed(ends: Ints | None) -> Ints:
    if ends is None:
        raise WorkloadError("splits as an array need the lengths of the segments. Give segments.")
    return ends


def _check_sums(runs: Ints, segments: Ints, ends: Ints | None) -> None:
    """Refuse runs that cross or miss a segment's end."""
    if ends is None and not runs.size:
        return
    reached, wanted = runs[:, 1].cumsum(), segments.cumsum()
    if ends is not None:
        totals = np.diff(np.concatenate([[0], reached])[np.concatenate([[0], ends])])
        for i in np.flatnonzero(totals != segments)[:1]:
            raise WorkloadError(
                f"splits[{i}] hold {int(totals[i]):,} tokens, but the segment has {int(segments[i]):,}. The runs of "
                "a segment must cover it."
            )
    elif not np.isin(wanted, reached).all() or int(reached[-1]) != int(wanted[-1]):
        raise WorkloadError(
            f"splits of {int(reached[-1]):,} tokens do not end where the segments end, of {int(wanted[-1]):,} "
            "tokens. A run lies in one segment, and the runs of a segment cover it."
        )


def all_causal(segments: Ints) -> Ints:
    """Write segments without splits as runs, shape (N, 2)."""
    return np.stack([np.full_like(segments, CAUSAL), segments], axis=1)


def check_kinds(tokens: int, runs: Ints, noised: int, references: int, supervised: int | None) -> None:
    """Refuse more tokens of a kind than there are tokens, or than the runs have that hold such."""
    latents = noised + references
    if latents > tokens:
        raise WorkloadError(
            f"{tokens:,} tokens cannot hold {latents:,} latent patches. Each patch is a token, so give the length of "
            "a segment with its denoised images."
        )
    for patches, mode, what in ((noised, NOISE, "denoised"), (references, FULL, "read clean")):
        if runs.size and patches > (room := tokens_of(runs, mode)):
            raise WorkloadError(
                f"The {MODES[mode]} runs hold {room:,} tokens, and {patches:,} latent patches are {what}. Each patch "
                f"is a token of a {MODES[mode]} run."
            )
    text = tokens - latents
    if supervised is not None and not 0 <= supervised <= text:
        raise WorkloadError(
            f"supervised must be 0 to the {text:,} tokens of the workload that are no latent patches, got {supervised}."
        )


def joined_runs(segments: Sequence[Ints], runs: Sequence[Ints]) -> Ints:
    """Join runs, with one causal run for each segment of a part that has none; nothing if none has any."""
    if not any(part.size for part in runs):
        return NO_RUNS
    return np.concatenate([part if part.size else all_causal(s) for part, s in zip(runs, segments, strict=True)])


def tokens_of(runs: Ints, mode: int) -> int:
    """Add up the tokens of the runs of a mode."""
    return int(runs[runs[:, 0] == mode, 1].sum())


def causal_tokens(runs: Ints) -> int:
    """Add up the tokens that see their own run causally, of which the next ones can be learnt."""
    return int(runs[IS_CAUSAL[runs[:, 0]], 1].sum())


def mask_of_runs(runs: Ints) -> NDArray[np.bool_]:
    """Draw the mask of one segment.

    Args:
        runs: of the segment, (mode, tokens), shape (R, 2).

    Returns:
        Which key (column) each query (row) sees, shape (tokens, tokens).
    """
    number, mode = (np.repeat(column, runs[:, 1]) for column in (np.arange(len(runs)), runs[:, 0]))
    place = np.arange(len(number))
    own = (number[:, None] == number) & (~IS_CAUSAL[mode][:, None] | (place[:, None] >= place))
    earlier: NDArray[np.bool_] = own | ((number[:, None] > number) & IS_VISIBLE[mode])
    return earlier


def branched(prompt: int, branches: Sequence[int]) -> list[tuple[str, int]]:
    """Write a prompt and its answers as the runs of one segment.

    >>> branched(30, [5, 8])
    [('causal', 30), ('branch', 5), ('branch', 8)]
    """
    return [("causal", prompt), *(("branch", length) for length in branches)]


def by_mode(runs: Ints) -> dict[str, int]:
    """Add up the tokens of each mode that there is."""
    return {name: tokens_of(runs, mode) for mode, name in enumerate(MODES) if mode in runs[:, 0]}


def split_pairs(segments: Ints, runs: Ints, past: Ints = NONE) -> int:
    """Count pairs of attention under splits.

    Args:
        segments: segment lengths [tokens], shape (N,).
        runs: the runs of all segments laid end to end, (mode, tokens), shape (R, 2).
        past: cached tokens before each segment, which all of it sees [tokens], shape (N,); (0,) for none.

    Returns:
        Number of pairs; exact.

    Source: a run of s tokens behind v visible ones has s v pairs with them, and s (s + 1) / 2 of its own where it is
    causal, s s where not; noise runs and branches do not count towards v.

    >>> runs, segments = runs_of([[("causal", 2), ("noise", 3), ("full", 2)]])
    >>> split_pairs(segments, runs)
    26
    >>> split_pairs(*reversed(runs_of([[("causal", 3), ("branch", 2), ("branch", 1)]])))  # 6 + (6 + 3) + (3 + 1)
    19
    """
    mode, s = runs[:, 0], runs[:, 1]
    if int(s.sum()) + int(past.sum()) > _SAFE_TOKENS:
        s = s.astype(object)  # Python integers: no overflow
    # the first run of each segment: the first that starts where the segment does
    first = np.searchsorted(s.cumsum() - s, segments.cumsum() - segments)
    num_runs = np.diff(np.concatenate([first, [len(s)]]))
    visible = np.where(IS_VISIBLE[mode], s, 0)
    before = visible.cumsum() - visible
    before = before - np.repeat(before[first], num_runs)
    if past.size:
        before = before + np.repeat(past, num_runs)
    own = np.where(IS_CAUSAL[mode], s * (s + 1) // 2, s * s)
    return int((s * before + own).sum())
