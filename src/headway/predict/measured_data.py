"""Datasets that were measured: their lengths as one table, and how long making packs of them takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from headway.data.encode import Encoder
from headway.data.index import LengthIndex
from headway.data.sources import Source
from headway.errors import DataError
from headway.packing.items import Policies
from headway.packing.lengths import LengthTable, Numbers, SamplePlaces
from headway.packing.pieces import TargetRuns

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


def joined(indices: Mapping[str, LengthIndex], overlong: Policies) -> LengthTable:
    """Put the usable rows of several indices one after the other.

    Args:
        indices: of the datasets, by their names.
        overlong: what becomes of samples that exceed a pack, of all datasets or by name of each.

    Raises:
        DataError: no dataset has a row that can be used.
    """
    if not any(np.any(index.ok) for index in indices.values()):
        raise DataError(f"No row of {', '.join(indices)} can be used; `headway index` says why.")
    columns: dict[str, list[Numbers]] = {name: [] for name in ("tokens", "patches", "first_target", "media_end")}
    grids, grid_rows, runs, run_rows, source = [], [], [], [], []
    segments: dict[int, list[int]] = {}
    branches: dict[int, list[int]] = {}
    start = 0
    for number, index in enumerate(indices.values()):
        ok = np.asarray(index.ok)
        place = np.cumsum(ok) - 1 + start  # place of each usable row in the table
        for name, column in columns.items():
            column.append(getattr(index, name)[ok])
        for ragged in (index.media["images"], index.media["videos"]):
            of_row = ragged.rows
            grids.append(ragged.values[ok[of_row]].reshape(-1, 3))
            grid_rows.append(place[of_row[ok[of_row]]])
        of_row = index.targets.rows
        runs.append(index.targets.values[ok[of_row]].reshape(-1, 2))
        run_rows.append(place[of_row[ok[of_row]]])
        segments |= {int(place[row]): index.segments_of(row) for row in set(index.segments.rows.tolist()) if ok[row]}
        of_prompts = np.flatnonzero(np.diff(index.branches.offsets))
        branches |= {int(place[row]): index.branches[row].tolist() for row in of_prompts.tolist() if ok[row]}
        source.append(np.full(int(ok.sum()), number))
        start += int(ok.sum())
    joint = {name: _whole(column) for name, column in columns.items()}
    targets = TargetRuns(_whole(run_rows), _whole(runs))
    return LengthTable(
        joint["tokens"],
        joint["patches"],
        _whole(grids),
        _whole(grid_rows),
        segments,
        SamplePlaces(joint["first_target"], joint["media_end"], targets),
        _whole(source),
        tuple((name, overlong if isinstance(overlong, str) else overlong[name]) for name in indices),
        branches,
    )


def _whole(parts: Sequence[Numbers]) -> Numbers:
    return np.concatenate(parts).astype(np.int64)
