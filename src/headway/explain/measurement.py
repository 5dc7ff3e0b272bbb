"""Steps measured: their windows divided among events that overlap, and idle time by its cause.

All that a trace tells without a workload. At every moment of a step's window the most important event that runs owns
the time. A gap is the host's fault where the event that ends it was launched after the gap began; where it had been
launched before, the device waited for itself: for another stream, or between two kernels.
"""

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from headway.explain.attribution import COMPILING, Attribution, Phase, attribute
from headway.explain.events import NONE, Column, Events, Kind, Operands, Trace
from headway.explain.kernels import Work
from headway.explain.windows import StepWindow, step_windows
from headway.meter.step_phases import REST

_NO_STEPS_NOTE = (
    "the trace has no steps, so all of it is taken as one. Call profiler.step() after each step, with a schedule (for "
    "Nsight Systems, open an NVTX range named step N), to see them."
)
_COMPUTES = {Work.MATMUL, Work.MEMORY, Work.UNKNOWN}
_PRIORITIES = {Work.MATMUL: 0, Work.MEMORY: 1, Work.UNKNOWN: 1, Work.COMMUNICATION: 2, Work.COPY: 3}
_LEVEL = 100_000  # nesting of the host's operators; deeper nesting has not been seen
ASIDE = (Phase.LOGGING, Phase.CHECKPOINT, Phase.EVALUATION, Phase.COMPILE)
MATMUL = "matmul"
LOOP = "loop:"  # begins the annotations of phases that a loop names
_LINES = {
    Work.MATMUL: MATMUL,
    Work.MEMORY: "memory",
    Work.COMMUNICATION: "communication",
    Work.COPY: "copies",
    Work.UNKNOWN: "unexplained",
}
# Calls of the runtime that block the host until the device has finished some work; cudaFree waits for all of it.
_WAITS = re.compile(r"\w+Synchronize(_ptsz|_v\d+)?|(cuda|hip)(Memcpy(2D|3D)?|MemcpyWithStream|Free|Malloc)|cuMemcpy\w*")
# Calls that only queue a copy, unless its memory is pageable: then they return when it has been read.
_QUEUED_COPIES, _QUEUED_NS = re.compile(r"(cuda|hip|cu)Memcpy\w*Async\w*"), 1_000_000
# Gaps before what had been launched already. A device takes 1 to 3 us from one kernel to the next of a stream, as a
# profile of an H200 shows; one of 10 us has another cause.
_NEXT_KERNEL, _LONGER = "from one kernel to the next", "gaps over 10 us"
_NEXT_KERNEL_NS = 10_000
_ANNOTATED_PHASES = {Phase.DATA_WAIT, Phase.LOGGING, Phase.CHECKPOINT, Phase.EVALUATION, Phase.COMPILE}


