"""Rows of text: JSON, an object per line or an array of objects, and tables whose first line names the columns."""

import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from headway.data.sources.reader import ParsedRow, Record, SpanReader, check_row, lines
from headway.errors import DataError

_BOM = b"\xef\xbb\xbf"
_COMPRESSED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}  # first bytes of compressed files
_CHUNK_BYTES = 2**20
_SPACE = " \t\n\r"

_SEPARATORS = {".csv": ",;\t|", ".tsv": "\t"}
_CLOSED = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')  # the rest of a value in quotes, of which doubled ones are letters
_QUOTED = re.compile(r'"([^"]*+(?:""[^"]*+)*+)"')
_MAX_ROW_BYTES = 64 * 2**20  # a quote that is not closed would take the rest of the file for one value


class JsonLines(SpanReader):
    """One JSON object per line; blank lines are no rows."""

    unit = "line"

    def records(self, stream: BinaryIO) -> Iterator[Record]:  # noqa: D102 - as the base class says
        start = 0
        for number, line in lines(stream):
            if not line.isspace():
                yield Record(start, number, line)
            start += len(line)

    def parse(self, content: bytes) -> ParsedRow:
        """Read a line."""
        return ParsedRow(parse_object(content, "Each line must be one whole JSON object."))


class JsonArray(SpanReader):
    """One JSON array of objects, read element by element."""

    unit = "element"

    def records(self, stream: BinaryIO) -> Iterator[Record]:
        """Elements in order, without holding more than one and a chunk of the file.

        The bytes are read as Latin-1, one character each: the structure of JSON is ASCII, and no byte of another UTF-8
        character looks like it. So a place in the text is a place in the file.
        """
        text = _Buffer(stream)
        text.skip(_BOM.decode("latin-1") + _SPACE)
        if text.take() != "[":
            raise io.UnsupportedOperation(
                "a JSON dataset must be an array of objects; for one per line, name the format jsonl"
            )
        number, separator = 1, ""
        text.skip(_SPACE)
        while (character := text.peek()) != "]" or separator == ",":
            if not character:
                raise EOFError("the JSON array is not closed")
            start, element = text.element(number)
            yield Record(start, number, element)
            number += 1
            text.skip(_SPACE)
            separator = text.peek()
            if separator == ",":
                text.take()
                text.skip(_SPACE)
            elif separator != "]":
                raise EOFError(f"after element {number - 1} of the JSON array comes {separator!r}, not a comma or ]")

    def parse(self, content: bytes) -> ParsedRow:
        """Read an element."""
        return ParsedRow(parse_object(content, "Each element of the array must be a JSON object."))


