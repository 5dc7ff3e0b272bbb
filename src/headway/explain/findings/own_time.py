"""Own time of a step on a CPU, without the profiler's additions and without waiting for a core.

The host does the work itself there, so a profile stretches what it shows: each operator and each module's name costs
some microseconds, and a step of many small operators takes twice its time. `headway.profile` measures what one of
either costs at least, and how much longer each phase of the step takes than before. Where several processes share
cores, the system counts how long the loop's thread waited for one; that time is no operator's.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.explain.attribution import Phase
from headway.explain.events import NONE, Column, Kind
from headway.explain.measurement import MeasuredStep, MeasuredTrace

# Times that calls in a step cost what they cost one after the other: work in between takes the profiler's own code and
# data out of the caches. Seen in 12 loops: 2 to 4 times, in forward up to 6; and 2 is taken where nobody measured.
_LEAST_TIMES, _USUAL_TIMES, _MOST_TIMES = 1.0, 2.0, 6.0
_PHASES = {
    Phase.BACKWARD: "backward",
    Phase.RECOMPUTED: "backward",
    Phase.OPTIMIZER: "optimizer",
    Phase.DATA_WAIT: "data",
}
_BETWEEN = "between"  # code of the loop itself
_GAPS = ("input", "loss", "gradients", "after")


@dataclass(frozen=True, slots=True)
class AddedCost:
    """Time that a profile adds on the host."""

    operator_ns: float = 0.0  # to an operator's call, of many in a row [ns]
    module_ns: float = 0.0  # to a module's, which is named at its begin and its end [ns]
    # to each phase of a step, as it was measured against the steps before [ns]
    phases_ns: Mapping[str, int] = field(default_factory=dict)

    def times(self, phase: str, calls_ns: float) -> float:
        """Factor between the cost of calls in a phase and in a row, where calls in a row cost so much [ns]."""
        parts = _GAPS if phase == _BETWEEN else (phase,)
        measured = [self.phases_ns[part] for part in parts if part in self.phases_ns]
        if not measured or not calls_ns:
            return _USUAL_TIMES
        return min(_MOST_TIMES, max(_LEAST_TIMES, sum(measured) / calls_ns))


class OwnTime:
    """Time to be taken off a step's events.

    Args:
        measured: the trace, of a CPU.
        step: one of its steps.
        cost: of the profile.
        preempted: begin, end and how much of it the loop's thread had no core [ns].

    Attributes:
        of_event: what to take off the own time of each event, by its index [ns].
        of_gap: what to take off the gap before each event, by its index [ns].
        of_phase: what to take off idle time by its phase [ns].
    """

    def __init__(
        self,
        measured: MeasuredTrace,
        step: MeasuredStep,
        cost: AddedCost,
        preempted: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        self._measured, self._step, self._cost = measured, step, cost
        host, window = measured.trace.host, step.window
        inside = (host.start_ns >= window.start_ns) & (host.start_ns < window.end_ns)
        recorded = (host.kind == Kind.OPERATOR) | (host.kind == Kind.ANNOTATION)
        self._events: Column = np.flatnonzero(inside & recorded & (host.track == measured.loop_track))
        self.of_event: Counter[int] = Counter()
        self.of_gap: Counter[int] = Counter()
        self.of_phase: Counter[Phase] = Counter()
        self._take_off_profile()
        self._take_off_waits(preempted)

    def _take_off_profile(self) -> None:
        """Charge each event's cost to the operator that called the event, or to the gap before it."""
        host, attribution = self._measured.trace.host, self._measured.attribution
        contexts = attribution.contexts
        # Costs of each call in a row, and of all calls of a phase, against which its measured time is held.
        costs: dict[int, tuple[str, float]] = {}
        calls_ns: defaultdict[str, float] = defaultdict(float)
        for index in self._events.tolist():
            phase = _PHASES.get(attribution.phase[index])
            phase = phase or ("forward" if attribution.passes[index] != NONE else _BETWEEN)
            is_operator = host.kind[index] == Kind.OPERATOR
            costs[index] = phase, self._cost.operator_ns if is_operator else self._cost.module_ns
            calls_ns[phase] += costs[index][1]
        times = {phase: self._cost.times(phase, ns) for phase, ns in calls_ns.items()}
        gaps = np.array(sorted(set(self._step.idle.late_before) - {NONE}), dtype=np.int64)
        gaps = gaps[np.argsort(host.start_ns[gaps], kind="stable")]
        gap_starts = host.start_ns[gaps]
        of_event: defaultdict[int, float] = defaultdict(float)
        of_gap: defaultdict[int, float] = defaultdict(float)
        for index, (phase, call_ns) in costs.items():
            ns = call_ns * times[phase]
            # Profilers work at an event's begin before they note its time, so the cost is its caller's.
            around = contexts[contexts[index].outer].operator if contexts[index].outer != NONE else NONE
            place = int(np.searchsorted(gap_starts, host.start_ns[index])) if around == NONE else 0
            if around != NONE:
                of_event[around] += ns
            elif place < len(gaps):
                of_gap[int(gaps[place])] += ns
        self.of_event.update({index: round(ns) for index, ns in of_event.items()})
        self.of_gap.update({index: round(ns) for index, ns in of_gap.items()})

    def _take_off_waits(self, preempted: Sequence[tuple[int, int, int]]) -> None:
        """Charge the time without a core to the events and gaps of its samples, by how long each lay in one."""
        window = self._step.window
        waits = [wait for wait in preempted if wait[1] > window.start_ns and wait[0] < window.end_ns]
        if not waits:
            return
        lost = _Lost(waits)
        host = self._measured.trace.host
        for owned in self._step.owned:
            start, end = int(host.start_ns[owned.event]), int(host.end_ns[owned.event])
            # An event with others in it has a part of the waits, as its own time is a part of its length.
            self.of_event[owned.event] += round(lost.between(start, end) * min(1.0, owned.ns / max(1, end - start)))
        for event, ns in self._step.idle.late_before.items():
            end = window.end_ns if event == NONE else int(host.start_ns[event])
            self.of_gap[event] += round(lost.between(end - ns, end))
        for phase, ns in self._step.idle.by_phase.items():
            spans = self._spans(phase)
            lengths_ns = sum(end - start for start, end in spans)
            lost_ns = sum(lost.between(start, end) for start, end in spans)
            self.of_phase[phase] += round(lost_ns * min(1.0, ns / max(1, lengths_ns)))

    def _spans(self, phase: Phase) -> list[tuple[int, int]]:
        """Begin and end of the outermost annotations of a phase in the step's thread [ns]."""
        host, contexts = self._measured.trace.host, self._measured.attribution.contexts
        return [
            (int(host.start_ns[index]), int(host.end_ns[index]))
            for index in self._events.tolist()
            if contexts[index].phase is phase
            and (contexts[index].outer == NONE or contexts[contexts[index].outer].phase is not phase)
        ]


class _Lost:
    """Time without a core up to each moment, spread evenly over the time between two samples."""

    def __init__(self, waits: Sequence[tuple[int, int, int]]) -> None:
        moments = np.unique([moment for begin, end, _ in waits for moment in (begin, end)])
        rates = np.zeros(len(moments))
        for begin, end, ns in waits:
            first, last = np.searchsorted(moments, [begin, end])
            rates[first:last] += ns / max(1, end - begin)
        # No more than all of a time is lost, however many samples say so.
        self._moments, lengths = moments, np.diff(moments, append=moments[-1])
        self._sums = np.concatenate([[0.0], np.cumsum(np.minimum(rates, 1.0) * lengths)])[:-1]

    def between(self, start_ns: int, end_ns: int) -> float:
        """Time of a span that was lost [ns]."""
        before, after = np.interp([start_ns, end_ns], self._moments, self._sums)
        return float(after - before)
