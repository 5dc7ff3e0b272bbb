"""Reader of Kineto traces: columns of the events, read from a file's JSON one event after the other.

Source: the fields are those of libkineto's output_json.cpp and of torch.profiler (torch 2.0 to 2.13), held against ten
published traces of NVIDIA and AMD devices and of CPUs.
"""

import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from headway.errors import ConfigError
from headway.explain.events import NONE, Events, Kind, Operands, Trace
from headway.explain.trace_files import is_database, read_export, read_texts
from headway.report.quantity import integer

MAX_EVENTS = 4_000_000  # some 2 GB and a few minutes
_PROFILER_STEP = "ProfilerStep#"
_STEP_NUMBER = re.compile("[0-9]{1,18}")
_CHUNK = 2**20  # characters read at a time
_MAX_VALUE = 2**26  # characters of one value; the largest seen, 20 MB, is a list of log lines
_SPACE = re.compile(r"[ \t\r\n]*")
# Characters of all traces of one file; unpacked text may be a thousand times as long as the file.
_MOST_CHARACTERS = 2**33
_NEAR_END = 16  # characters: a word, a number or an escape that ends with the part in hand is no longer
_KINDS = {
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET,
    "cpu_op": Kind.OPERATOR,
    "user_annotation": Kind.ANNOTATION,
    "python_function": Kind.PYTHON,
    # Categories of torch 1.8 to 1.12.
    "Kernel": Kind.KERNEL,
    "Memcpy": Kind.MEMCPY,
    "Memset": Kind.MEMSET,
    "Operator": Kind.OPERATOR,
    "Runtime": Kind.LAUNCH,
}
# Spans that say nothing of an accelerator's work beside its kernels.
_SPANS = {"gpu_user_annotation", "cuda_sync", "overhead", "trace", "cuda_profiler_range", "collective_comm", "async"}
# In torch 1, annotations were operators too; these names are the loop's.
_ANNOTATION_NAMES = ("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)#", "module:", "phase:", "nccl:", "gloo:")


def read_trace(path: Path) -> Trace:
    """Read a file that holds one trace; see `read_traces`.

    Raises:
        ConfigError: as there, or the file holds several.
    """
    traces = read_traces(path)
    if len(traces) > 1:
        raise ConfigError(
            f"{path} holds {len(traces)} traces, and one is wanted here. Unpack it, and give one of them."
        )
    return traces[0]


def read_traces(path: Path) -> list[Trace]:
    """Read the traces in a file, of any device: JSON of torch.profiler, packed or not, a zip or tar of ranks, SQLite.

    Raises:
        ConfigError: it holds no trace, is cut off, holds nothing that took time, or more than MAX_EVENTS events.
    """
    if is_database(path):

        def of_process(events: Iterable[dict[str, Any]], facts: dict[str, Any], notes: list[str]) -> Trace:
            builder = _Builder(str(path))
            for event in events:
                builder.add(event)
            return _trace(path, builder, facts, notes)

        return read_export(path, of_process)
    num_read = 0  # characters of all traces so far

    def parse(name: str, text: TextIO) -> Trace:
        nonlocal num_read
        builder, notes = _Builder(name), list[str]()
        values = _Values(text, name, notes, most=_MOST_CHARACTERS - num_read)
        metadata = values.read(builder.add)
        num_read += values.num_read
        return _trace(Path(name), builder, metadata, notes)

    return read_texts(path, parse)


def _trace(path: Path, builder: "_Builder", metadata: Mapping[str, Any], notes: list[str]) -> Trace:
    events = builder.events()
    if not len(events):
        raise ConfigError(
            f"{path} holds no operator, kernel or annotation. Profile with activities=[ProfilerActivity.CPU, "
            "ProfilerActivity.CUDA] around some training steps."
        )
    foreign = builder.foreign_events(events)
    if foreign and not (events.kind <= Kind.MEMSET).any():
        raise ConfigError(
            f"{path} holds {foreign} of an accelerator that Headway does not know: it reads kernels of CUDA, ROCm, XPU "
            "and PrivateUse1 (categories kernel, gpu_memcpy, gpu_memset). What the host did alone says nothing of it."
        )
    if foreign:
        notes.append(f"{foreign} are of a device that Headway does not know, and are left out.")
    # The device's events by start, whatever their stream; the host's by thread, outer events before those within them.
    # Kinds up to MEMSET are the device's, the others the host's.
    on_device = events.kind <= Kind.MEMSET
    device = events.take(np.flatnonzero(on_device)[np.argsort(events.start_ns[on_device], kind="stable")])
    at_host = np.flatnonzero(~on_device)
    host = events.take(at_host)
    host = host.take(np.lexsort((-host.end_ns, host.start_ns, host.track)))
    # Facts beside the events: the job's ranks, the device, and what Headway wrote.
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
        notes=tuple(notes),
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
    except ArithmeticError as error:  # the errors of decimals are no ValueErrors
        raise ValueError(microseconds[:40]) from error


