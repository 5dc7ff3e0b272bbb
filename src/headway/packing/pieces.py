"""Pieces of split samples: a pack's worth of tokens each, without pieces that teach nothing.

The plan of an index and a stream both cut by `split`, so they train on the same pieces.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]
Run = tuple[int, int]
"""Place of the first target of a run, and one past that of its last [tokens]."""


class Targets(Protocol):
    """Runs of targets of many samples, in the order of the samples and of their places, such as an index has."""

    @property
    def rows(self) -> Numbers:
        """The sample of each run, shape (R,)."""

    @property
    def values(self) -> Numbers:
        """First target of each run, and one past its last [tokens], shape (R, 2)."""


class TargetRuns(NamedTuple):
    """`Targets` as arrays.

    Attributes:
        rows: the sample of each run, shape (R,).
        values: first target of each run, and one past its last [tokens], shape (R, 2).
    """

    rows: Numbers
    values: Numbers


class Pieces(NamedTuple):
    """Pieces of samples, one entry each, in the order of the samples and of their places.

    Attributes:
        row: the sample.
        start: the piece's first token in the sample [tokens].
        stop: one past its last [tokens].
        is_first: whether it is the first of its sample that is trained on.
    """

    row: Numbers
    start: Numbers
    stop: Numbers
    is_first: Numbers


def target_runs(is_target_S: Numbers) -> tuple[Run, ...]:
    """Runs of targets of a sample.

    Args:
        is_target_S: whether each token is learnt; the first one never is, as nothing predicts it.

    >>> target_runs(np.array([True, True, False, False, True, True]))
    ((1, 2), (4, 6))
    """
    flags = np.concatenate([[False], is_target_S[1:], [False]])
    edges = np.flatnonzero(flags[1:] != flags[:-1]) + 1
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def split(tokens: Numbers, targets: Targets, most: int) -> Pieces:
    """Cut samples into pieces of a pack's worth of tokens each, and leave out pieces that teach nothing.

    Within a piece nothing predicts its first token, so a piece learns by the targets behind that.

    Args:
        tokens: length of each sample [tokens], shape (N,).
        targets: the samples' runs of targets.
        most: longest piece [tokens].

    >>> split(np.array([10]), TargetRuns(np.array([0]), np.array([[6, 9]])), 4)[1:3]
    (array([4]), array([8]))
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    counts = -(-tokens // most)
    row = np.repeat(np.arange(len(tokens)), counts)
    start = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    stop = np.minimum(start + most, tokens[row])
    # Places counted through all samples: one search finds the first run that ends behind each piece's first token.
    before = np.cumsum(tokens) - tokens
    runs = before[targets.rows][:, None] + targets.values
    run = np.searchsorted(runs[:, 1], before[row] + start + 1, side="right")
    begins = np.append(runs[:, 0], np.iinfo(np.int64).max)[run]
    learns = (np.maximum(begins, before[row] + start + 1)) < before[row] + stop
    row, start, stop = row[learns], start[learns], stop[learns]
    return Pieces(row, start, stop, np.diff(row, prepend=-1) > 0)


def targets_within(targets: Targets, tokens: Numbers, row: Numbers, start: Numbers, stop: Numbers) -> Numbers:
    """Count the targets of pieces of samples, those of their first tokens left out, since nothing predicts them.

    Args:
        targets: the samples' runs of targets.
        tokens: length of each sample [tokens], shape (N,).
        row: sample of each piece, shape (P,).
        start: first token of each piece in its sample [tokens], shape (P,).
        stop: one past its last [tokens], shape (P,).

    >>> targets_within(TargetRuns(np.array([0]), np.array([[6, 9]])), np.array([10]), np.array([0]), [6], [8])
    array([1])
    """
    # Places counted through all samples: the targets before a place are those of all runs that begin before it, less
    # what reaches beyond it.
    before = np.cumsum(tokens, dtype=np.int64) - tokens
    runs = before[targets.rows][:, None] + targets.values
    sums = np.concatenate([[0], (runs[:, 1] - runs[:, 0]).cumsum()])
    ends = np.concatenate([[0], runs[:, 1]])
    places = before[row] + np.stack([np.add(start, 1), stop])
    begun = np.searchsorted(runs[:, 0], places)
    first, last = sums[begun] - np.maximum(0, ends[begun] - places)
    counts: Numbers = np.maximum(0, last - first)
    return counts


def split_sample(tokens: int, runs: tuple[Run, ...], most: int) -> list[tuple[int, int, bool]]:
    """`split` of a sample: start and stop of each piece, and whether it is the first.

    >>> split_sample(10, ((2, 9),), 4)
    [(0, 4, True), (4, 8, False)]
    """
    targets = TargetRuns(np.zeros(len(runs), np.int64), np.array(runs, dtype=np.int64).reshape(-1, 2))
    pieces = split(np.array([tokens]), targets, most)
    return list(zip(pieces.start.tolist(), pieces.stop.tolist(), pieces.is_first.tolist(), strict=True))
