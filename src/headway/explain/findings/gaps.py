"""Gaps of a step in which the host was late, and the evidence on them: phases, stacks, collections."""

import re
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from headway.explain.events import NONE, Column, Kind
from headway.explain.findings import rollout
from headway.explain.findings.evidence import RunEvidence, StepEvidence
from headway.explain.findings.rule import Observation, observe
from headway.explain.measurement import MeasuredStep, MeasuredTrace
from headway.meter.pauses import COLLECTION, PURPOSES, Purpose

_LONG_NS = 1_000_000  # launches and Python between two operators take some 5 to 100 us
_LONG_SHARE = 0.02  # part of the step; a core that is shared takes a thread away for some milliseconds now and then
_FIRST_USE = 10  # times what other calls of the operator take
ALLOCATES = re.compile(r"(cuda|hip|cu)(Host)?(Malloc|Free|MemAlloc|MemFree|HostAlloc|MemCreate|MemMap)\w*")
_LOADS = re.compile(r"(cu|hip)(ModuleLoad|LibraryLoad|ModuleGetFunction)\w*|cudaFuncGetAttributes")
_REPLAYS = re.compile(r"(cuda|hip|cu)GraphLaunch\w*")
ANNOTATION = "the annotation"
_SURROUNDINGS = ("ProfilerStep#", "phase:", COLLECTION)
ENGINE = re.compile(r"^~?_engine_run_backward")
_BETWEEN = {
    "input": "between the batch's arrival and the forward",
    "gradients": "between the backward and the update",
    "after": "behind the update",
}
_LEAST_GAP = 0.02  # share of the time below which a gap is what every loop has


@dataclass(frozen=True)
class Pause:
    """A gap in which nothing ran, since the host had not launched or called anything."""

    ns: int  # length, without what a phase or a wait explains [ns]
    start_ns: int  # beginning [ns]
    end_ns: int  # end [ns]
    event: int  # event that ends it; NONE where the step does
    collected_ns: int  # part in which garbage was collected [ns]
    preempted_ns: int  # part in which the thread had no core [ns]
    own_ns: int  # length without the parts that have another cause, as garbage that was collected [ns]
    is_long: bool  # whether it is a pause, and not one of many gaps between launches


