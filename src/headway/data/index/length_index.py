"""The length index: tokens, patches and grids of every row of a source, in a few bytes a row."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headway.count import CostModel, Workload
from headway.count.splits import branched
from headway.data.index.table import BAD, KEY, LAYOUT, MEDIA, NUMBERS, PARTS, SEGMENTS, TARGETS, bad_rows
from headway.data.samples import SampleError
from headway.errors import CostModelError, DataError
from headway.packing.budget import branch_costs, grid_costs, segment_costs
from headway.packing.items import Policies
from headway.packing.lengths import LengthTable, Numbers, SamplePlaces
from headway.packing.parts import COLUMNS, PartCosts, PartTable, workload_of
from headway.packing.pieces import TargetRuns

Ints = np.ndarray[Any, np.dtype[Any]]

METADATA = b"headway"
"""Key of the index's description in the Parquet file's footer; the value is JSON."""

PERCENTILES = (0, 1, 10, 50, 90, 99, 100)


@dataclass(frozen=True, slots=True)
class RaggedArray:
    """A list of values for each row.

    Attributes:
        offsets: where each row's values begin, and where the last one's end, shape (N + 1,).
        values: all values end to end: shape (M,), or (M, 3) for grids.
    """

    offsets: Ints
    values: Ints

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Ints:
        """The values of one row."""
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def rows(self) -> Ints:
        """The row of each value, shape (M,)."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @classmethod
    def empty(cls, rows: int, *shape: int) -> "RaggedArray":
        """Nothing for any row, in no memory to speak of."""
        return cls(np.broadcast_to(np.int32(0), (rows + 1,)), np.zeros((0, *shape), np.int32))

    @classmethod
    def join(cls, parts: "Sequence[RaggedArray]") -> "RaggedArray":
        """Rows of one after the rows of another; at least one."""
        values = np.concatenate([part.values for part in parts])
        rows = sum(map(len, parts))
        if not len(values):
            return cls.empty(rows, *values.shape[1:])
        offsets = np.zeros(rows + 1, np.int32 if len(values) < 2**31 else np.int64)
        start = 0
        for part in parts:
            offsets[start + 1 : start + len(part) + 1] = offsets[start] + part.offsets[1:]
            start += len(part)
        return cls(offsets, values)