class _Builder:
    def __init__(self, name: str) -> None:
        self.names: list[str] = []
        self.operands: list[Operands] = []
        self._name = name
        self._foreign: Counter[tuple[str, Any]] = Counter()  # events of unknown categories, by category and process
        self._indices: dict[str, int] = {}
        self._indices_of_operands: dict[str, int] = {}
        self._tracks: dict[tuple[Any, Any], int] = {}
        self._rows = array("q")  # columns' values of all events, one event behind the other

    def add(self, event: dict[str, Any]) -> None:
        category = event.get("cat")
        if event.get("ph") != "X" or not isinstance(category, str):
            return
        kind = _KINDS.get(category)
        if kind is None:
            if not category.endswith(("_runtime", "_driver")):  # cuda_, xpu_, privateuse1_
                self._pass_over(category, event)
                return
            kind = Kind.LAUNCH
        if category == "Operator" and str(event.get("name")).startswith(_ANNOTATION_NAMES):
            kind = Kind.ANNOTATION
        if len(self._rows) >= MAX_EVENTS * len(Events.__slots__):
            raise ConfigError(
                f"{self._name} holds more than {MAX_EVENTS:,} events, the most that are read. Profile fewer steps "
                "(schedule(active=3)), or without with_stack."
            )
        try:
            row = self._row(event, kind)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ConfigError(
                f"{self._name} holds an event without a name or a time that can be read: {str(event)[:200]}. "
                "Export the trace again with export_chrome_trace."
            ) from error
        self._rows.extend(row)

    def _pass_over(self, category: str, event: dict[str, Any]) -> None:
        """Count an event of an unread category; numbers of processes tell devices and hosts apart."""
        if category.lower() not in _SPANS and isinstance(event.get("pid"), int) and event.get("dur"):
            self._foreign[category[:40], event["pid"]] += 1

    def foreign_events(self, events: Events) -> str:
        """Name the events of unknown categories in processes without operators: of devices; "" without any."""
        tracks = set(events.track[np.isin(events.kind, (Kind.OPERATOR, Kind.ANNOTATION))].tolist())
        hosts = {process for (process, _), track in self._tracks.items() if track in tracks}
        counts: Counter[str] = Counter()
        for (category, process), count in self._foreign.items():
            if process not in hosts:
                counts[category] += count
        return " and ".join(f"{count:,} events of category {name!r}" for name, count in counts.most_common(3))

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
            integer(arguments.get("bytes", NONE)) if kind == Kind.MEMCPY else NONE,
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


class _EndOfTextError(Exception):
    """The text ends where more of it must come."""


class _Values:
    """A text whose part in hand begins at `_at`; more is read when a value does not end in it.

    Numbers with a fraction arrive as text, as they are written: a timestamp in microseconds since 1970 with three
    decimals has more digits than a float.
    """

    def __init__(self, text: TextIO, name: str, notes: list[str], most: int = _MOST_CHARACTERS) -> None:
        self.num_read = 0  # characters
        self._text = text
        self._name = name
        self._notes = notes
        self._most = most
        self._decode = json.JSONDecoder(strict=False, parse_float=str).raw_decode
        self._buffer = ""
        self._at = 0
        self._lines = 1  # number of the line in which the part in hand begins

    def read(self, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Hand over each object of `traceEvents`, and return the other entries: none beside a bare list.

        Raises:
            ConfigError: the text is cut off, or no trace.
        """
        try:
            return self._read(on_event)
        except _EndOfTextError as error:
            raise self._no_trace(f"the file is cut off {self._place(len(self._buffer))}") from error

    def _read(self, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        has_events = False
        opening = self._next()
        if opening == "[":
            self._bare_events(on_event)
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
                self._events(on_event)
                has_events = True
            else:
                metadata[key] = self._value()
        if not has_events:
            keys = ", ".join(sorted(metadata)[:5]) or "none"
            by_rocprof = "; rocprofv3 wrote it" if any(key.startswith("rocprofiler") for key in metadata) else ""
            raise self._no_trace(f"it has no list traceEvents, only the keys: {keys}{by_rocprof}")
        return metadata

    def _bare_events(self, on_event: Callable[[dict[str, Any]], None]) -> None:
        """Events of a bare list, whose end may be missing: the format of Chrome's traces says so."""
        count = 0

        def counted(event: dict[str, Any]) -> None:
            nonlocal count
            on_event(event)
            count += 1

        try:
            self._events(counted)
        except _EndOfTextError:
            if not count:
                raise
            self._notes.append(
                f"the list of events in {self._name} has no end, as a profiler that was killed leaves it: the "
                f"{count:,} that are whole are read."
            )

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
        self._at = 0
        if len(self._buffer) > _MAX_VALUE:
            raise self._no_trace(f"the value {self._place(0)} is longer than {_MAX_VALUE:,} characters")
        chunk = self._text.read(max(_CHUNK, len(self._buffer)))
        self._buffer += chunk
        self.num_read += len(chunk)
        if self.num_read > self._most:
            raise self._no_trace(f"it is longer than {_MOST_CHARACTERS:,} characters, the most that are read of a file")
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
