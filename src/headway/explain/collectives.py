"""Collectives of several ranks matched: how long the transfer takes, and how long a rank waits for the slowest.

A collective ends on all ranks at about the same time, and on the last rank that comes it takes as long as the transfer.
So the shortest of the ranks' durations is the transfer, and what a rank's own takes beyond it is waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.explain.classes import Work
from headway.explain.measure import MeasuredStep, MeasuredTrace
from headway.explain.trace import NONE


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of one rank.

    Attributes:
        measured: the rank's trace.
        by_step: by number of the step in which they begin, and by what they say of themselves, in order.
    """

    measured: MeasuredTrace
    by_step: dict[int, dict[str, list[int]]]

    def duration_of(self, event: int) -> int:
        """Duration of a collective [ns]."""
        return int(self.measured.events.end_ns[event] - self.measured.events.start_ns[event])


def find_collectives(measured: MeasuredTrace) -> Collectives:
    """Find the collectives of each step of a trace."""
    events, names = measured.events, measured.trace.names
    collectives = np.array(
        [i for i, work in enumerate(measured.attribution.work) if work is Work.COMMUNICATION], dtype=int
    )
    starts = events.start_ns[collectives]
    by_step: dict[int, dict[str, list[int]]] = {}
    for step in measured.steps:
        there = by_step.setdefault(step.window.step, {})
        for i in collectives[(starts >= step.window.start_ns) & (starts < step.window.end_ns)].tolist():
            group = int(events.group[i])
            there.setdefault(names[group if group != NONE else int(events.name[i])], []).append(i)
    return Collectives(measured, by_step)


def waiting_in(own: Collectives, step: MeasuredStep, others: Sequence[Collectives]) -> list[int] | None:
    """Compute how long a rank waits for each of the others in a step's exposed communication [ns].

    A collective takes the shortest time on the rank that came last, and for that rank the others wait. None where no
    other rank has the same collectives.

    Args:
        own: collectives of the rank.
        step: one of its steps.
        others: collectives of other ranks of the job.
    """
    number = step.window.step
    transfer: dict[int, int] = {}
    last: dict[int, int] = {}  # by collective, place in `others` of the rank that came last
    for place, other in enumerate(others):
        there = other.by_step.get(number, {})
        for name, events in own.by_step[number].items():
            if len(there.get(name, ())) == len(events):  # else one trace lacks some, and which is not known
                for event, event_there in zip(events, there[name], strict=True):
                    took = other.duration_of(event_there)
                    shortest = transfer.setdefault(event, own.duration_of(event))
                    if took < shortest:
                        transfer[event], last[event] = took, place
    if not transfer:
        return None
    waits = [0] * len(others)
    for owned in step.owned:
        if owned.line == "communication" and owned.event in last:
            waits[last[owned.event]] += min(owned.ns, own.duration_of(owned.event) - transfer[owned.event])
    return waits