@dataclass(frozen=True, eq=False)
class LengthIndex:
    """Lengths of all rows of a source, as numpy columns.

    Attributes:
        tokens: length [tokens], int32, shape (N,); 0 in rows that cannot be used, as all other numbers.
        supervised: targets that the loss counts [tokens], int32, shape (N,).
        first_target: place of the first target [tokens], int32, shape (N,).
        media_end: one past the last placeholder of an image, video or clip [tokens], int32, shape (N,); 0 without.
        patches: vision patches of images and videos, before merging [patches], int32, shape (N,).
        media: sizes of each row's items of each kind, by the names of `headway.count.modalities`: (t, h, w) of images
            and videos [patches], lengths of sounds [feature frames].
        segments: lengths of each row's views [tokens], of chats that have several; nothing for other rows.
        targets: runs of each row's targets, from the first place to one past the last [tokens].
        part_lists: of what each row is made, by the columns of `headway.packing.parts`, of families with parts.
        num_answers: how many answers each preference has, int32, shape (N,); 0 in other rows.
        prompt: tokens that may stand before all answers once, int32, shape (N,); 0 in other rows.
        branches: where they do, each such row's prompt and answers behind it [tokens]; nothing for other rows.
        keys: a number for where each row is from, int64, shape (N,); 0 but of families with parts.
        bad: why rows cannot be used, by row.
        description: source, fingerprints and versions that the index was made from.
        path: the Parquet file that it was read from; None for one made by hand.
    """

    tokens: Ints
    supervised: Ints
    first_target: Ints
    media_end: Ints
    patches: Ints
    media: Mapping[str, RaggedArray]
    segments: RaggedArray = field(default_factory=lambda: RaggedArray.empty(0))
    targets: RaggedArray = field(default_factory=lambda: RaggedArray.empty(0, 2))
    part_lists: RaggedArray = field(default_factory=lambda: RaggedArray.empty(0, len(COLUMNS)))
    num_answers: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    prompt: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    branches: RaggedArray = field(default_factory=lambda: RaggedArray.empty(0))
    keys: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    bad: dict[int, SampleError] = field(default_factory=dict)
    description: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def ok(self) -> Ints:
        """Mask of the rows that can be used and hold something, shape (N,)."""
        return np.asarray(self.tokens > 0)

    @cached_property
    def empty(self) -> Ints:
        """Mask of the documents without words, which are left out, shape (N,)."""
        empty = np.asarray(self.tokens == 0)
        empty[list(self.bad)] = False
        return empty

    @classmethod
    def load(cls, path: str | Path, *, source: str | None = None) -> "LengthIndex":
        """Read an index, a group of rows at a time.

        Args:
            path: the Parquet file that `build_index` wrote.
            source: name of the source in the run; the one it had when it was indexed if None.

        Raises:
            DataError: no such file, one that is cut short, or one of another layout.
        """
        path = Path(path)
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                description = _description(file, path)
                groups = (file.read_row_group(number) for number in range(file.num_row_groups))
                columns = _columns(groups, file.metadata.num_rows, source or description["source"])
        except (OSError, pa.ArrowException, KeyError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(
                f"The length index {path} cannot be read: {error}. Delete it and make it again with `headway index`."
            ) from error
        return cls(**columns, description=description, path=path)

    @cached_property
    def parts(self) -> PartTable:
        """The parts of each row."""
        return PartTable(self.part_lists.offsets, self.part_lists.values, self.keys)

    def segments_of(self, row: int) -> list[int]:
        """Lengths of a row's views, of a chat that has several; nothing for other rows [tokens]."""
        return self.segments[row].tolist() if len(self.segments.values) else []

    def splits_of(self, row: int) -> list[tuple[str, int]]:
        """Runs of a row with its prompt before all answers once; nothing for other rows."""
        prompt, *answers = self.branches[row].tolist() if len(self.branches.values) else [0]
        return branched(prompt, answers) if answers else []

    def with_prompts_once(self) -> "LengthIndex":
        """The lengths of the same rows with each prompt that may before all of its answers once.

        Vision patches, media and targets follow: a prompt's media count once, and targets move up.
        """
        rows = np.flatnonzero(self.prompt)
        if not len(rows):
            return self
        is_shared, copies = self.prompt > 0, np.maximum(self.num_answers, 1)
        left_out = (copies - 1) * self.prompt
        tokens = (self.tokens - left_out).astype(self.tokens.dtype)
        # Views of such a row are its answers: the prompt is taken from each, and put before them.
        views = is_shared[self.segments.rows]
        answers = self.segments.values - self.prompt[self.segments.rows]
        counts = np.where(is_shared, self.num_answers + 1, 0)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        values = np.empty(offsets[-1], self.segments.values.dtype)
        firsts = np.zeros(offsets[-1], bool)
        firsts[offsets[rows]] = True
        values[firsts], values[~firsts] = self.prompt[rows], answers[views]
        # The answer of each target, by places in all rows end to end.
        begins = np.concatenate([[0], np.cumsum(self.tokens[:-1], dtype=np.int64)])
        view_ends = begins[self.segments.rows] + _running(self.segments)
        place = begins[self.targets.rows] + self.targets.values[:, 0]
        before = np.searchsorted(view_ends[views], place, side="right")
        first_view = np.concatenate([[0], np.cumsum(np.where(is_shared, self.num_answers, 0))])[:-1]
        moved = np.where(is_shared, self.prompt, 0)[self.targets.rows] * (before - first_view[self.targets.rows])
        targets = self.targets.values - moved.astype(self.targets.values.dtype)[:, None]
        return replace(
            self,
            tokens=tokens,
            media_end=np.where(is_shared, tokens, self.media_end),
            patches=np.where(is_shared, self.patches // copies, self.patches),
            media={name: _first_of(ragged, np.where(is_shared, copies, 1)) for name, ragged in self.media.items()},
            segments=_kept(self.segments, ~views),
            targets=RaggedArray(self.targets.offsets, targets),
            branches=RaggedArray(offsets, values),
        )

    def costs(self, cost_model: CostModel) -> Ints:
        """Count the useful FLOPs of training on each row, forward and backward.

        Costs add up over segments, images, videos and clips, so each distinct length and grid is counted once.

        Returns:
            FLOPs of each row, float64, shape (N,); 0 in rows that cannot be used.

        Raises:
            WorkloadError: the model has no tower for what the rows hold.
        """
        if len(self.part_lists.values):
            rows = PartCosts.of(cost_model, self.part_lists.values).of_samples(self.parts)
            _check_parts(self, rows, cost_model)
            return rows
        rows = np.zeros(len(self))
        rows[self.ok] = segment_costs(cost_model, self.tokens[self.ok])
        if len(self.segments.values):
            rows[self.segments.rows] = 0
            rows += np.bincount(
                self.segments.rows, segment_costs(cost_model, self.segments.values), minlength=len(self)
            )
        if len(self.branches.values):
            firsts = self.branches.offsets[:-1][np.diff(self.branches.offsets) > 0]
            rows[self.branches.rows[firsts]] = 0
            costs = branch_costs(cost_model, self.branches.values, firsts)
            rows += np.bincount(self.branches.rows, costs, minlength=len(self))
        for kind, ragged in self.media.items():
            if len(ragged.values):
                rows += np.bincount(ragged.rows, grid_costs(cost_model, ragged.values, kind), minlength=len(self))
        _check_additive(self, rows, cost_model)
        return rows

    def summary(self) -> "IndexSummary":
        """Sum the index up."""
        tokens = self.tokens[self.ok]
        places = np.percentile(tokens, PERCENTILES, method="inverted_cdf") if tokens.size else ()
        return IndexSummary(
            samples=len(self),
            bad=len(self.bad),
            empty=int(self.empty.sum()),
            preferences=int((self.num_answers > 0).sum()),
            answers=int(self.num_answers.sum(dtype=np.int64)),
            tokens=int(tokens.sum(dtype=np.int64)),
            supervised=int(self.supervised.sum(dtype=np.int64)),
            patches=int(self.patches.sum(dtype=np.int64)),
            items={name: len(ragged.values) for name, ragged in self.media.items()},
            length_percentiles={p: int(length) for p, length in zip(PERCENTILES, places, strict=False)},
        )


@dataclass(frozen=True, slots=True)
class IndexSummary:
    """An index in a few numbers.

    Attributes:
        samples: rows of the source.
        bad: rows that cannot be used.
        empty: documents without words, which are left out.
        preferences: rows with several answers of which some are better than others.
        answers: answers of all of them.
        tokens: tokens of all usable rows [tokens].
        supervised: targets that the loss counts [tokens].
        patches: vision patches [patches].
        items: images, videos and other items, by the names of `headway.count.modalities`.
        length_percentiles: length [tokens] that so many percent of the usable rows do not exceed; empty without any.
    """

    samples: int
    bad: int
    empty: int
    preferences: int
    answers: int
    tokens: int
    supervised: int
    patches: int
    items: dict[str, int]
    length_percentiles: dict[int, int]


def _description(file: pq.ParquetFile, path: Path) -> dict[str, Any]:
    encoded = (file.schema_arrow.metadata or {}).get(METADATA)
    description: dict[str, Any] = json.loads(encoded) if encoded else {}
    if description.get("layout") != LAYOUT:
        raise DataError(
            f"{path} is no length index of layout {LAYOUT}, but of {description.get('layout', 'none')}. Make it again "
            "with `headway index`, by the version of Headway that reads it."
        )
    return description


def _columns(tables: Iterable[pa.Table], rows: int, source: str) -> dict[str, Any]:
    numbers = {name: np.empty(rows, np.int32) for name in NUMBERS} | {KEY: np.empty(rows, np.int64)}
    ragged: dict[str, list[RaggedArray]] = {name: [] for name in (*MEDIA, TARGETS, SEGMENTS, PARTS)}
    bad: dict[int, SampleError] = {}
    start = 0
    for table in tables:
        for name, column in numbers.items():
            column[start : start + len(table)] = table[name].to_numpy()
        for name, parts in ragged.items():
            parts += [_ragged(chunk) for chunk in table[name].chunks]
        bad |= {start + row: error for row, error in bad_rows(table[BAD], source).items()}
        start += len(table)
    columns = numbers | {name: RaggedArray.join(parts) for name, parts in ragged.items()} | {"bad": bad}
    media = {row.name: columns.pop(column) for column, row in MEDIA.items()}
    return columns | {"media": media, "keys": columns.pop(KEY), "part_lists": columns.pop(PARTS)}


def _running(ragged: RaggedArray) -> Ints:
    """Running sums of the values within each row, shape (M,)."""
    sums = np.cumsum(ragged.values, dtype=np.int64)
    before = np.concatenate([[0], sums])[ragged.offsets[:-1]]
    running: Ints = sums - np.repeat(before, np.diff(ragged.offsets))
    return running


def _kept(ragged: RaggedArray, chosen: Ints) -> RaggedArray:
    offsets = np.concatenate([[0], np.cumsum(chosen)])[ragged.offsets]
    return RaggedArray(offsets, ragged.values[chosen])


def _first_of(ragged: RaggedArray, parts: Ints) -> RaggedArray:
    """The first of so many equal parts of each row's values."""
    place = np.arange(len(ragged.values)) - np.repeat(ragged.offsets[:-1], np.diff(ragged.offsets))
    return _kept(ragged, place < (np.diff(ragged.offsets) // parts)[ragged.rows])


def _ragged(chunk: pa.ListArray) -> RaggedArray:
    flat = chunk.flatten()
    if pa.types.is_struct(flat.type):
        values = np.stack([side.to_numpy() for side in flat.flatten()], axis=1)
    else:
        values = flat.to_numpy()
    if not len(values):
        return RaggedArray.empty(len(chunk), *values.shape[1:])
    return RaggedArray(np.concatenate([[0], np.cumsum(chunk.value_lengths().to_numpy())]), values)


def _check_parts(index: LengthIndex, rows: Ints, cost_model: CostModel) -> None:
    """Count the row with the most tokens as a whole, too."""
    row = int(index.tokens.argmax())
    flops = cost_model.count(workload_of(index.part_lists[row].tolist())).total
    if not np.isclose(rows[row], flops, rtol=1e-9):
        raise CostModelError(
            f"The cost of row {row} is {flops} FLOPs, but its parts alone make {rows[row]:.0f}: this model's cost does "
            "not add up over them, so rows cannot be costed one by one. Plan by tokens instead."
        )


def _check_additive(index: LengthIndex, rows: Ints, cost_model: CostModel) -> None:
    """Count the row with the most patches as a whole, too: attention of text to media would not add up."""
    if not index.patches.any():
        return
    row = int(index.patches.argmax())
    media: dict[str, Any] = {name: ragged[row] for name, ragged in index.media.items()}
    splits = index.splits_of(row)
    segments = index.segments_of(row) or [int(index.tokens[row])]
    workload = Workload(segments, splits=[splits] if splits else (), **media)
    flops = cost_model.count(workload).total
    if not np.isclose(rows[row], flops, rtol=1e-9):
        raise CostModelError(
            f"The cost of row {row} is {flops} FLOPs, but its text and media alone make {rows[row]:.0f}: this model's "
            "cost does not add up over them, so rows cannot be costed one by one. Plan by tokens instead."
        )


def length_table(indices: Mapping[str, LengthIndex], overlong: Policies) -> LengthTable:
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
