"""Base classes of all formats: rows in order without a table, and any row by its number."""

import io
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.data.sources.files import File, cached_path, from_cache, read_span, write_cached
from headway.errors import DataError, first_line, foreign, reraise_own

T = TypeVar("T")

EMPTY_MESSAGE = "it holds no samples. Leave an empty file out, or write its samples into it again."
START = "at its start"
MOST_ROW_BYTES = 2**29
"""Longest row [bytes]. A small compressed file, or one with a hole, may hold a line that is longer than the memory."""

_PIECE_BYTES = 2**20
_DAMAGED = -1  # end of a row that stands for unreadable bytes
# Errors that NumPy raises on a file that is missing, cut short or something else.
_NO_TABLE = (OSError, ValueError, EOFError, TypeError, KeyError, SyntaxError, OverflowError, MemoryError)
_MAPPED_BYTES = 2**20  # larger tables are mapped, so that processes share them


class Raw(NamedTuple):
    """A row as its file holds it.

    Attributes:
        row: place in the file, from 0.
        place: the place as people say it, such as "line 3".
        content: argument of the format's `parse`; a DataError where the file cannot be read further.
    """

    row: int
    place: str
    content: Any


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """A parsed row.

    Attributes:
        fields: its columns.
        members: media that are stored with it, encoded, by their names; None but in a WebDataset shard.
    """

    fields: dict[str, Any]
    members: dict[str, bytes] | None = None


class Reader(ABC):
    """Reads one file of one format.

    Pickling keeps the settings; open files and tables, in attributes that begin with an underscore, are made again.

    Args:
        file: the file to read.
    """

    def __init__(self, file: File) -> None:
        self.file = file

    @property
    def name(self) -> str:
        """Name of the file in messages: its path or URL."""
        return self.file.url

    def stream(self, start: int = 0) -> Iterator[Raw]:
        """Rows in order, from `start` on; a file that is damaged or empty ends with a row that says so."""
        last: Raw | None = None
        for item in until_damage(self._read(start)):
            row = start if last is None else last.row + 1
            last = item if isinstance(item, Raw) else Raw(row, after(last), item)
            if last.row >= start:
                yield last
        if last is None and start == 0:
            yield Raw(0, START, DataError(EMPTY_MESSAGE))

    def row(self, raw: Raw) -> ParsedRow:
        """Read a row, which anybody may have written.

        Raises:
            DataError: it cannot be read, whatever a library raises at it; the message begins with the reason.
        """
        if isinstance(raw.content, DataError):
            raise raw.content
        with foreign(lambda reason: DataError(f"it cannot be read: {reason} Write it again, or delete it.")):
            return self.parse(raw.content)

    @abstractmethod
    def parse(self, content: Any) -> ParsedRow:
        """Read a row's content.

        Raises:
            DataError: it cannot be read; the message begins with the reason.
        """

    @abstractmethod
    def get(self, row: int) -> Raw:
        """A row by its place in the file.

        Raises:
            DataError: the file cannot be read, or not as it was when its rows were counted.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Rows of the file, the row that names a damage included."""

    @abstractmethod
    def _read(self, start: int) -> Iterator[Raw]:
        """Rows in order; rows before `start - 1` may be left out. Raises whatever libraries do at a damaged file."""

    def _damaged(self, row: int, damage: str) -> Raw:
        """The row that names a damage."""
        return Raw(row, after(self.get(row - 1) if row else None), DataError(damage))

    def __repr__(self) -> str:
        """The format and its settings, the same for every object that reads a file alike."""
        return f"{type(self).__name__}({self.__getstate__()})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def until_damage(items: Iterable[T]) -> Iterator[T | DataError]:
    """Items as long as they can be read, then the reason as an error, if there is one: whatever a library raises."""
    try:
        yield from items
    except BaseException as error:  # noqa: BLE001 - yielded, as what libraries raise has no base of its own
        reraise_own(error)
        reason = getattr(error, "strerror", None) or first_line(error)
        is_other = isinstance(error, io.UnsupportedOperation)  # whole, and laid out as no such file is
        advice = "" if is_other else " It may be cut short, damaged or out of reach; copy it again."
        damage = DataError(f"the file cannot be read further: {reason}.{advice}")
        damage.__cause__ = error
        yield damage


def lasting(damage: DataError, file: File) -> str:
    """Message of a damage by which a file always ends before its time; raised where another attempt may succeed."""
    cause = damage.__cause__
    if not file.is_local or (isinstance(cause, OSError) and cause.errno is not None):
        raise DataError(f"{file.url}: {damage}") from cause
    return str(damage)


def after(last: Raw | None) -> str:
    """Name the place where a file ends before its time."""
    return f"after {last.place}" if last is not None else START


class Record(NamedTuple):
    """A row's bytes.

    Attributes:
        start: first byte, in the decompressed file.
        number: line, element or sample, from 1, as people count.
        data: the bytes.
    """

    start: int
    number: int
    data: bytes


def check_row(num_bytes: int, row: str, most: int | None = None) -> None:
    """Refuse a row that is too long to be held, before more of it is read; `MOST_ROW_BYTES` may be held."""
    most = most or MOST_ROW_BYTES
    if num_bytes > most:
        raise EOFError(f"{row} is longer than {most >> 20:,} MiB, the most that a row may have")


def lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, from 1; too long a line is an EOFError."""
    number, most = 0, min(_PIECE_BYTES, MOST_ROW_BYTES + 1)
    while line := stream.readline(most):
        number += 1
        if len(line) == most:  # longer, most likely: joined as it is read, so that the bound is one of memory
            pieces = bytearray(line)
            check_row(len(pieces), f"line {number}")
            while pieces[-1:] != b"\n" and (piece := stream.readline(most)):
                pieces += piece
                check_row(len(pieces), f"line {number}")
            line = bytes(pieces)
        yield number, line


def whole(stream: BinaryIO) -> bytes:
    """Read a file that is one row; too long a file is an EOFError."""
    content = bytearray()
    while piece := stream.read(_PIECE_BYTES):
        content += piece
        check_row(len(content), "the document")
    return bytes(content)


class SpanReader(Reader):
    """A file of rows that are runs of bytes.

    Random access needs the first and last byte of every row: one pass over the file, whose result is kept in the cache
    for every process and every later run. A compressed or remote file is copied there, decompressed, in the same pass.
    """

    unit = "row"

    @abstractmethod
    def records(self, stream: BinaryIO) -> Iterator[Record]:
        """Rows of a decompressed file, in order. Raises whatever libraries do where it cannot go on."""

    def place(self, number: int, data: bytes) -> str:  # noqa: ARG002 - formats that name their rows read the bytes
        """Name a row as people do."""
        return f"{self.unit} {number}"

    def get(self, row: int) -> Raw:  # noqa: D102 - as the base class says
        start, stop, number = (int(value) for value in self._spans()[row])
        if stop == _DAMAGED:
            return self._damaged(row, self._damage_file().read_text("utf-8"))
        try:
            data = read_span(self._plain_file, start, stop)
        except OSError as error:
            raise DataError(
                f"{self.file.url} cannot be read: {error.strerror or error}. It was there when its rows were counted; "
                "put it back, or open the dataset again."
            ) from error
        return Raw(row, self.place(number, data), data)

    def __len__(self) -> int:
        return len(self._spans())

    def _read(self, start: int) -> Iterator[Raw]:
        for row, record in enumerate(self._records()):
            yield Raw(row, self.place(record.number, record.data) if row >= start - 1 else "", record.data)

    def _records(self) -> Iterator[Record]:
        with self.file.opened() as stream:
            yield from self.records(stream)

    @property
    def _is_plain(self) -> bool:
        return self.file.is_local and self.file.compression is None

    def _purpose(self) -> str:
        """Settings that the cached table depends on, besides the file."""
        return type(self).__name__

    def _table_file(self) -> Path:
        return cached_path(self.file, f"{self._purpose()} spans 1").with_suffix(".npy")

    def _damage_file(self) -> Path:
        return self._table_file().with_suffix(".damage")

    @cached_property
    def _plain_file(self) -> File:
        return self.file if self._is_plain else File(str(self._table_file().with_suffix(".bytes")), None, stamp="")

    def _spans(self) -> NDArray[np.int64]:
        """First byte, one past the last and number of every row, shape (rows, 3)."""
        if not hasattr(self, "_table"):
            content = f"The places of the rows of {self.file.url}"
            self._table = from_cache(self._table_file(), self._cached, self._scan, content)
        return self._table

    def _cached(self) -> NDArray[np.int64] | None:
        """The table of rows in the cache; None without a table, or if it is damaged and must be made again."""
        path = self._table_file()
        table: NDArray[np.int64]
        try:
            size = self.file.size if self._is_plain else Path(self._plain_file.url).stat().st_size
            if path.stat().st_size > _MAPPED_BYTES:
                table = np.lib.format.open_memmap(path, mode="r")
            else:
                with path.open("rb") as file:
                    table = np.lib.format.read_array(file, allow_pickle=False)
        except _NO_TABLE:
            return None
        assert size is not None  # a local file's is known
        if table.dtype != np.int64 or table.shape[1:] != (3,) or not len(table):
            return None
        starts, stops = table[:, 0], table[:, 1]
        sound = (starts >= 0) & (starts <= stops) & (stops <= size)
        records_damage = stops[-1] == _DAMAGED and self._damage_file().is_file()
        return table if sound[:-1].all() and (sound[-1] or records_damage) else None

    def _scan(self, path: Path) -> None:
        """Find the rows in one pass; write the table last, after the files that it needs."""
        spans, damage = array("q"), ""

        def scan(copy: BinaryIO | None) -> None:
            nonlocal damage
            place = 0
            for record in until_damage(self._records()):
                if isinstance(record, DataError):
                    damage = lasting(record, self.file)
                    break
                start = record.start if copy is None else place
                place = start + len(record.data)
                spans.extend((start, place, record.number))
                if copy is not None:
                    copy.write(record.data)

        # A compressed file is copied out in the same pass; spans are then places in the copy.
        if self._is_plain:
            scan(None)
        else:
            write_cached(path.with_suffix(".bytes"), scan)
        if not spans:
            damage = damage or EMPTY_MESSAGE
        # A damage ends the table as a last row of its own, whose message lies beside it.
        if damage:
            spans.extend((0, _DAMAGED, 0))
            write_cached(self._damage_file(), lambda file: file.write(damage.encode()))
        # Rows of the table: first byte, one past the last, and number of the record in the file.
        table = np.frombuffer(spans, np.int64).reshape(-1, 3)
        write_cached(path, partial(_save, table=table))


def _save(file: BinaryIO, table: NDArray[np.int64]) -> None:
    """Write an array as `np.save` does, which tells a full disk in numbers of its own."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(table))
    file.write(table.data)