class StepPauses:
    """Gaps of one step in which the host was late."""

    def __init__(
        self,
        measured: MeasuredTrace,
        step: MeasuredStep,
        preempted: Sequence[tuple[int, int, int]] = (),
        not_own_ns: Mapping[int, int] | None = None,
    ) -> None:
        self.measured, self.step, self._preempted = measured, step, preempted
        self.alike: list[StepPauses] = []  # the rank's steps, this one included
        self._not_own_ns = not_own_ns or {}  # part of the gap before each event that is not the step's own time [ns]
        self.host = measured.trace.host

    @cached_property
    def own_events(self) -> Column:
        """Host events of the loop's thread that overlap the step."""
        return self._events_of(self.measured.loop_track)

    def _events_of(self, track: int) -> Column:
        host, window = self.host, self.step.window
        inside = (host.end_ns > window.start_ns) & (host.start_ns < window.end_ns)
        return np.flatnonzero(inside & (host.track == track))

    @cached_property
    def collections(self) -> list[tuple[int, int]]:
        """Begin and end of each collection of garbage in the loop's thread [ns]."""
        names = [i for i, name in enumerate(self.measured.trace.names) if name.startswith(COLLECTION)]
        own = self.own_events
        own = own[(self.host.kind[own] == Kind.ANNOTATION) & np.isin(self.host.name[own], names)]
        return list(zip(self.host.start_ns[own].tolist(), self.host.end_ns[own].tolist(), strict=True))

    @cached_property
    def long_ns(self) -> int:
        """Least length of a pause: a part of the time in which the step had a core [ns]."""
        window = self.step.window
        return max(_LONG_NS, round(_LONG_SHARE * (window.ns - self.preempted_ns(window.start_ns, window.end_ns))))

    @cached_property
    def likely_ns(self) -> dict[tuple[int, int], int]:
        """Likely own time of each gap, by the name of the event behind it and its number among those of the name [ns].

        A wait for a core is spread evenly over the time between two samples, so that one gap may be another's.
        """
        events, window, late_ns = self.measured.events, self.step.window, self.step.idle.late_before
        inside = np.flatnonzero((events.start_ns >= window.start_ns) & (events.start_ns < window.end_ns))
        numbers: Counter[int] = Counter()
        likely_ns = {(NONE, 0): late_ns.get(NONE, 0) - self._not_own_ns.get(NONE, 0)}
        self._places: dict[int, tuple[int, int]] = {NONE: (NONE, 0)}
        for event in inside[np.argsort(events.start_ns[inside], kind="stable")].tolist():
            name = int(events.name[event])
            numbers[name] += 1
            if event in late_ns:
                self._places[event] = name, numbers[name]
                likely_ns[name, numbers[name]] = late_ns[event] - self._not_own_ns.get(event, 0)
        return likely_ns

    def _comes_again(self, event: int) -> bool:
        """Tell whether all steps have a long gap there: where others took the core, gaps are now here and now there."""
        if len(self.alike) < 2 or not self._not_own_ns or not self.likely_ns or event not in self._places:
            return False
        place = self._places[event]
        return all(step.likely_ns.get(place, 0) >= step.long_ns for step in self.alike)

    @cached_property
    def gaps(self) -> tuple[Pause, ...]:
        """All gaps in which the host was late, by their order in time."""
        window, events = self.step.window, self.measured.events
        gaps = []
        for event, ns in self.step.idle.late_before.items():
            end_ns = window.end_ns if event == NONE else min(int(events.start_ns[event]), window.end_ns)
            collected_ns = min(ns, overlap(self.collections, end_ns - ns, end_ns))
            preempted_ns = self.preempted_ns(end_ns - ns, end_ns)
            # The loop's thread was off its core: what is left of a gap is the loop's own only if it outweighs the wait.
            is_long = ns - collected_ns - preempted_ns >= max(self.long_ns, preempted_ns)
            own_ns = max(0, min(ns - collected_ns - preempted_ns, ns - self._not_own_ns.get(event, 0)))
            if preempted_ns and not is_long and self._comes_again(event):
                is_long, own_ns = True, max(own_ns, ns - collected_ns - self._not_own_ns.get(event, 0))
            gaps.append(Pause(ns, end_ns - ns, end_ns, event, collected_ns, preempted_ns, own_ns, is_long))
        return tuple(sorted(gaps, key=lambda gap: gap.start_ns))

    def preempted_ns(self, start_ns: int, end_ns: int) -> int:
        """Time of a span in which the thread had no core: each count between two samples, as far as it fits."""
        return sum(
            min(ns, min(end, end_ns) - max(begin, start_ns))
            for begin, end, ns in self._preempted
            if begin < end_ns and end > start_ns
        )

    @cached_property
    def waiting_gaps(self) -> list[tuple[int, int]]:
        """Length [ns] and ending event of gaps of the device before events that had been launched already."""
        events, window = self.measured.events, self.step.window
        inside = np.flatnonzero((events.end_ns > window.start_ns) & (events.start_ns < window.end_ns))
        if self.measured.trace.is_cpu_only or not len(inside):
            return []
        busy_until = np.maximum.accumulate(np.concatenate([[window.start_ns], events.end_ns[inside]]))[:-1]
        lengths = events.start_ns[inside] - busy_until
        late_before = self.step.idle.late_before
        return [
            (int(length), int(event))
            for length, event in zip(lengths.tolist(), inside.tolist(), strict=True)
            if length > 0 and not late_before[event]
        ]

    def surrounding(self, pause: Pause) -> int:
        """Innermost host event that lasts for most of a pause; NONE where there is none but the step and its phase.

        The thread that was late with the event behind the pause is looked at before the loop's, which may only wait.
        """
        host, names, attribution = self.host, self.measured.trace.names, self.measured.attribution
        launch = NONE if pause.event == NONE else int(attribution.launch[pause.event])
        launcher = self.measured.loop_track if launch == NONE else int(host.track[launch])
        tracks = [launcher] if launcher != self.measured.loop_track else []
        for own in (*map(self._events_of, tracks), self.own_events):
            overlap = np.minimum(host.end_ns[own], pause.end_ns) - np.maximum(host.start_ns[own], pause.start_ns)
            candidates: list[int] = [
                i for i in own[2 * overlap > pause.ns].tolist() if not names[host.name[i]].startswith(_SURROUNDINGS)
            ]
            if candidates:
                return max(candidates, key=lambda i: attribution.contexts[i].depth)
        return NONE

    def cause(self, pause: Pause) -> tuple[str, str]:
        """Class a long pause by the trace's evidence of its cause.

        Returns:
            "allocation", "first-use", "graph" or "pause", and what the host was in; "" where nothing shows it.
        """
        host, names = self.host, self.measured.trace.names
        around = self.surrounding(pause)
        name = names[host.name[around]] if around != NONE else ""
        if around != NONE and host.kind[around] == Kind.ANNOTATION:
            name = f"{ANNOTATION} {name}"
        operator = self.measured.attribution.contexts[around].operator if around != NONE else NONE
        operator_name = names[host.name[operator]] if operator != NONE else ""
        if ALLOCATES.fullmatch(name):
            return "allocation", f"{name} in {operator_name}" if operator_name else name
        # The first launch of all loads the library.
        call = operator if operator != NONE or around == NONE or host.kind[around] != Kind.LAUNCH else around
        if _LOADS.fullmatch(name) or (call != NONE and self._is_first_use(call)):
            return "first-use", operator_name or name
        if pause.event != NONE and not self.measured.trace.is_cpu_only:
            launch = int(self.measured.attribution.launch[pause.event])
            if launch != NONE and _REPLAYS.fullmatch(names[host.name[launch]]):
                return "graph", name
        # A call of the runtime alone does not tell what called it.
        return "pause", f"{name} in {operator_name}" if operator_name not in ("", name) else name

    def _is_first_use(self, call: int) -> bool:
        """Tell whether a call is the first of several of its name, and took far longer than its successors."""
        host = self.host
        same = np.flatnonzero((host.name == host.name[call]) & (host.kind == host.kind[call]))
        durations = host.end_ns[same] - host.start_ns[same]
        others = durations[same != call]
        own_ns = int(host.end_ns[call] - host.start_ns[call])
        is_first = int(host.start_ns[same].min()) == int(host.start_ns[call])
        return is_first and len(others) > 0 and own_ns > _FIRST_USE * float(np.median(others))


