"""A Kineto trace as columns: what ran on the device, what ran on the host, in whole nanoseconds.

Source: the fields are those of libkineto's output_json.cpp and of torch.profiler (torch 2.0 to 2.13), held against ten
published traces of NVIDIA and AMD devices and of CPUs.
"""

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.errors import ConfigError
from headway.explain.json_stream import read_trace_json
from headway.explain.operands import Operands
from headway.report.numbers import integer

Column = npt.NDArray[np.int64]

MAX_EVENTS = 4_000_000  # some 2 GB and a few minutes
NONE = -1  # in any column: the event does not say
PROFILER_STEP = "ProfilerStep#"
_STEP_NUMBER = re.compile("[0-9]{1,18}")


class Kind(IntEnum):
    """Kind of an event: the first three on the device, the others on the host."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    OPERATOR = 3
    ANNOTATION = 4
    PYTHON = 5
    LAUNCH = 6  # a call of the device's runtime or driver; synchronisations are among them


_KINDS = {
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET,
    "cpu_op": Kind.OPERATOR,
    "user_annotation": Kind.ANNOTATION,
    "python_function": Kind.PYTHON,
}


@dataclass(frozen=True, slots=True)
class Events:
    """Events as columns of one length; NONE where an event does not say.

    Attributes:
        kind: a `Kind`.
        name: index into the trace's names.
        start_ns: beginning on the trace's clock [ns].
        end_ns: end [ns], >= start_ns.
        track: of the host, which thread of which process; of the device, which stream.
        device: index of the device; NONE on the host.
        correlation: number that a launch and what it launched share.
        sequence: number that an operator of the forward pass and its backward share.
        forward_thread: 0 in forward, above 0 in backward: the profiler's number of the forward's thread.
        group: index into the trace's names of what a collective says of itself (kind, group, elements).
        operands: index into the trace's operands, of an operator whose shapes were recorded.
    """

    kind: Column
    name: Column
    start_ns: Column
    end_ns: Column
    track: Column
    device: Column
    correlation: Column
    sequence: Column
    forward_thread: Column
    group: Column
    operands: Column

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, which: npt.NDArray[Any]) -> "Events":
        """Events of a mask or in an order."""
        return Events(*(getattr(self, field)[which] for field in self.__slots__))


@dataclass(frozen=True, slots=True)
class Trace:
    """One process's trace.

    Attributes:
        path: the file.
        names: every name that occurs, once.
        operands: all that operators were called with, each once; empty where no shapes were recorded.
        device: kernels, copies and fills, by start.
        host: operators, annotations, Python functions and launches, by track, then start, the outer one first.
        steps: number, start and end [ns] of each `ProfilerStep#`, by start.
        step_track: the host thread of the steps; NONE without steps.
        rank: of the job, 0 where the file does not say.
        world_size: processes of the job, as the file says; None if it does not.
        device_name: as the file says; "CPU" where nothing ran on a device.
        headway: what Headway wrote beside the events; None in other people's traces.
        capability: compute capability of an NVIDIA device, such as (9, 0); None where the file does not say.
    """

    path: Path
    names: Sequence[str]
    operands: Sequence[Operands]
    device: Events
    host: Events
    steps: tuple[tuple[int, int, int], ...]
    step_track: int
    rank: int
    world_size: int | None
    device_name: str
    headway: Mapping[str, Any] | None
    capability: tuple[int, int] | None = None

    @property
    def is_cpu_only(self) -> bool:
        """Whether nothing ran on a device, so that operators of the host take the place of kernels."""
        return len(self.device) == 0


def read_trace(path: Path) -> Trace:
    """Read a trace of torch.profiler: .json or .json.gz, of torch 2.0 or newer, of any device.

    Args:
        path: the file.

    Raises:
        ConfigError: the file is no trace, is cut off, holds nothing that took time, or more than MAX_EVENTS events.
    """
    builder = _Builder(path)
    metadata = read_trace_json(path, builder.add)
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
        index: int(name.removeprefix(PROFILER_STEP))
        for index, name in enumerate(names)
        if name.startswith(PROFILER_STEP) and _STEP_NUMBER.fullmatch(name, len(PROFILER_STEP))
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
