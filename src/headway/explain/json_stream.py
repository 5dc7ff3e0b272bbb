"""A trace file's JSON, event by event: the memory that a large file takes is that of one event, not of its text."""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from headway.errors import ConfigError
from headway.files import open_plain

_CHUNK = 2**20  # characters read at a time
_MAX_VALUE = 2**26  # characters of one value; the largest seen, 20 MB, is a list of log lines
_SPACE = re.compile(r"[ \t\r\n]*")
_GZIP_MAGIC = b"\x1f\x8b"


def read_trace_json(path: Path, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Read a trace, hand over each event, and return what stands beside the events.

    Numbers with a fraction arrive as text, as they are written: a timestamp in microseconds since 1970 with three
    decimals has more digits than a float.

    Args:
        path: a file of JSON, compressed by gzip or not, whatever its name says.
        on_event: called with each object in `traceEvents`.

    Returns:
        The other keys of the file; empty where the file is a bare list of events.

    Raises:
        ConfigError: the file cannot be read, is cut off, or is no trace.
    """
    try:
        with open_plain(path) as file:
            is_gzip = file.read(2) == _GZIP_MAGIC
        with (
            gzip.open(path, "rt", encoding="utf-8", errors="replace")
            if is_gzip
            else path.open(encoding="utf-8", errors="replace")
        ) as text:
            return _Values(text, path).read(on_event)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(
            f"{path} is cut off or damaged: gzip says {str(error)!r}. Copy or export it again; a profiler "
            "that was killed while it wrote leaves such a file."
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}. Name a trace file.") from error


class _Values:
    """A text of which the part in hand begins at `_at`; more is read when a value does not end in it."""

    def __init__(self, text: TextIO, path: Path) -> None:
        self._text = text
        self._path = path
        self._decode = json.JSONDecoder(strict=False, parse_float=str).raw_decode
        self._buffer = ""
        self._at = 0

    def read(self, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        has_events = False
        opening = self._next()
        if opening == "[":
            self._events(on_event)
            return metadata
        if opening != "{":
            raise self._no_trace("it does not begin with { or [")
        for _ in self._items("}"):
            key = self._value()
            if self._next() != ":" or not isinstance(key, str):
                raise self._no_trace("a key is not followed by a value")
            self._skip_space()
            if key == "traceEvents" and self._peek() == "[":
                self._at += 1
                self._events(on_event)
                has_events = True
            else:
                metadata[key] = self._value()
        if not has_events:
            keys = ", ".join(sorted(metadata)[:5]) or "none"
            raise self._no_trace(f"it has no list traceEvents, only the keys: {keys}")
        return metadata

    def _events(self, on_event: Callable[[dict[str, Any]], None]) -> None:
        for _ in self._items("]"):
            event = self._value()
            if not isinstance(event, dict):
                raise self._no_trace(f"an event of it is {str(event)[:40]!r}, not an object")
            on_event(event)

    def _items(self, closing: str) -> Iterator[None]:
        """Stand before each item of a list or an object, and behind its end at last."""
        self._skip_space()
        if self._peek() == closing:
            self._at += 1
            return
        while True:
            self._skip_space()
            yield
            mark = self._next()
            if mark == closing:
                return
            if mark != ",":
                raise self._no_trace(f"{mark!r} stands where a comma should")

    def _value(self) -> Any:
        while True:
            try:
                value, end = self._decode(self._buffer, self._at)
                if end < len(self._buffer):  # else a number may go on
                    self._at = end
                    return value
                wrong: Exception | None = None
            except (ValueError, RecursionError) as error:
                wrong = error
            # More of the text mends no list nested too deeply, and no number of too many digits for Python.
            ends_early = wrong is None or isinstance(wrong, json.JSONDecodeError)
            if not ends_early or not self._more():
                raise self._no_trace("a value in it is no JSON, or the file is cut off") from wrong

    def _more(self) -> bool:
        self._buffer = self._buffer[self._at :]
        self._at = 0
        if len(self._buffer) > _MAX_VALUE:
            raise self._no_trace(f"one value in it is longer than {_MAX_VALUE:,} characters")
        chunk = self._text.read(max(_CHUNK, len(self._buffer)))
        self._buffer += chunk
        return bool(chunk)

    def _skip_space(self) -> None:
        while True:
            space = _SPACE.match(self._buffer, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._buffer) or not self._more():
                return

    def _peek(self) -> str:
        return self._buffer[self._at : self._at + 1]

    def _next(self) -> str:
        self._skip_space()
        mark = self._peek()
        if not mark:
            raise self._no_trace("the file is cut off")
        self._at += 1
        return mark

    def _no_trace(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self._path} is no whole trace of PyTorch's profiler: {why}. Give what "
            "torch.profiler.profile(...).export_chrome_trace(FILE) writes, as .json or .json.gz."
        )