@dataclass(frozen=True, slots=True)
class Segments:
    """Pieces of a window, without gaps and overlaps, in order."""

    start_ns: Column  # beginning of each piece [ns]
    end_ns: Column  # end of each piece [ns]; the next begins there
    owner: Column  # index of the event that owns it; NONE where none ran

    @property
    def ns(self) -> Column:
        """Length of each piece [ns]; their sum is the window's."""
        return self.end_ns - self.start_ns

    def within(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Number of each piece that overlaps a span, in order, and the time that it has in common with it [ns]."""
        first = int(np.searchsorted(self.end_ns, start, side="right"))
        for i in range(first, int(np.searchsorted(self.start_ns, end, side="left"))):
            yield i, min(end, int(self.end_ns[i])) - max(start, int(self.start_ns[i]))

    def of_none(self) -> list[tuple[int, int]]:
        """The pieces in which no event ran."""
        idle = self.owner == NONE
        return list(zip(self.start_ns[idle].tolist(), self.end_ns[idle].tolist(), strict=True))


@dataclass(slots=True)
class IdleTime:
    """Idle time of a window by cause [ns]."""

    # while the host waited for data, logged, evaluated, wrote a checkpoint or compiled
    by_phase: Counter[Phase] = field(default_factory=Counter)
    # after the host had waited for the device, by the operator that waited
    by_wait: Counter[str] = field(default_factory=Counter)
    # the host had not launched anything, for none of these reasons, by the event that it launched late; NONE where
    # nothing followed
    late_before: Counter[int] = field(default_factory=Counter)
    # the next event had been launched before, by the length of the gap
    launched_before: Counter[str] = field(default_factory=Counter)

    @property
    def other_ns(self) -> int:
        """Time in which the next event had been launched before [ns]."""
        return self.launched_before.total()

    @property
    def host_late_ns(self) -> int:
        """Time that the host was late, for no other reason [ns]."""
        return sum(self.late_before.values())


@dataclass(frozen=True, slots=True)
class OwnedTime:
    """Time that one event owned of a step, in which it ran and nothing more important did."""

    event: int  # index of the event
    ns: int  # time [ns], above 0
    line: str  # key of the line that it counts towards


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step's window, divided: `owned` and `idle` add up to it exactly."""

    window: StepWindow  # the step's time
    owned: tuple[OwnedTime, ...]  # events that owned time
    idle: IdleTime  # the rest, by cause
    # the same time by the phases that the loop names [ns]; empty where it names none
    loop_phases: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MeasuredTrace:
    """A trace with all its steps measured."""

    trace: Trace  # the columns
    attribution: Attribution  # purpose of each event
    loop_track: int  # the loop's thread: that of the steps, without steps the one that launched most; NONE without any
    steps: tuple[MeasuredStep, ...]  # all steps, edges included
    notes: tuple[str, ...]  # remarks on the trace, as sentences

    @property
    def events(self) -> Events:
        """The events that `OwnedTime.event` counts: the device's, or the host's if there is no device."""
        return self.trace.host if self.trace.is_cpu_only else self.trace.device

    def duration_of(self, event: int) -> int:
        """Duration of an event [ns]."""
        return int(self.events.end_ns[event] - self.events.start_ns[event])

    def operator_of(self, event: int) -> int:
        """Index of the host event of the operator that launched an event, or that it is; NONE where none is known."""
        launch = int(self.attribution.launch[event])
        return NONE if launch == NONE else self.attribution.contexts[launch].operator

    def callers_of(self, operators: Iterable[int]) -> set[int]:
        """Find the events of the host around some of them, which ran in the course of these: indices of host events."""
        contexts = self.attribution.contexts
        callers: set[int] = set()
        for operator in operators:
            outer = contexts[operator].outer
            while outer != NONE and outer not in callers:
                callers.add(outer)
                outer = contexts[outer].outer
        return callers

    def operands_of(self, event: int) -> Operands | None:
        """Operands that the operator was called with; None if the trace has none of it."""
        operator = self.operator_of(event)
        index = NONE if operator == NONE else int(self.trace.host.operands[operator])
        return None if index == NONE else self.trace.operands[index]


def measure(trace: Trace, *, as_one_step: bool = False) -> MeasuredTrace:
    """Divide every step of a trace.

    Raises:
        ConfigError: nothing runs in its steps.
    """
    attribution = attribute(trace)
    notes = [*trace.notes, *([] if trace.steps or as_one_step else [_NO_STEPS_NOTE])]
    track = _loop_track(trace, attribution)
    which = _operators(trace, attribution, track) if trace.is_cpu_only else _of_one_device(trace, notes)
    computes = [work in _COMPUTES for work in attribution.work]
    windows = step_windows(trace, attribution.launch, computes, which, as_one_step=as_one_step)
    causes = _IdleCauses(trace, attribution, which)
    loop_phases = _LoopPhases(trace, attribution)
    events = (trace.host if trace.is_cpu_only else trace.device).take(which)
    priority = _priorities(trace, attribution, which)
    steps = []
    for window in windows:
        pieces = divide(events.start_ns, events.end_ns, priority, (window.start_ns, window.end_ns))
        idle = causes.split(pieces, (window.start_ns, window.end_ns))
        steps.append(MeasuredStep(window, _owned(pieces, which, attribution), idle, loop_phases.split(pieces, which)))
    return MeasuredTrace(trace, attribution, track, tuple(steps), tuple(notes))


def _of_one_device(trace: Trace, notes: list[str]) -> Column:
    """Events of the device that worked longest: a process has one, as a rule."""
    numbers, positions = np.unique(trace.device.device, return_inverse=True)
    busy = np.bincount(positions, weights=trace.device.end_ns - trace.device.start_ns)
    chosen = int(np.argmax(busy))
    if len(numbers) > 1:
        notes.append(f"the trace has {len(numbers)} devices; this is device {numbers[chosen]}, which worked longest.")
    return np.flatnonzero(positions == chosen)


def _loop_track(trace: Trace, attribution: Attribution) -> int:
    """Find the thread of the steps; without steps the one that launched most, or called most operators on a CPU."""
    if trace.step_track != NONE:
        return trace.step_track
    calls = trace.host.kind == Kind.OPERATOR if trace.is_cpu_only else attribution.launch[attribution.launch != NONE]
    tracks, counts = np.unique(trace.host.track[calls], return_counts=True)
    return int(tracks[np.argmax(counts)]) if len(tracks) else NONE


def _operators(trace: Trace, attribution: Attribution, track: int) -> Column:
    """Find the events in a kernel's place on a CPU: operators of the loop's thread, and collectives of any thread."""
    communicates = np.array([work is Work.COMMUNICATION for work in attribution.work])
    computes = np.array([work is not Work.HOST for work in attribution.work])
    return np.flatnonzero(((trace.host.track == track) & computes) | communicates)


def _priorities(trace: Trace, attribution: Attribution, which: Column) -> Column:
    chosen = which.tolist()
    if not trace.is_cpu_only:
        return np.array([_PRIORITIES[attribution.work[i]] for i in chosen], dtype=np.int64)
    communication = Work.COMMUNICATION
    return np.array(  # the inner of two nested operators runs; a collective comes last, because it waits
        [_LEVEL * (attribution.work[i] is communication) - attribution.contexts[i].depth for i in chosen],
        dtype=np.int64,
    )


def _owned(pieces: Segments, which: Column, attribution: Attribution) -> tuple[OwnedTime, ...]:
    busy = pieces.owner != NONE
    owners, positions = np.unique(pieces.owner[busy], return_inverse=True)
    ns = np.zeros(len(owners), dtype=np.int64)
    np.add.at(ns, positions, pieces.ns[busy])
    events = which[owners].tolist()
    return tuple(
        OwnedTime(event, spent, _line(attribution.work[event], attribution.phase[event]))
        for event, spent in zip(events, ns.tolist(), strict=True)
    )


def _line(work: Work, phase: Phase) -> str:
    if phase in ASIDE:
        return "aside"
    if work in (Work.COMMUNICATION, Work.COPY):
        return _LINES[work]
    if phase is Phase.DATA_WAIT:
        return "idle.data"
    return "optimizer" if phase is Phase.OPTIMIZER else _LINES[work]


def divide(start_ns: Column, end_ns: Column, priority: Column, window: tuple[int, int]) -> Segments:
    """Divide a window among events by priority.

    Args:
        start_ns: beginnings of the events [ns], in any order, some outside the window.
        end_ns: their ends [ns].
        priority: a lower number goes first; of equals the one that began first, then the one that stands first.
        window: beginning and end [ns].

    >>> pieces = divide(np.array([0, 4]), np.array([6, 8]), np.array([1, 0]), (0, 10))
    >>> list(zip(pieces.ns.tolist(), pieces.owner.tolist()))
    [(4, 0), (4, 1), (2, -1)]
    """
    begin, finish = window
    inside = np.flatnonzero((end_ns > begin) & (start_ns < finish) & (end_ns > start_ns))
    inside = inside[np.argsort(start_ns[inside], kind="stable")]
    starts = np.maximum(start_ns[inside], begin).tolist()
    ends = np.minimum(end_ns[inside], finish).tolist()
    running: list[tuple[int, int, int, int]] = []  # priority, order of beginning, end, index
    cuts: list[tuple[int, int]] = []  # ends of pieces, and their owners
    at = begin
    for order, (index, rank, next_start) in enumerate(
        [*zip(inside.tolist(), priority[inside].tolist(), starts, strict=True), (NONE, 0, finish)]
    ):
        while at < next_start:
            while running and running[0][2] <= at:
                heapq.heappop(running)
            until = min(running[0][2], next_start) if running else next_start
            cuts.append((until, running[0][3] if running else NONE))
            at = until
        if index != NONE:
            heapq.heappush(running, (rank, order, ends[order], index))
    table = np.array(cuts, dtype=np.int64).reshape(-1, 2)
    return Segments(np.concatenate([[begin], table[:-1, 0]]) if len(table) else table[:, 0], table[:, 0], table[:, 1])


class _LoopPhases:
    """Phases that the loop names in one trace (`loop:NAME`), by the host's clock; the innermost one lasts.

    What runs is in the phase in which the host launched it; a gap is in those that the host was in meanwhile.
    """

    def __init__(self, trace: Trace, attribution: Attribution) -> None:
        self._starts, self._launch = trace.host.start_ns, attribution.launch
        names = {i: name.removeprefix(LOOP) for i, name in enumerate(trace.names) if name.startswith(LOOP)}
        chosen = np.flatnonzero((trace.host.kind == Kind.ANNOTATION) & np.isin(trace.host.name, list(names)))
        chosen = chosen[np.argsort(trace.host.start_ns[chosen], kind="stable")]
        start_ns, end_ns = trace.host.start_ns[chosen], trace.host.end_ns[chosen]
        # The innermost of the phases that last is the one that began last.
        span = (int(start_ns.min()), int(end_ns.max())) if len(chosen) else (0, 0)
        self._pieces = divide(start_ns, end_ns, -np.arange(len(chosen)), span)
        of_annotation = [names[name] for name in trace.host.name[chosen].tolist()]
        self._names = [REST if owner == NONE else of_annotation[owner] for owner in self._pieces.owner.tolist()]

    def split(self, segments: Segments, which: Column) -> dict[str, int]:
        """Split the pieces of a step's window by phase [ns]; they add up to it. Empty where the loop names none."""
        spent: Counter[str] = Counter()
        columns = (segments.start_ns, segments.end_ns, segments.owner)
        for start, end, owner in zip(*(column.tolist() for column in columns), strict=True) if self._names else ():
            launch = NONE if owner == NONE else int(self._launch[which[owner]])
            if launch != NONE:
                moment = int(self._starts[launch])
                spent[self._at(moment)] += end - start
                continue
            left = end - start
            for i, ns in self._pieces.within(start, end):
                spent[self._names[i]] += ns
                left -= ns
            spent[REST] += left
        return dict(spent)

    def _at(self, moment: int) -> str:
        place = int(np.searchsorted(self._pieces.end_ns, moment, side="right"))
        is_inside = place < len(self._names) and int(self._pieces.start_ns[place]) <= moment
        return self._names[place] if is_inside else REST


class _IdleCauses:
    """Causes of the gaps between some events of one trace."""

    def __init__(self, trace: Trace, attribution: Attribution, which: Column) -> None:
        self._trace = trace
        self._attribution = attribution
        starts = (trace.host if trace.is_cpu_only else trace.device).start_ns[which]
        order = np.argsort(starts, kind="stable")
        self._events, self._starts = which[order], starts[order]
        host, contexts = trace.host, attribution.contexts
        compiling = [i for i, name in enumerate(trace.names) if name.endswith(COMPILING)]
        tells = (host.kind == Kind.ANNOTATION) | np.isin(host.name, compiling)
        annotations = [i for i in np.flatnonzero(tells).tolist() if contexts[i].phase in _ANNOTATED_PHASES]
        self._annotations = np.array(annotations, dtype=np.int64)
        self._depth = np.array([-contexts[i].depth for i in annotations], dtype=np.int64)
        waiting, queues = (
            np.isin(host.name, [i for i, name in enumerate(trace.names) if words.fullmatch(name)])
            for words in (_WAITS, _QUEUED_COPIES)
        )
        blocks = queues & (host.end_ns - host.start_ns >= _QUEUED_NS)
        waits = np.flatnonzero((host.kind == Kind.LAUNCH) & (waiting | blocks))
        self._waits = waits[np.argsort(host.start_ns[waits], kind="stable")]
        self._longest_wait_ns = int((host.end_ns[waits] - host.start_ns[waits]).max(initial=0))

    def split(self, segments: Segments, window: tuple[int, int]) -> IdleTime:
        """Split the pieces of a window in which nothing ran; the causes add up to them exactly."""
        idle = IdleTime()
        phases = self._phases(window)
        for start, end in segments.of_none():
            # An event that was launched before the gap began was not late: the device waited for itself.
            ends_it = self._event_at(end)
            if not self._is_late(start, ends_it):
                idle.launched_before[_NEXT_KERNEL if end - start <= _NEXT_KERNEL_NS else _LONGER] += end - start
                continue
            # Time in which the host did something that is annotated has that for its cause.
            left = end - start
            for i, spent in phases.within(start, end):
                owner = int(phases.owner[i])
                phase = self._attribution.contexts[owner].phase if owner != NONE else None
                if phase is not None:
                    idle.by_phase[phase] += spent
                    left -= spent
            # The rest comes of a wait that the host was in when the device ran out of work, else of late launches.
            waited = self._wait_in(start, end)
            if waited is None:
                idle.late_before[ends_it] += left
            else:
                idle.by_wait[waited] += left
        return idle

    def _phases(self, window: tuple[int, int]) -> Segments:
        """Find the phase that the host annotated at each moment: the innermost one."""
        host = self._trace.host
        annotations = self._annotations
        pieces = divide(host.start_ns[annotations], host.end_ns[annotations], self._depth, window)
        owner = np.where(pieces.owner == NONE, NONE, annotations[pieces.owner] if len(annotations) else NONE)
        return Segments(pieces.start_ns, pieces.end_ns, owner)

    def _event_at(self, moment: int) -> int:
        """The first event that begins then or later."""
        place = int(np.searchsorted(self._starts, moment, side="left"))
        return int(self._events[place]) if place < len(self._events) else NONE

    def _is_late(self, start: int, ends_it: int) -> bool:
        if self._trace.is_cpu_only or ends_it == NONE:
            return True
        launch = int(self._attribution.launch[ends_it])
        return launch != NONE and int(self._trace.host.start_ns[launch]) >= start

    def _wait_in(self, start: int, end: int) -> str | None:
        """Name the call that the host waited in when the device ran out of work, or else for most of the gap."""
        host = self._trace.host
        longest, longest_ns = NONE, (end - start) // 2
        i = int(np.searchsorted(host.start_ns[self._waits], end, side="left")) - 1
        while i >= 0 and int(host.start_ns[self._waits[i]]) + self._longest_wait_ns >= start:
            at = int(self._waits[i])
            begin, finish = int(host.start_ns[at]), int(host.end_ns[at])
            if begin < start <= finish:
                return self._call(at)
            if min(finish, end) - max(begin, start) > longest_ns:
                longest, longest_ns = at, min(finish, end) - max(begin, start)
            i -= 1
        return None if longest == NONE else self._call(longest)

    def _call(self, at: int) -> str:
        context = self._attribution.contexts[at]
        call = self._trace.names[self._trace.host.name[at]]
        operator = self._trace.names[self._trace.host.name[context.operator]] if context.operator != NONE else ""
        text = f"{operator} ({call})" if operator else call
        return f"{text} in {context.module}" if context.module else text
