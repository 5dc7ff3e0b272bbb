"""Formats whose rows are runs of bytes: lines, elements, documents, members of an archive."""

from abc import abstractmethod
from array import array
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.data.sources.files import File, cached_path, from_cache, read_span, write_cached
from headway.data.sources.reader import EMPTY_MESSAGE, Raw, Reader, lasting, until_damage
from headway.errors import DataError

MOST_ROW_BYTES = 2**29
"""Longest row [bytes]. A small compressed file, or one with a hole, may hold a line that is longer than the memory."""

_PIECE_BYTES = 2**20
_DAMAGED = -1  # as the end of a row: the row stands for what cannot be read
# What NumPy raises on a file that is missing, cut short or something else.
_NO_TABLE = (OSError, ValueError, EOFError, TypeError, KeyError, SyntaxError, OverflowError, MemoryError)
_MAPPED_BYTES = 2**20  # larger tables are mapped, so that processes share them


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
    """Refuse a row that is too long to be held, before more of it is read.

    Args:
        num_bytes: of the row, as far as it was read.
        row: its name, for the error.
        most: longest row [bytes]; `MOST_ROW_BYTES` when None.

    Raises:
        EOFError: it is too long.
    """
    most = most or MOST_ROW_BYTES
    if num_bytes > most:
        raise EOFError(f"{row} is longer than {most >> 20:,} MiB, the most that a row may have")


def lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, from 1.

    Raises:
        EOFError: a line is too long.
    """
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
    """Read a file that is one row.

    Raises:
        EOFError: it is too long.
    """
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
        """The table of rows in the cache; None where there is none, or one that is damaged and is to be made again."""
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
        """Find the rows in one pass; write the table last, so that what it needs is there once it is."""
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
