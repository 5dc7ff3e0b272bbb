"""Reader of Kineto traces: columns of the events.

Source: the fields are those of libkineto's output_json.cpp and of torch.profiler (torch 2.0 to 2.13), held against ten
published traces of NVIDIA and AMD devices and of CPUs.
"""

import itertools
import marshal
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from headway.errors import ConfigError
from headway.explain import trace_json
from headway.explain.events import NONE, UNKNOWN_DEVICE, Column, Events, Kind, Operands, Trace
from headway.explain.trace_files import is_database, read_export, read_texts
from headway.report.quantity import LARGEST_INTEGER, integer

MAX_EVENTS = 4_000_000  # some 2 GB and a few minutes
_PROFILER_STEP = "ProfilerStep#"
_STEP_NUMBER = re.compile("[0-9]{1,18}")
_KINDS = {
    "kernel": int(Kind.KERNEL),
    "gpu_memcpy": int(Kind.MEMCPY),
    "gpu_memset": int(Kind.MEMSET),
    "cpu_op": int(Kind.OPERATOR),
    "user_annotation": int(Kind.ANNOTATION),
    "python_function": int(Kind.PYTHON),
    "cuda_runtime": int(Kind.LAUNCH),
    # Categories of torch 1.8 to 1.12.
    "Kernel": int(Kind.KERNEL),
    "Memcpy": int(Kind.MEMCPY),
    "Memset": int(Kind.MEMSET),
    "Runtime": int(Kind.LAUNCH),
}
# Spans that say nothing of an accelerator's work beside its kernels.
_SPANS = {"gpu_user_annotation", "cuda_sync", "overhead", "trace", "cuda_profiler_range", "collective_comm", "async"}
_THREE_DECIMALS = re.compile(r"(?:\d+\.\d{3},)*", flags=re.ASCII)
_COLLECTIVE = ("Collective name", "Process Group Name", "In msg nelems")
_BATCH = 1000  # events of a database at a time
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

        def of_process(events: Iterator[dict[str, Any]], facts: dict[str, Any], notes: list[str]) -> Trace:
            builder = _Builder(str(path))
            while batch := [*itertools.islice(events, _BATCH)]:
                builder.add(batch)
            return _trace(path, builder, facts, notes)

        return read_export(path, of_process)
    num_read = 0  # characters of all traces so far

    def parse(name: str, text: TextIO) -> Trace:
        nonlocal num_read
        builder, notes = _Builder(name), list[str]()
        values = trace_json.JsonTrace(text, name, notes, most=trace_json.MOST_CHARACTERS - num_read)
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
    try:
        exact = Decimal(microseconds)
        if not exact.is_finite() or exact.adjusted() > 15:
            raise ValueError(microseconds[:40])
        return integer(round(exact * 1000))
    except ArithmeticError as error:  # the errors of decimals are no ValueErrors
        raise ValueError(microseconds[:40]) from error


def _nanoseconds(microseconds: Sequence[int | str]) -> list[int]:
    """A column of timestamps in whole nanoseconds; nearly all files write each with three decimals."""
    text = "".join(f"{value}," for value in microseconds)
    if _THREE_DECIMALS.fullmatch(text):
        return [*map(int, text.replace(".", "").split(",")[:-1])]
    return [nanoseconds(value) for value in microseconds]


