"""Collectives of several ranks matched: how long the transfer takes, and how long a rank waits for the slowest.

A collective ends on all ranks at about the same time, and on the last rank that comes it takes as long as the transfer.
So the shortest of the ranks' durations is the transfer, and what a rank's own takes beyond it is waiting.
"""

from collections import defaultdict
from collections.abc import Sequence

from headway.explain.classes import Work
from headway.explain.measure import MeasuredStep, MeasuredTrace
from headway.explain.trace import NONE


def waiting_in(measured: MeasuredTrace, step: MeasuredStep, others: Sequence[MeasuredTrace]) -> int | None:
    """Time of a step's exposed communication that is waiting [ns]; None where no collective is found on another rank.

    Args:
        measured: the rank's trace.
        step: one of its steps.
        others: traces of other ranks of the job.
    """
    own = _collectives(measured, step.window.step)
    transfer: dict[int, int] = {}
    for other in others:
        there = _collectives(other, step.window.step)
        for said, events in own.items():
            if len(there.get(said, ())) == len(events):  # else one trace lacks some, and which is not known
                for event, event_there in zip(events, there[said], strict=True):
                    shortest = min(_duration(measured, event), _duration(other, event_there))
                    transfer[event] = min(shortest, transfer.get(event, shortest))
    if not transfer:
        return None
    return sum(
        min(owned.ns, _duration(measured, owned.event) - transfer[owned.event])
        for owned in step.owned
        if owned.line == "communication" and owned.event in transfer
    )


def _collectives(measured: MeasuredTrace, number: int) -> dict[str, list[int]]:
    """Collectives that begin in a step, by what they are, in order."""
    events, names = measured.events, measured.trace.names
    found: dict[str, list[int]] = defaultdict(list)
    for step in measured.steps:
        if step.window.step == number:
            within = (events.start_ns >= step.window.start_ns) & (events.start_ns < step.window.end_ns)
            for i in within.nonzero()[0].tolist():
                if measured.attribution.work[i] is Work.COMMUNICATION:
                    group = int(events.group[i])
                    found[names[group if group != NONE else int(events.name[i])]].append(i)
    return found


def _duration(measured: MeasuredTrace, event: int) -> int:
    return int(measured.events.end_ns[event] - measured.events.start_ns[event])
