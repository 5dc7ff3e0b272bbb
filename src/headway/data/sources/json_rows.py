"""JSON datasets: one object per line, or one array of objects."""

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from headway.data.sources.reader import ParsedRow
from headway.data.sources.spans import Record, SpanReader, check_row, lines
from headway.errors import DataError

_BOM = b"\xef\xbb\xbf"
_COMPRESSED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}  # how such files begin
_CHUNK_BYTES = 2**20
_SPACE = " \t\n\r"


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
                chunk *= 2  # what is tried again grows with what is read
            except RecursionError as error:  # where it ends cannot be told, nor what comes after it be read
                raise EOFError(
                    f"not usable JSON: lists nested too deeply from byte {self._gone + self._place}"
                ) from error
        check_row(length, name)
        start = self._gone + self._place
        element = self._text[self._place : self._place + length].encode("latin-1")
        self._place += length
        return start, element


def parse_object(content: bytes, rule: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DataError: it is none, or not UTF-8; the message ends with the rule.
    """
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
    """An object that has one name twice, and of both the later value."""

    name = ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, which may have a name twice in a column that nobody reads."""
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    repeating = _Repeating(fields)
    repeating.name = Counter(name for name, _ in pairs).most_common(1)[0][0]
    return repeating


def _is_encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def decoded(content: bytes) -> str:
    """Read UTF-8, without the mark that some editors put before it.

    Raises:
        DataError: it is something else.
    """
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
    """A value that its table cannot give: no harm in a column that nobody reads.

    Args:
        error: of a row whose reader wants it.
    """

    def __init__(self, error: DataError) -> None:
        self.error = error


def shortened(value: Any) -> str:
    """A value as JSON, cut to fit into a message; bytes by their number alone.

    Raises:
        DataError: it could not be read in the first place.
    """
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
