"""Causes of idle time of the device: what the host was doing in the meantime.

A gap is the host's fault where the event that ends it was launched after the gap began; where it had been launched
before, the device waited for itself: for another stream, or between two kernels.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from headway.explain.attribute import COMPILING, Attribution, Phase
from headway.explain.timeline import Segments, divide
from headway.explain.trace import NONE, Column, Kind, Trace

# Calls of the runtime that block the host until the device has finished some work; cudaFree waits for all of it.
_WAITS = re.compile(r"\w+Synchronize(_ptsz|_v\d+)?|(cuda|hip)(Memcpy(2D|3D)?|MemcpyWithStream|Free|Malloc)|cuMemcpy\w*")
_ANNOTATED_PHASES = {Phase.DATA_WAIT, Phase.LOGGING, Phase.CHECKPOINT, Phase.EVALUATION, Phase.COMPILE}


@dataclass(slots=True)
class IdleTime:
    """Idle time of a window by cause [ns].

    Attributes:
        by_phase: while the host waited for data, logged, evaluated, wrote a checkpoint or compiled.
        by_wait: after the host had waited for the device, by the operator that waited.
        late_before: the host had not launched anything, for none of these reasons, by the event that it launched late;
            NONE where nothing followed.
        other_ns: the next event had been launched before.
    """

    by_phase: Counter[Phase] = field(default_factory=Counter)
    by_wait: Counter[str] = field(default_factory=Counter)
    late_before: Counter[int] = field(default_factory=Counter)
    other_ns: int = 0

    @property
    def host_late_ns(self) -> int:
        """Time that the host was late, for no other reason [ns]."""
        return sum(self.late_before.values())


class IdleCauses:
    """Causes of the gaps of one trace.

    Args:
        trace: the whole trace.
        attribution: what its events were for.
        which: indices of the events that count, those of the device; of the host where there is no device.
    """

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
        waiting = {i for i, name in enumerate(trace.names) if _WAITS.fullmatch(name)}
        waits = np.flatnonzero((host.kind == Kind.LAUNCH) & np.isin(host.name, list(waiting)))
        self._waits = waits[np.argsort(host.start_ns[waits], kind="stable")]
        self._longest_wait_ns = int((host.end_ns[waits] - host.start_ns[waits]).max(initial=0))

    def split(self, segments: Segments, window: tuple[int, int]) -> IdleTime:
        """Split the pieces of a window in which nothing ran; the causes add up to them exactly."""
        idle = IdleTime()
        phases = self._phases(window)
        for start, end in segments.of_none():
            ends_it = self._event_at(end)
            if not self._is_late(start, ends_it):
                idle.other_ns += end - start
                continue
            left = end - start
            first = int(np.searchsorted(phases.end_ns, start, side="right"))
            last = int(np.searchsorted(phases.start_ns, end, side="left"))
            for i in range(first, last):
                owner = int(phases.owner[i])
                phase = self._attribution.contexts[owner].phase if owner != NONE else None
                if phase is not None:
                    spent = min(end, int(phases.end_ns[i])) - max(start, int(phases.start_ns[i]))
                    idle.by_phase[phase] += spent
                    left -= spent
            waited = self._wait_at(start)
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

    def _wait_at(self, moment: int) -> str | None:
        """Name the call that the host waited in when the device ran out of work."""
        host = self._trace.host
        i = int(np.searchsorted(host.start_ns[self._waits], moment, side="left")) - 1
        while i >= 0 and int(host.start_ns[self._waits[i]]) + self._longest_wait_ns >= moment:
            at = int(self._waits[i])
            if int(host.end_ns[at]) >= moment:
                context = self._attribution.contexts[at]
                call = self._trace.names[host.name[at]]
                operator = self._trace.names[host.name[context.operator]] if context.operator != NONE else ""
                text = f"{operator} ({call})" if operator else call
                return f"{text} in {context.module}" if context.module else text
            i -= 1
        return None
