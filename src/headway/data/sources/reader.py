"""Base class of all formats: rows in order without a table, and any row by its number."""

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from headway.data.sources.files import File
from headway.errors import DataError, first_line, foreign, reraise_own

T = TypeVar("T")

EMPTY_MESSAGE = "it holds no samples. Leave an empty file out, or write its samples into it again."
START = "at its start"


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
        """Rows of the file, the one that tells of a damage included."""

    @abstractmethod
    def _read(self, start: int) -> Iterator[Raw]:
        """Rows in order; those before `start - 1` may be left out. Raises whatever libraries do at a damaged file."""

    def _damaged(self, row: int, damage: str) -> Raw:
        """The row that tells of a damage."""
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
    """Message of a damage by which a file always ends before its time.

    Raises:
        DataError: another attempt may succeed, as where the file is out of reach; this is not to be kept.
    """
    cause = damage.__cause__
    if not file.is_local or (isinstance(cause, OSError) and cause.errno is not None):
        raise DataError(f"{file.url}: {damage}") from cause
    return str(damage)


def after(last: Raw | None) -> str:
    """Name the place where a file ends before its time."""
    return f"after {last.place}" if last is not None else START
