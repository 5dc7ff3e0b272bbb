"""Tables as text: CSV and TSV, whose first line names the columns."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

from headway.data.sources.json_rows import decoded
from headway.data.sources.reader import ParsedRow
from headway.data.sources.spans import Record, SpanReader, lines
from headway.errors import DataError

_SEPARATORS = {".csv": ",;\t|", ".tsv": "\t"}
_CLOSED = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')  # the rest of a value in quotes, of which doubled ones are letters
_QUOTED = re.compile(r'"([^"]*+(?:""[^"]*+)*+)"')
_MAX_ROW_BYTES = 64 * 2**20  # a quote that is not closed would take the rest of the file for one value


class DelimitedReader(SpanReader):
    """A table of comma- or tab-separated values, with a line of names above them.

    A value may stand in quotes, and then hold separators, line breaks and doubled quotes. A .csv file whose names are
    separated by semicolons alone, as spreadsheets of many countries write it, is read by those; likewise by tabs or
    upright bars.

    Args:
        file: the file to read.

    Source: RFC 4180; quotes within a value that does not begin with one are letters, as for Python's `csv`.
    """

    unit = "line"

    def records(self, stream: BinaryIO) -> Iterator[Record]:
        """Rows in order: lines, those joined through which a value in quotes runs.

        Raises:
            EOFError: a value in quotes does not end.
        """
        place = start = first = 0
        row: list[bytes] = []
        separator, is_open, is_header = b"", False, True
        for number, line in lines(stream):
            if not row:
                start, first = place, number
            place += len(line)
            if not row and line.isspace():
                continue
            row.append(line)
            separator = separator or self._separator_of(line)
            is_open = _is_open_after(line, is_open, separator)
            if is_open and place - start <= _MAX_ROW_BYTES:
                continue
            if is_open:
                break
            if not is_header:
                yield Record(start, first, b"".join(row))
            row, is_header = [], False
        if is_open:
            raise EOFError(f"the value in quotes that begins on line {first} does not end")

    def parse(self, content: bytes) -> ParsedRow:
        """Read a row; a column without a name, as pandas' index has, is left out."""
        if not hasattr(self, "_names"):
            self._names, self._separator = self._header()
        values = _values(decoded(content), self._separator)
        if len(values) != len(self._names):
            raise DataError(
                f"it has {len(values)} values, and the first line names {len(self._names)} columns. Put values that "
                "hold a separator or a line break into quotes."
            )
        return ParsedRow({name: value for name, value in zip(self._names, values, strict=True) if name})

    def _header(self) -> tuple[list[str], str]:
        with self.file.opened() as stream:
            line = next((line for _, line in lines(stream) if not line.isspace()), b"")
        separator = self._separator_of(line).decode()
        names = [name.strip() for name in _values(decoded(line), separator)]
        twice = sorted(name for name, count in Counter(names).items() if name and count > 1)
        if twice:
            raise DataError(f"the first line names {', '.join(twice)} twice. Give every column a name of its own.")
        return names, separator

    def _separator_of(self, header: bytes) -> bytes:
        separators = _SEPARATORS.get(self.file.extension, ",;\t|")
        return next((separator for separator in separators if separator.encode() in header), separators[0]).encode()


def _is_open_after(line: bytes, is_open: bool, separator: bytes) -> bool:
    """Tell whether a value in quotes goes on behind a line, where `is_open` says whether one went on before it."""
    place = int(not is_open and line.startswith(b'"'))
    is_open = is_open or bool(place)
    while True:
        if is_open:
            closed = _CLOSED.match(line, place)
            if closed is None:
                return True
            place = closed.end()
        place = line.find(separator, place) + 1
        if not place:
            return False
        is_open = line.startswith(b'"', place)
        place += is_open


def _values(text: str, separator: str) -> list[str]:
    """The values of a row, which `csv` would end at a lone carriage return: pandas writes one without quotes.

    Raises:
        DataError: a value in quotes does not end, or something stands behind it.

    >>> _values('a,"b, c",', ",")
    ['a', 'b, c', '']
    """
    text = text.rstrip("\r\n")
    values, place = list[str](), 0
    while True:
        if text.startswith('"', place):
            quoted = _QUOTED.match(text, place)
            if quoted is None:
                raise DataError(
                    "a value in quotes does not end. Close it, or double the quotes that belong to a value."
                )
            stop = quoted.end()
            if stop < len(text) and not text.startswith(separator, stop):
                raise DataError(
                    f"behind the closing quote of value {len(values) + 1} stands {text[stop]!r}. Double the quotes "
                    "that belong to a value."
                )
            values.append(quoted[1].replace('""', '"'))
        else:
            stop = text.find(separator, place)
            stop = len(text) if stop < 0 else stop
            values.append(text[place:stop])
        if stop >= len(text):
            return values
        place = stop + 1
