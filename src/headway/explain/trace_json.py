"""Reader of a trace's JSON: its list of events, part by part, and the facts beside the list."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO, cast

from headway.errors import ConfigError

_CHUNK = 2**16  # characters read at a time; the events of longer parts leave the processor's caches
_MAX_VALUE = 2**26  # characters of one value; the largest seen, 20 MB, is a list of log lines
_SPACE = re.compile(r"[ \t\r\n]*")
_OBJECT = re.compile(r"[ \t\r\n]*\{")
# Characters of all traces of one file; unpacked text may be a thousand times as long as the file.
MOST_CHARACTERS = 2**33
_NEAR_END = 16  # characters: a word, a number or an escape that ends with the part in hand is no longer


class _EndOfTextError(Exception):
    """The text ends where more of it must come."""


class JsonTrace:
    """A text whose part in hand begins at `_at`; more is read when a value does not end in it.

    Numbers with a fraction arrive as text, as they are written: a timestamp in microseconds since 1970 with three
    decimals has more digits than a float.
    """

    def __init__(self, text: TextIO, name: str, notes: list[str], most: int = MOST_CHARACTERS) -> None:
        self.num_read = 0  # characters
        self._text = text
        self._name = name
        self._notes = notes
        self._most = most
        self._decode = json.JSONDecoder(strict=False, parse_float=str).raw_decode
        self._buffer = ""
        self._at = 0
        self._is_tried = False  # whether the events of the part in hand were decoded at once
        self._lines = 1  # number of the line in which the part in hand begins

    def read(self, on_events: Callable[[Sequence[dict[str, Any]]], None]) -> dict[str, Any]:
        """Hand over each object of `traceEvents`, and return the other entries: none beside a bare list.

        Raises:
            ConfigError: the text is cut off, or no trace.
        """
        try:
            return self._read(on_events)
        except _EndOfTextError as error:
            raise self._no_trace(f"the file is cut off {self._place(len(self._buffer))}") from error

    def _read(self, on_events: Callable[[Sequence[dict[str, Any]]], None]) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        has_events = False
        opening = self._next()
        if opening == "[":
            self._bare_events(on_events)
            return metadata
        if opening != "{":
            raise self._no_trace("it does not begin with { or [")
        for _ in self._items("}"):
            key = self._value()
            if self._next() != ":" or not isinstance(key, str):
                raise self._no_trace(f"a key is not followed by a value {self._place(self._at)}")
            self._skip_space()
            if key == "traceEvents" and self._peek() == "[":
                self._at += 1
                self._events(on_events)
                has_events = True
            else:
                metadata[key] = self._value()
        if not has_events:
            keys = ", ".join(sorted(metadata)[:5]) or "none"
            by_rocprof = "; rocprofv3 wrote it" if any(key.startswith("rocprofiler") for key in metadata) else ""
            raise self._no_trace(f"it has no list traceEvents, only the keys: {keys}{by_rocprof}")
        return metadata

    def _bare_events(self, on_events: Callable[[Sequence[dict[str, Any]]], None]) -> None:
        """Events of a bare list, whose end may be missing: the format of Chrome's traces says so."""
        count = 0

        def counted(events: Sequence[dict[str, Any]]) -> None:
            nonlocal count
            on_events(events)
            count += len(events)

        try:
            self._events(counted)
        except _EndOfTextError:
            if not count:
                raise
            self._notes.append(
                f"the list of events in {self._name} has no end, as a profiler that was killed leaves it: the "
                f"{count:,} that are whole are read."
            )

    def _events(self, on_events: Callable[[Sequence[dict[str, Any]]], None]) -> None:
        for _ in self._items("]"):
            events = self._whole_events() or [self._value()]
            for event in events:
                if not isinstance(event, dict):
                    raise self._no_trace(f"an event of it is {str(event)[:40]!r}, not an object")
            on_events(events)

    def _whole_events(self) -> list[Any]:
        """Decode at once the events that are whole in the part in hand; none if one of them is wrong."""
        end = -1 if self._is_tried else self._buffer.rfind("},", self._at)
        while end >= 0 and not _OBJECT.match(self._buffer, end + 2):  # the end of an object within the last event
            end = self._buffer.rfind("},", self._at, end)
        self._is_tried = True
        if end < 0:
            return []
        try:
            events, num_read = self._decode(f"[{self._buffer[self._at : end + 1]}]")
        except (ValueError, RecursionError):
            return []  # one by one, so that the error has its place
        self._at += num_read - 2  # the brackets
        return cast(list[Any], events)

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
                raise self._no_trace(f"{mark!r} stands where a comma should {self._place(self._at - 1)}")

    def _value(self) -> Any:
        while True:
            wrong: Exception | None = None
            try:
                value, end = self._decode(self._buffer, self._at)
                if end < len(self._buffer) or self._buffer[end - 1] in '}]"':  # else a number may go on
                    self._at = end
                    return value
            except (ValueError, RecursionError) as error:
                wrong = error
            # More of the text mends a value that ends with the part in hand, or a string in it; nothing else.
            if isinstance(wrong, json.JSONDecodeError):
                is_open = wrong.msg.startswith("Unterminated string")
                if not is_open and wrong.pos < len(self._buffer) - _NEAR_END:
                    raise self._no_trace(f"{wrong.msg} {self._place(wrong.pos)}") from wrong
            elif wrong is not None:
                raise self._no_trace(f"a value {self._place(self._at)} is nested too deeply, or no number") from wrong
            if not self._more():
                if isinstance(wrong, json.JSONDecodeError) and wrong.pos < len(self._buffer.rstrip()):
                    is_cut_off = wrong.msg.startswith(("Unterminated", "Invalid"))
                    if not is_cut_off:
                        raise self._no_trace(f"{wrong.msg} {self._place(wrong.pos)}") from wrong
                raise _EndOfTextError from wrong

    def _more(self) -> bool:
        self._lines += self._buffer.count("\n", 0, self._at)
        self._buffer = self._buffer[self._at :]
        self._at, self._is_tried = 0, False
        if len(self._buffer) > _MAX_VALUE:
            raise self._no_trace(f"the value {self._place(0)} is longer than {_MAX_VALUE:,} characters")
        chunk = self._text.read(max(_CHUNK, len(self._buffer)))
        self._buffer += chunk
        self.num_read += len(chunk)
        if self.num_read > self._most:
            raise self._no_trace(f"it is longer than {MOST_CHARACTERS:,} characters, the most that are read of a file")
        return bool(chunk)

    def _place(self, at: int) -> str:
        """A place of the part in hand: "in line 12, near '...'"."""
        line = self._lines + self._buffer.count("\n", 0, at)
        return f"in line {line:,}, near {self._buffer[max(0, at - 30) : at + 10]!r}"

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
            raise _EndOfTextError
        self._at += 1
        return mark

    def _no_trace(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self._name} is no whole trace of PyTorch's profiler: {why}. Give what "
            "torch.profiler.profile(...).export_chrome_trace(FILE) writes, as .json or .json.gz."
        )