class _Numbers(dict[Any, int]):
    """Keys by the order in which they come first."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class _Builder:
    def __init__(self, name: str) -> None:
        self.operands: list[Operands] = []
        self._name = name
        self._foreign: Counter[tuple[str, Any]] = Counter()  # events of unknown categories, by category and process
        self._names, self._tracks, self._operands = _Numbers(), _Numbers(), _Numbers()
        self._blocks: list[Column] = []  # columns of some events each, shape (columns, events)
        self._num_events = 0

    @property
    def names(self) -> list[str]:
        """Every name that occurs, once."""
        return [*self._names]

    def add(self, events: Sequence[dict[str, Any]]) -> None:
        """Add the events of known categories.

        Raises:
            ConfigError: one of them cannot be read, or there are more than MAX_EVENTS.
        """
        spans = [event for event in events if event.get("ph") == "X"]
        kinds = [_KINDS.get(str(event.get("cat"))) or self._kind(event) for event in spans]
        rows = [(kind, event) for kind, event in zip(kinds, spans, strict=True) if kind is not None]
        self._num_events += len(rows)
        if self._num_events > MAX_EVENTS:
            raise ConfigError(
                f"{self._name} holds more than {MAX_EVENTS:,} events, the most that are read. Profile fewer steps "
                "(schedule(active=3)), or without with_stack."
            )
        try:
            self._blocks.append(self._columns(rows))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            for _, event in rows if len(rows) > 1 else ():
                self.add([event])  # finds the one that cannot be read
            raise ConfigError(
                f"{self._name} holds an event without a name or a time that can be read: {str(events[0])[:200]}. "
                "Export the trace again with export_chrome_trace."
            ) from error

    def _kind(self, event: dict[str, Any]) -> int | None:
        """Kind of an event whose category is not in the table; None of what is not read."""
        category = event.get("cat")
        if not isinstance(category, str):
            return None
        if category in _KINDS:
            return _KINDS[category]
        if category == "Operator":
            is_annotation = str(event.get("name")).startswith(_ANNOTATION_NAMES)
            return int(Kind.ANNOTATION if is_annotation else Kind.OPERATOR)
        if category.endswith(("_runtime", "_driver")):  # cuda_, xpu_, privateuse1_
            return int(Kind.LAUNCH)
        self._pass_over(category, event)
        return None

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

    def _columns(self, rows: Sequence[tuple[int, dict[str, Any]]]) -> Column:
        """Columns of events in the order of those of `Events`.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: an event lacks a field, or has no number in it.
        """
        kinds, events = [kind for kind, _ in rows], [event for _, event in rows]
        arguments = [event.get("args") or {} for event in events]
        starts = _nanoseconds([event["ts"] for event in events])
        lengths = _nanoseconds([event["dur"] for event in events])
        names = [event["name"] for event in events]
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a name that is no text")
        # On a device the stream stands for the thread; name, group and size tell which collective a kernel belongs to.
        threads = [(event["pid"], event["tid"]) for event in events]
        devices, groups, num_bytes = ([NONE] * len(events) for _ in range(3))
        last_of_device, copy, launch = int(Kind.MEMSET), int(Kind.MEMCPY), int(Kind.LAUNCH)
        correlations = [fields.get("correlation", NONE) for fields in arguments]
        for at, kind in enumerate(kinds):
            if correlations[at] == NONE and (kind <= last_of_device or kind == launch):
                # Some files link a launch and its kernel by this number alone; below NONE it is no correlation.
                number = arguments[at].get("External id")
                correlations[at] = NONE - number if isinstance(number, int) and number > 0 else NONE
        for at in [at for at, kind in enumerate(kinds) if kind <= last_of_device]:
            (process, thread), fields = threads[at], arguments[at]
            threads[at] = process, fields.get("stream", thread)
            devices[at] = fields.get("device", process)
            if "Collective name" in fields:
                groups[at] = self._names[" ".join(str(fields.get(key, "?")) for key in _COLLECTIVE)]
            if kinds[at] == copy:
                num_bytes[at] = fields.get("bytes", NONE)
        sequences = [fields.get("Sequence number", NONE) for fields in arguments]
        table = np.array(
            [
                kinds,
                [self._names[name] for name in names],
                starts,
                [start + max(0, length) for start, length in zip(starts, lengths, strict=True)],
                [self._tracks[thread] for thread in threads],
                devices,
                correlations,
                # -1 is written without its sign
                [number if isinstance(number, int) and abs(number) < 2**63 else NONE for number in sequences],
                [fields.get("Fwd thread id", NONE) for fields in arguments],
                groups,
                [self._number_of_operands(fields) if "Input Dims" in fields else NONE for fields in arguments],
                num_bytes,
            ],
            dtype=np.int64,
        )
        if rows and max(table.max(), -table.min()) > LARGEST_INTEGER:
            raise OverflowError("sums of its numbers would not fit 64 bits")
        return table

    def _number_of_operands(self, arguments: dict[str, Any]) -> int:
        operands = [arguments.get(key) for key in ("Input Dims", "Input type", "Input Strides")]
        number = self._operands[marshal.dumps(operands, 2)]  # version 2 writes equal values alike
        if number == len(self.operands):
            self.operands.append(Operands.read(*operands))
        return number

    def events(self) -> Events:
        columns = len(Events.__slots__)
        return Events(*np.concatenate([np.empty((columns, 0), dtype=np.int64), *self._blocks], axis=1))


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
    return ", ".join(sorted(names)) or UNKNOWN_DEVICE


def _capability(metadata: Mapping[str, Any]) -> tuple[int, int] | None:
    for device in metadata.get("deviceProperties") or ():
        if isinstance(device, Mapping) and "NVIDIA" in str(device.get("name")):
            major, minor = device.get("computeMajor"), device.get("computeMinor")
            if isinstance(major, int) and isinstance(minor, int):
                return major, minor
    return None
