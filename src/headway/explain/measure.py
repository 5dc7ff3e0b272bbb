"""One step measured: which line every moment of its window belongs to. All that a trace tells without a workload."""

from dataclasses import dataclass

import numpy as np

from headway.explain.attribute import Attribution, Phase, attribute
from headway.explain.classes import Work
from headway.explain.idle import IdleCauses, IdleTime
from headway.explain.operands import Operands
from headway.explain.steps import StepWindow, step_windows
from headway.explain.timeline import Segments, divide
from headway.explain.trace import NONE, Column, Events, Kind, Trace

_PRIORITIES = {Work.MATMUL: 0, Work.MEMORY: 1, Work.UNKNOWN: 1, Work.COMMUNICATION: 2, Work.COPY: 3}
_LEVEL = 100_000  # of the host's operators: deeper nesting than this has not been seen
ASIDE = (Phase.LOGGING, Phase.CHECKPOINT, Phase.EVALUATION, Phase.COMPILE)
MATMUL = "matmul"
_LINES = {
    Work.MATMUL: MATMUL,
    Work.MEMORY: "memory",
    Work.COMMUNICATION: "communication",
    Work.COPY: "copies",
    Work.UNKNOWN: "unexplained",
}


@dataclass(frozen=True, slots=True)
class OwnedTime:
    """Time that one event owned of a step, in which it ran and nothing more important did.

    Attributes:
        event: index of the event.
        ns: time [ns], above 0.
        line: key of the line that it counts towards.
    """

    event: int
    ns: int
    line: str


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step's window, divided: `owned` and `idle` add up to it exactly.

    Attributes:
        window: the step's time.
        owned: events that owned time.
        idle: the rest, by cause.
    """

    window: StepWindow
    owned: tuple[OwnedTime, ...]
    idle: IdleTime


@dataclass(frozen=True, slots=True)
class MeasuredTrace:
    """A trace with all its steps measured.

    Attributes:
        trace: the columns.
        attribution: what each event was for.
        steps: all steps, edges included.
        notes: what a reader must know of the trace, as sentences.
    """

    trace: Trace
    attribution: Attribution
    steps: tuple[MeasuredStep, ...]
    notes: tuple[str, ...]

    @property
    def events(self) -> Events:
        """The events that `OwnedTime.event` counts: those of the device, of the host where there is no device."""
        return self.trace.host if self.trace.is_cpu_only else self.trace.device

    def operator_of(self, event: int) -> int:
        """Index of the host event of the operator that launched an event, or that it is; NONE where none is known."""
        launch = int(self.attribution.launch[event])
        return NONE if launch == NONE else self.attribution.contexts[launch].operator

    def operands_of(self, event: int) -> Operands | None:
        """Operands that the operator was called with; None where that was not recorded."""
        operator = self.operator_of(event)
        index = NONE if operator == NONE else int(self.trace.host.operands[operator])
        return None if index == NONE else self.trace.operands[index]


def measure(trace: Trace, *, as_one_step: bool = False) -> MeasuredTrace:
    """Divide every step of a trace.

    Args:
        trace: the trace.
        as_one_step: take it as one step.

    Raises:
        ConfigError: the trace has no steps.
    """
    attribution = attribute(trace)
    notes: list[str] = []
    which = _operators(trace, attribution) if trace.is_cpu_only else _of_one_device(trace, notes)
    windows = step_windows(trace, attribution, which, as_one_step=as_one_step)
    causes = IdleCauses(trace, attribution, which)
    events = (trace.host if trace.is_cpu_only else trace.device).take(which)
    priority = _priorities(trace, attribution, which)
    steps = []
    for window in windows:
        pieces = divide(events.start_ns, events.end_ns, priority, (window.start_ns, window.end_ns))
        idle = causes.split(pieces, (window.start_ns, window.end_ns))
        steps.append(MeasuredStep(window, _owned(pieces, which, attribution), idle))
    return MeasuredTrace(trace, attribution, tuple(steps), tuple(notes))


def _of_one_device(trace: Trace, notes: list[str]) -> Column:
    """Events of the device that worked longest: a process has one, as a rule."""
    numbers, positions = np.unique(trace.device.device, return_inverse=True)
    busy = np.bincount(positions, weights=trace.device.end_ns - trace.device.start_ns)
    chosen = int(np.argmax(busy))
    if len(numbers) > 1:
        notes.append(f"the trace has {len(numbers)} devices; this is device {numbers[chosen]}, which worked longest.")
    return np.flatnonzero(positions == chosen)


def _operators(trace: Trace, attribution: Attribution) -> Column:
    """Find what takes a kernel's place on a CPU: operators of the steps' thread, and collectives of any thread."""
    track = trace.step_track
    if track == NONE:
        tracks, counts = np.unique(trace.host.track[trace.host.kind == Kind.OPERATOR], return_counts=True)
        track = int(tracks[np.argmax(counts)]) if len(tracks) else NONE
    communicates = np.array([work is Work.COMMUNICATION for work in attribution.work])
    computes = np.array([work is not Work.HOST for work in attribution.work])
    return np.flatnonzero(((trace.host.track == track) & computes) | communicates)


def _priorities(trace: Trace, attribution: Attribution, which: Column) -> Column:
    chosen = which.tolist()
    if not trace.is_cpu_only:
        return np.array([_PRIORITIES[attribution.work[i]] for i in chosen], dtype=np.int64)
    communication = Work.COMMUNICATION
    return np.array(  # of operators around each other the inner one runs; a collective is waited for
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