def overlap(spans: Sequence[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    """Time that spans have in common with one [ns]."""
    return sum(max(0, min(end, end_ns) - max(start, start_ns)) for start, end in spans)


_pauses: "weakref.WeakKeyDictionary[StepEvidence, list[StepPauses]]" = weakref.WeakKeyDictionary()


def pauses_of(evidence: StepEvidence) -> list[StepPauses]:
    """Gaps of each step that was measured."""
    if evidence not in _pauses:
        by_rank: dict[int, list[StepPauses]] = {}
        for place, step in enumerate(evidence.steps):
            if step.measured is not None:
                preempted = evidence.preempted(step.measured[0], step.step)
                pauses = StepPauses(*step.measured, preempted, evidence.not_own_ns(place))
                pauses.alike = by_rank.setdefault(step.rank, [])
                pauses.alike.append(pauses)
                _pauses.setdefault(evidence, []).append(pauses)
    return _pauses.get(evidence, [])


def collected_ns(steps: Sequence[StepPauses]) -> int:
    """Time of all collections within steps, in operators as well as between them, as far as they had a core [ns]."""
    spans = [
        (step, max(start, step.step.window.start_ns), min(end, step.step.window.end_ns))
        for step in steps
        for start, end in step.collections
    ]
    return sum(max(0, end - start - step.preempted_ns(start, end)) for step, start, end in spans)


def stacks_of(evidence: StepEvidence, step: StepPauses, pause: Pause) -> Counter[tuple[str, ...]]:
    """Time of each stack of the loop's thread within a pause [ns]; none without samples."""
    spent: Counter[tuple[str, ...]] = Counter()
    for begin, end, stack in evidence.samples(step.measured, step.step.window.step):
        ns = min(end, pause.end_ns) - max(begin, pause.start_ns)
        if ns > 0:
            spent[stack] += ns
    return spent


def purpose_of(stack: Sequence[str]) -> Purpose:
    """Purpose that a stack shows; the purpose without a name for an unknown stack."""
    names = set()
    for number, frame in enumerate(stack):
        if number and ENGINE.match(frame):
            continue  # a hook of Python's runs within backward
        rows = [purpose.name for purpose in PURPOSES.values() if purpose.is_told_by(frame)]
        if len(rows) == 1:  # a function named for several chores, such as _maybe_log_save_evaluate, may be at any
            names.add(rows[0])
    return next((purpose for purpose in PURPOSES.values() if purpose.name in names), PURPOSES[""])


def is_allocation(call: str) -> bool:
    """Tell whether a wait, as the waterfall names it, is one for memory: "aten::empty (cudaMalloc)"."""
    return ALLOCATES.search(call) is not None


def recorded_pause(evidence: RunEvidence, purpose: str) -> Observation | None:
    """Time between the phases of a step, in which the loop does something else; "" for what nothing is known of."""
    if not purpose and rollout.rest_without_work(evidence):
        return None  # `host_phase` tells of it
    gaps = {gap: ns for gap, ns in _long_gaps(evidence).items() if _purpose(evidence, gap) == purpose}
    if not gaps:
        return None
    ns = sum(gaps.values())
    codes: Counter[str] = Counter()
    for step in evidence.steps:
        for gap, code, _, spent_ns in step.places:
            codes[code] += spent_ns if gap in gaps else 0
    where = " and ".join(_BETWEEN[gap] for gap in gaps)
    if codes and (top := codes.most_common(1)[0])[1]:
        where += f", mostly in {top[0]}"
    by_step = {step.step: sum(step.phases_ns.get(gap, 0) for gap in gaps) for step in evidence.steps}
    return observe(evidence, "gap", ns, by_step=by_step, where=where, **PURPOSES[purpose].in_records)


def _long_gaps(evidence: RunEvidence) -> dict[str, int]:
    """Time of the gaps that are worth a word, in all steps, without collections of garbage [ns].

    Without an optimizer that is seen, its update is in a gap itself, and none behind the backward can be told.
    """
    timed = [step for step in evidence.steps if step.phases_ns]
    timed_ns = sum(step.duration_ns for step in timed)
    if not timed_ns:
        return {}
    gaps = _BETWEEN if any(step.phases_ns.get("optimizer") for step in timed) else ("input",)
    shares = {gap: sum(step.phases_ns.get(gap, 0) for step in timed) / timed_ns for gap in gaps}
    # A gap in which no look fell on code of the loop counts with its usual length: other processes stretch some.
    for gap in shares.keys() - {place_gap for step in evidence.steps for place_gap, *_ in step.places}:
        usual_ns = median(step.phases_ns.get(gap, 0) for step in timed) * len(timed)
        shares[gap] = min(shares[gap], usual_ns / timed_ns)
    # Phases that the loop names lie in the gaps too, and have rules of their own.
    if any(step.loop_phases for step in timed):
        workless = sum(map(rollout.workless_ns, evidence.steps)) / evidence.duration_ns
        shares = {gap: max(0.0, share - workless) for gap, share in shares.items()}
    # A collection is where the loop calls it, or where most objects are made: in the longest gap as far as it fits. So
    # is a forward of the model that nobody counted.
    dearest = max(shares, key=lambda gap: shares[gap])
    shares[dearest] -= sum(step.collection_ns for step in evidence.steps) / evidence.duration_ns
    shares[dearest] -= sum(step.extra["forward"][1] for step in timed if "forward" in step.extra) / timed_ns
    return {gap: round(share * evidence.duration_ns) for gap, share in shares.items() if share > _LEAST_GAP}


def _purpose(evidence: RunEvidence, gap: str) -> str:
    purposes: Counter[str] = Counter()
    for step in evidence.steps:
        for place_gap, _, purpose, ns in step.places:
            purposes[purpose] += ns if place_gap == gap else 0
    if not purposes.total():
        return ""
    purpose, ns = purposes.most_common(1)[0]
    is_known = purpose in PURPOSES and bool(PURPOSES[purpose].in_records)
    return purpose if is_known and ns > purposes.total() / 2 else ""
