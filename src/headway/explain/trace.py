"""Reader of Kineto traces: columns of the events, read from a file's JSON one event after the other.

Source: the fields are those of libkineto's output_json.cpp and of torch.profiler (torch 2.0 to 2.13), held against ten
published traces of NVIDIA and AMD devices and of CPUs.
"""

import gzip
import json
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from headway.errors import ConfigError
from headway.explain.events import NONE, Events, Kind, Operands, Trace
from headway.files import open_plain
from headway.report.numbers import integer

MAX_EVENTS = 4_000_000  # some 2 GB and a few minutes
_PROFILER_STEP = "ProfilerStep#"
_STEP_NUMBER = re.compile("[0-9]{1,18}")
_CHUNK = 2**20  # characters read at a time
_MAX_VALUE = 2**26  # characters of one value; the largest seen, 20 MB, is a list of log lines
_SPACE = re.compile(r"[ \t\r\n]*")
_GZIP_MAGIC = b"\x1f\x8b"
_KINDS = {
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET,
    "cpu_op": Kind.OPERATOR,
    "user_annotation": Kind.ANNOTATION,
    "python_function": Kind.PYTHON,
}


def read_trace(path: Path) -> Trace:
    """Read a trace of torch.profiler: .json or .json.gz, of torch 2.0 or newer, of any device.

    Args:
        path: the file.

    Raises:
        ConfigError: the file is no trace, is cut off, holds nothing that took time, or more than MAX_EVENTS events.
    """
    builder = _Builder(path)
    metadata = read_json(path, builder.add)
    events = builder.events()
    if not len(events):
        raise ConfigError(
            f"{path} holds no operator, kernel or annotation. Profile with activities=[ProfilerActivity.CPU, "
            "ProfilerActivity.CUDA] around some training steps."
        )
    # The device's events by start, whatever their stream; the host's by thread, outer events before those within them.
    # Kinds up to MEMSET are the device's, the others the host's.
    on_device = events.kind <= Kind.MEMSET
    device = events.take(np.flatnonzero(on_device)[np.argsort(events.start_ns[on_device], kind="stable")])
    at_host = np.flatnonzero(~on_device)
    host = events.take(at_host)
    host = host.take(np.lexsort((-host.end_ns, host.start_ns, host.track)))
    # What stands beside the events: the job's ranks, the device, and what Headway wrote.
    step_track, steps = _steps(host, builder.names)
    rank, world_size = _rank(metadata)
    headway = metadata.get("headway")
    return Trace(
        path=path,
        names=builder.names,
        operands=builder.operands,
        device=device,
        host=host,
        steps=steps,
        step_track=step_track,
        rank=rank,
        world_size=world_size,
        device_name=_device_name(metadata, is_cpu=len(device) == 0),
        headway=headway if isinstance(headway, Mapping) else None,
        capability=_capability(metadata),
    )


def nanoseconds(microseconds: int | str) -> int:
    """Turn a timestamp as a trace writes it into whole nanoseconds, exactly.

    Args:
        microseconds: a whole number, or the text of one with a fraction [us].

    Raises:
        ValueError: it is no number, or one that 64 bits do not hold.

    >>> nanoseconds("1712195495519689.204")
    1712195495519689204
    """
    if isinstance(microseconds, int):
        return integer(microseconds * 1000)
    digits, _, fraction = microseconds.partition(".")
    if len(fraction) <= 3 and len(digits) <= 18 and digits.isdecimal() and (fraction.isdecimal() or not fraction):
        return integer(int(digits) * 1000 + int(fraction.ljust(3, "0")))
    try:
        exact = Decimal(microseconds)
        if not exact.is_finite() or exact.adjusted() > 15:
            raise ValueError(microseconds[:40])
        return integer(round(exact * 1000))
    except ArithmeticError as error:  # of decimals, none of which is a ValueError
        raise ValueError(microseconds[:40]) from error


