"""An index's rows as Parquet, one for each row of the source, in its order; docs/data-formats.md has the columns."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headway.cache import write_whole
from headway.count.modalities import in_chats
from headway.data.samples import Origin, SampleError, SampleLengths
from headway.packing.parts import COLUMNS

LAYOUT = 7
"""Version of the columns' names and meaning; part of every index's key."""

NUMBERS = ("tokens", "supervised", "first_target", "media_end", "patches", "num_answers", "prompt")
MEDIA = {row.column: row for row in in_chats().values()}  # kinds of media by their columns
TARGETS = "targets"
SEGMENTS = "segments"
PARTS = "parts"
KEY = "key"
BAD = "bad"

_WRITING: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
_INT = pa.int32()
_FAULT = pa.struct([("file", pa.string()), ("row", pa.int64()), ("place", pa.string()), ("reason", pa.string())])
_GRID = pa.struct([pa.field(side, _INT, nullable=False) for side in "thw"])

_RUN = pa.struct([pa.field(end, _INT, nullable=False) for end in ("start", "stop")])
_PART = pa.struct([pa.field(name, _INT, nullable=False) for name in COLUMNS])

_SIZES = {"grids": pa.field("grid", _GRID, nullable=False), "lengths": pa.field("frames", _INT, nullable=False)}
_NOTHING: dict[str, Any] = (
    dict.fromkeys(NUMBERS, 0) | dict.fromkeys((*MEDIA, TARGETS, SEGMENTS, PARTS), ()) | {KEY: 0}
)  # a bad row's lengths

SCHEMA = pa.schema(
    [
        *(pa.field(name, _INT, nullable=False) for name in NUMBERS),
        *(pa.field(name, pa.list_(_SIZES[row.shape]), nullable=False) for name, row in MEDIA.items()),
        pa.field(TARGETS, pa.list_(pa.field("run", _RUN, nullable=False)), nullable=False),
        pa.field(SEGMENTS, pa.list_(pa.field("tokens", _INT, nullable=False)), nullable=False),
        pa.field(PARTS, pa.list_(pa.field("part", _PART, nullable=False)), nullable=False),
        pa.field(KEY, pa.int64(), nullable=False),
        pa.field(BAD, _FAULT),
    ]
)


def table_of(rows: Sequence[SampleLengths | SampleError]) -> pa.Table:
    """Lay measured rows out in columns."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for row in rows:
        fault = _fault(row) if isinstance(row, SampleError) else None
        for name, nothing in _NOTHING.items():
            columns[name].append(nothing if isinstance(row, SampleError) else _value(row, name))
        columns[BAD].append(fault)
    for name, kind in MEDIA.items():
        if kind.shape == "grids":
            columns[name] = [[dict(zip("thw", grid, strict=True)) for grid in grids] for grids in columns[name]]
    columns[TARGETS] = [[{"start": start, "stop": stop} for start, stop in runs] for runs in columns[TARGETS]]
    columns[PARTS] = [[dict(zip(COLUMNS, part, strict=True)) for part in parts] for parts in columns[PARTS]]
    return pa.table(columns, schema=SCHEMA)


def _value(row: SampleLengths, column: str) -> Any:
    return row.media.get(MEDIA[column].name, ()) if column in MEDIA else getattr(row, column)


def _fault(error: SampleError) -> dict[str, Any]:
    origin = error.origin
    return {"file": origin.file, "row": origin.row, "place": origin.place, "reason": error.reason}


def bad_rows(column: pa.ChunkedArray, source: str) -> dict[int, SampleError]:
    """Take why rows cannot be used from the column `bad`, by row."""
    if column.null_count == len(column):
        return {}
    rows = np.flatnonzero(column.is_valid().to_numpy()).tolist()
    faults = column.drop_null().to_pylist()
    return {
        row: SampleError(Origin(source, fault["file"], fault["row"], fault["place"]), fault["reason"])
        for row, fault in zip(rows, faults, strict=True)
    }


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table whole or not at all.

    Raises:
        OSError: it cannot be written; nothing stands under the name then that did not before.
    """
    write_whole(path, lambda file: pq.write_table(table, file, **_WRITING))


def read_rows(path: Path, rows: range | None = None) -> Iterator[pa.Table]:
    """Read rows of a file of `write_table` or `join_tables`, all of them when None, a group in memory at a time.

    Raises:
        OSError: it cannot be read.
    """
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        start = 0
        for group in range(file.num_row_groups):
            stop = start + file.metadata.row_group(group).num_rows
            wanted = range(start, stop) if rows is None else range(max(start, rows.start), min(stop, rows.stop))
            if wanted:
                table = file.read_row_group(group).replace_schema_metadata(None)
                yield table.slice(wanted.start - start, len(wanted))
            start = stop


def join_tables(parts: Iterable[pa.Table], path: Path, metadata: dict[bytes, bytes], group_rows: int = 1 << 17) -> None:
    """Write the rows of many tables into one file, whole or not at all, a group of rows in memory at a time.

    Args:
        parts: tables of `read_rows`, in the order of their rows.
        path: the file to write.
        metadata: entries of the file's footer.
        group_rows: rows that Parquet keeps together, at least.

    Raises:
        OSError: the file cannot be written.
    """

    def write(file: BinaryIO) -> None:
        schema = SCHEMA.with_metadata(metadata)
        with pq.ParquetWriter(file, schema, **_WRITING) as writer:
            tables: list[pa.Table] = []
            for table in parts:
                tables.append(table)
                if sum(map(len, tables)) >= group_rows:
                    writer.write_table(pa.concat_tables(tables).cast(schema))
                    tables = []
            if tables:
                writer.write_table(pa.concat_tables(tables).cast(schema))

    write_whole(path, write)