class _Buffer:
    """A window of a JSON file, moved forward as it is read."""

    def __init__(self, stream: BinaryIO) -> None:
        # Only where values end matters here; as floats, numbers of any number of digits are read.
        self._stream, self._decoder = stream, json.JSONDecoder(strict=False, parse_int=float)
        self._text, self._place, self._gone = "", 0, 0  # the window, a place in it, bytes before it

    def _more(self, num_bytes: int = _CHUNK_BYTES) -> bool:
        chunk = self._stream.read(num_bytes)
        self._gone += self._place
        self._text, self._place = self._text[self._place :] + chunk.decode("latin-1"), 0
        return bool(chunk)

    def peek(self) -> str:
        if self._place == len(self._text):
            self._more()
        return self._text[self._place : self._place + 1]

    def take(self) -> str:
        letter = self.peek()
        self._place += len(letter)
        return letter

    def skip(self, letters: str) -> None:
        while self.peek():
            self._place = len(self._text) - len(self._text[self._place :].lstrip(letters))
            if self._place < len(self._text):
                return

    def element(self, number: int) -> tuple[int, bytes]:
        """The first byte of the next value, which is the one of this number, and its bytes."""
        chunk, name = _CHUNK_BYTES, f"element {number} of the JSON array"
        while True:
            try:
                _, stop = self._decoder.raw_decode(self._text, self._place)
                length = stop - self._place
                if stop < len(self._text) or not self._more():  # a number may go on in the next chunk
                    break
            except json.JSONDecodeError as error:
                check_row(len(self._text) - self._place, name)  # all of it is this element, as far as can be told
                if not self._more(chunk):
                    raise EOFError(f"not valid JSON: {error.msg} at byte {self._gone + error.pos}") from error
                chunk *= 2  # each attempt reads the value from its beginning, so chunks grow with it
            except RecursionError as error:  # neither its end nor the values behind it can be read
                raise EOFError(
                    f"not usable JSON: lists nested too deeply from byte {self._gone + self._place}"
                ) from error
        check_row(length, name)
        start = self._gone + self._place
        element = self._text[self._place : self._place + length].encode("latin-1")
        self._place += length
        return start, element


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
        """Rows in order: lines, joined where a value in quotes runs through several.

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


def parse_object(content: bytes, rule: str) -> dict[str, Any]:
    """Read a JSON object; the error of anything else ends with the rule."""
    try:
        value = json.loads(decoded(content), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise DataError(f"not valid JSON ({error.msg} at column {error.colno}). {rule}") from error
    except RecursionError as error:
        raise DataError(f"not usable JSON: its lists are nested too deeply. {rule}") from error
    except ValueError as error:  # Python's bound on the digits of an integer
        raise DataError(f"not usable JSON: a number in it has too many digits to be read. {rule}") from error
    if b"\\ud" in content.lower() and not _is_encodable(value):
        raise DataError(
            "it holds half of a surrogate pair (\\\\ud800 to \\\\udfff), which is no character. Write it again."
        )
    if not isinstance(value, dict):
        raise DataError(f"got {shortened(value)}, but it must be an object. {rule}")
    if isinstance(value, _Repeating):
        raise DataError(f"it has several columns of the name {shortened(value.name)}. Give each a name of its own.")
    return value


class _Repeating(dict[str, Any]):
    """An object that has one name twice, and of both the later value: no harm in a column that nobody reads."""

    name = ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        fields = _Repeating(fields)
        fields.name = Counter(name for name, _ in pairs).most_common(1)[0][0]
    return fields


def _is_encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def decoded(content: bytes) -> str:
    """Read UTF-8, without the mark that some editors put before it."""
    try:
        return content.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        for extension, mark in _COMPRESSED.items():
            if content.startswith(mark):
                raise DataError(
                    f"it is compressed, though its name does not say so. Add {extension} to the file's name."
                ) from error
        raise DataError(f"it is not UTF-8 text: {error}. Save the file as UTF-8.") from error


def json_or_words(words: str) -> Any:
    """A value of its JSON; the words themselves where they are none."""
    try:
        return json.loads(words)
    except (ValueError, RecursionError):  # ValueError: no JSON, or a number of too many digits
        return words


class Unreadable:
    """A value that its table cannot give: an error of a row whose reader needs the value, and no harm to other rows."""

    def __init__(self, error: DataError) -> None:
        self.error = error


def shortened(value: Any) -> str:
    """A value as JSON, cut to fit into a message; bytes by their number alone; of an unreadable one its own error."""
    if isinstance(value, bytes):
        return f"{len(value):,} bytes, to be cast to string where they are words"
    text = json.dumps(value, ensure_ascii=False, default=_described)
    return text if len(text) <= 80 else text[:77] + "..."


def listed(names: Iterable[Any], most: int = 12) -> str:
    """Names in one line, cut to fit into a message.

    >>> listed(["a", "b" * 60, "c"], most=2)
    'a, bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb... and 1 more'
    """
    names = list(names)
    shown = [str(name) if len(str(name)) <= 40 else f"{str(name)[:37]}..." for name in names[:most]]
    return ", ".join(shown) + f" and {len(names) - most:,} more" * (len(names) > most)


def _described(value: Any) -> str:
    if isinstance(value, Unreadable):
        raise value.error
    return f"{len(value):,} bytes" if isinstance(value, bytes) else repr(value)