class _Builder:
    """Columns that grow by an event at a time."""

    def __init__(self, path: Path) -> None:
        self.names: list[str] = []
        self.operands: list[Operands] = []
        self._path = path
        self._indices: dict[str, int] = {}
        self._indices_of_operands: dict[str, int] = {}
        self._tracks: dict[tuple[Any, Any], int] = {}
        self._rows = array("q")  # of all events, one behind the other

    def add(self, event: dict[str, Any]) -> None:
        category = event.get("cat")
        if event.get("ph") != "X" or not isinstance(category, str):
            return
        kind = _KINDS.get(category)
        if kind is None:
            if not category.endswith(("_runtime", "_driver")):  # cuda_, xpu_, privateuse1_
                return
            kind = Kind.LAUNCH
        if len(self._rows) >= MAX_EVENTS * len(Events.__slots__):
            raise ConfigError(
                f"{self._path} ({self._path.stat().st_size / 1e6:,.0f} MB) holds more than {MAX_EVENTS:,} events, the "
                "most that are read. Profile fewer steps (schedule(active=3)), or without with_stack."
            )
        try:
            row = self._row(event, kind)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ConfigError(
                f"{self._path} holds an event without a name or a time that can be read: {str(event)[:200]}. "
                "Export the trace again with export_chrome_trace."
            ) from error
        self._rows.extend(row)

    def _row(self, event: dict[str, Any], kind: Kind) -> tuple[int, ...]:
        arguments = event.get("args") or {}
        start_ns = nanoseconds(event["ts"])
        end_ns = start_ns + max(0, nanoseconds(event["dur"]))
        process, thread = event["pid"], event["tid"]
        device = group = NONE
        # On a device the stream stands for the thread; name, group and size tell which collective a kernel belongs to.
        if kind <= Kind.MEMSET:
            device, thread = integer(arguments.get("device", process)), arguments.get("stream", thread)
            if "Collective name" in arguments:
                fields = (arguments.get(key, "?") for key in ("Collective name", "Process Group Name", "In msg nelems"))
                group = self._index(" ".join(map(str, fields)))
        track = self._tracks.setdefault((process, thread), len(self._tracks))
        sequence = arguments.get("Sequence number", NONE)
        # In the order of the columns of `Events`.
        return (
            kind,
            self._index(event["name"]),
            start_ns,
            end_ns,
            track,
            device,
            integer(arguments.get("correlation", NONE)),
            sequence if isinstance(sequence, int) and abs(sequence) < 2**63 else NONE,  # -1 is written without its sign
            integer(arguments.get("Fwd thread id", NONE)),
            group,
            self._index_of_operands(arguments) if "Input Dims" in arguments else NONE,
        )

    def _index_of_operands(self, arguments: dict[str, Any]) -> int:
        operands = [arguments.get(key) for key in ("Input Dims", "Input type", "Input Strides")]
        index = self._indices_of_operands.setdefault(str(operands), len(self.operands))
        if index == len(self.operands):
            self.operands.append(Operands.read(*operands))
        return index

    def _index(self, name: str) -> int:
        if not isinstance(name, str):
            raise TypeError(name)
        index = self._indices.setdefault(name, len(self.names))
        if index == len(self.names):
            self.names.append(name)
        return index

    def events(self) -> Events:
        table = np.array(self._rows, dtype=np.int64).reshape(-1, len(Events.__slots__))
        return Events(*np.ascontiguousarray(table.T))


def _steps(host: Events, names: Sequence[str]) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """The host thread that has most annotations of steps, and its steps: several threads may carry them."""
    numbers = {
        index: int(name.removeprefix(_PROFILER_STEP))
        for index, name in enumerate(names)
        if name.startswith(_PROFILER_STEP) and _STEP_NUMBER.fullmatch(name, len(_PROFILER_STEP))
    }
    annotations = np.flatnonzero((host.kind == Kind.ANNOTATION) & np.isin(host.name, list(numbers)))
    if not len(annotations):
        return NONE, ()
    tracks, counts = np.unique(host.track[annotations], return_counts=True)
    track = int(tracks[np.argmax(counts)])
    here = annotations[host.track[annotations] == track]
    return track, tuple((numbers[int(host.name[i])], int(host.start_ns[i]), int(host.end_ns[i])) for i in here)


def _rank(metadata: Mapping[str, Any]) -> tuple[int, int | None]:
    for key in ("headway", "distributedInfo"):
        facts = metadata.get(key)
        if isinstance(facts, Mapping) and isinstance(facts.get("rank"), int):
            world_size = facts.get("world_size")
            return facts["rank"], world_size if isinstance(world_size, int) else None
    return 0, None


def _device_name(metadata: Mapping[str, Any], *, is_cpu: bool) -> str:
    headway = metadata.get("headway")
    if isinstance(headway, Mapping) and isinstance(headway.get("device"), str):
        return str(headway["device"])
    if is_cpu:
        return "CPU"
    properties = metadata.get("deviceProperties")
    names = {str(device["name"]) for device in properties or () if isinstance(device, Mapping) and device.get("name")}
    return ", ".join(sorted(names)) or "unknown device"


def _capability(metadata: Mapping[str, Any]) -> tuple[int, int] | None:
    for device in metadata.get("deviceProperties") or ():
        if isinstance(device, Mapping) and "NVIDIA" in str(device.get("name")):
            major, minor = device.get("computeMajor"), device.get("computeMinor")
            if isinstance(major, int) and isinstance(minor, int):
                return major, minor
    return None


def read_json(path: Path, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
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
