"""Datasets that were measured: their lengths as one table, and how long making packs of them takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from headway.data.encode import Encoder
from headway.data.index import LengthIndex
from headway.data.sources import Source
from headway.packing.lengths import LengthTable

_MOST_S, _MOST_SAMPLES = 2.0, 512


@dataclass(frozen=True)
class MeasuredData:
    """Measurements of datasets before they are trained on.

    Attributes:
        name: of all of them.
        lengths: of every row that can be used.
        making_s: that one process takes to read and encode a token [s].
    """

    name: str
    lengths: LengthTable
    making_s: float


def making_s(sources: Sequence[Source], indices: Sequence[LengthIndex], encoder: Encoder) -> float:
    """Time that a process takes to read and encode a token [s], by samples from all over the data, for two seconds.

    Args:
        sources: the datasets.
        indices: theirs, in the same order.
        encoder: of the model.

    Raises:
        DataError: a sample cannot be used any more.
    """
    places = [(source, row) for source, index in zip(sources, indices, strict=True) for row in np.flatnonzero(index.ok)]
    chosen = [places[number] for number in np.random.default_rng(0).permutation(len(places))[:_MOST_SAMPLES]]
    first, row = chosen[0]
    encoder.encode(first[int(row)])  # opens files and compiles templates
    tokens, begin = 0, perf_counter()
    for source, row in chosen:
        tokens += encoder.encode(source[int(row)]).tokens
        if perf_counter() - begin > _MOST_S:
            break
    return (perf_counter() - begin) / tokens


def joined(indices: Sequence[LengthIndex]) -> LengthTable:
    """Put the usable rows of several indices one after the other.

    Args:
        indices: of the datasets.
    """
    tokens, patches, grids, rows = [], [], [], []
    segments: dict[int, list[int]] = {}
    start = 0
    for index in indices:
        ok = np.asarray(index.ok)
        place = np.cumsum(ok) - 1 + start  # of each usable row in the table
        tokens.append(index.tokens[ok])
        patches.append(index.patches[ok])
        for ragged in (index.image_grids, index.video_grids):
            of_row = ragged.rows
            grids.append(ragged.values[ok[of_row]].reshape(-1, 3))
            rows.append(place[of_row[ok[of_row]]])
        segments |= {int(place[row]): index.segments_of(row) for row in set(index.segments.rows.tolist()) if ok[row]}
        start += int(ok.sum())
    return LengthTable(
        np.concatenate(tokens).astype(np.int64),
        np.concatenate(patches).astype(np.int64),
        np.concatenate(grids).astype(np.int64),
        np.concatenate(rows).astype(np.int64),
        segments,
    )
