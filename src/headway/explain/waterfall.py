"""The waterfall of a step: lines, each a use or a loss of time with a name, that add up to the step exactly.

Lines 1 to 5 need the step's workload and the device's peak, which Headway writes into its traces. The time of
matmul-class kernels of each component, less what its FLOPs take at peak, at the ceiling, again and for padding, is what
these kernels lose. Nothing is clipped: a component that beats the ceiling has a line below zero.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.errors import ConfigError
from headway.explain.budget import NeededWork
from headway.explain.collectives import waiting_in
from headway.explain.measure import ASIDE, MATMUL, MeasuredStep, MeasuredTrace, measure
from headway.explain.trace import Trace
from headway.report import format_duration

SCHEMA_VERSION = 1

_SLOW = "slow"  # slower than the ceiling; components have long names, and a terminal 80 columns
_NAMES = {
    MATMUL: "matmul-class kernels",
    "memory": "memory-bound kernels",
    "optimizer": "optimizer and clipping",
    "communication": "exposed communication",
    "communication.transfer": "exposed communication: transfer",
    "communication.waiting": "exposed communication: waiting",
    "copies": "exposed copies",
    "idle.data": "idle: waiting for data",
    "idle.launch": "idle: host late (launches)",
    "idle.sync": "idle: host waits (sync)",
    "idle.other": "idle: other",
    "aside": "logging, eval, checkpoint, compile",
    "unexplained": "unexplained: unknown kernels",
}
_NAMES_ON_CPU = {
    MATMUL: "matmul-class operators",
    "memory": "memory-bound operators",
    "communication": "communication",
    "communication.transfer": "communication: transfer",
    "communication.waiting": "communication: waiting",
    "copies": "copies",
    "idle.data": "waiting for data",
    "idle.launch": "Python between operators",
    "idle.sync": "host waits (sync)",
    "idle.other": "other",
    "unexplained": "unexplained: unknown operators",
}


@dataclass(frozen=True, slots=True)
class WaterfallLine:
    """A use or a loss of time.

    Attributes:
        key: which one, for programs.
        name: which one, for people.
        ns: its part of the step [ns]; below 0 only where a component's kernels beat the ceiling.
        share: ns / the step's duration.
        mfu_from: MFU of the step; None without its workload and a peak.
        mfu_to: MFU that the step would have without this line; None where that says nothing.
        parts: what it consists of, such as phases or the operators that waited [ns].
    """

    key: str
    name: str
    ns: int
    share: float
    mfu_from: float | None = None
    mfu_to: float | None = None
    parts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepWaterfall:
    """One step of one rank.

    Attributes:
        step: its number.
        rank: of the process.
        duration_ns: from the step's first device event to the next step's [ns]; on a CPU, between the annotations.
        mfu: of the step; None without its workload and a peak.
        lines: they add up to `duration_ns`.
        is_edge: first or last of its trace, so that its window is less sure.
        measured: what each event owned, and the trace.
    """

    step: int
    rank: int
    duration_ns: int
    mfu: float | None
    lines: tuple[WaterfallLine, ...]
    is_edge: bool
    measured: tuple[MeasuredTrace, MeasuredStep] = field(repr=False)

    def as_record(self) -> dict[str, Any]:
        """JSON-ready."""
        lines = [
            {"name": line.name, "ns": line.ns, "share": line.share, "key": line.key, "mfu_from": line.mfu_from,
             "mfu_to": line.mfu_to, "parts": line.parts}
            for line in self.lines
        ]  # fmt: skip
        return {
            "step": self.step,
            "rank": self.rank,
            "duration_ns": self.duration_ns,
            "mfu": self.mfu,
            "is_edge": self.is_edge,
            "lines": lines,
        }


@dataclass(frozen=True, slots=True)
class JobExplanation:
    """Waterfalls of the steps of a job.

    Attributes:
        steps: by step, then rank.
        notes: what a reader must know of the traces, as sentences.
    """

    steps: tuple[StepWaterfall, ...]
    notes: tuple[str, ...]

    def as_record(self) -> dict[str, Any]:
        """The object that `headway explain --json` prints; `findings` is empty: no rules for them are written yet."""
        return {
            "schema_version": SCHEMA_VERSION,
            "steps": [step.as_record() for step in self.steps],
            "findings": [],
            "notes": list(self.notes),
        }


def explain(
    traces: Sequence[Trace], *, step: int | None = None, rank: int | None = None, whole: bool = False
) -> JobExplanation:
    """Explain the steps of one job.

    Args:
        traces: one of each rank, at least one.
        step: only this one; it may be the first or the last of a trace.
        rank: only this one; the others still tell how long collectives take.
        whole: take each trace as one step.

    Raises:
        ConfigError: two traces are of one rank, a trace has no steps, or there is no such step or rank.

    The first and the last step of a device's trace are left out where there are others.
    """
    by_rank: dict[int, Trace] = {}
    for trace in traces:
        other = by_rank.setdefault(trace.rank, trace)
        if other is not trace:
            raise ConfigError(
                f"{other.path} and {trace.path} both are of rank {trace.rank}. Give one trace of each rank of one job."
            )
    if rank is not None and rank not in by_rank:
        raise ConfigError(f"--rank {rank}: the traces are of ranks {', '.join(map(str, sorted(by_rank)))}.")
    measured = {number: measure(by_rank[number], whole=whole) for number in sorted(by_rank)}
    budgets = {number: _budget(one.trace) for number, one in measured.items()}
    waterfalls = []
    ranks_of_note: dict[str, list[int]] = {}
    shown = [number for number in measured if rank is None or rank == number]
    for number in shown:
        one, budget = measured[number], budgets[number]
        chosen, about_edges = _chosen(one, step)
        for note in (*one.notes, *_notes_of_budget(budget), *about_edges):
            ranks_of_note.setdefault(note, []).append(number)
        others = [other for other_rank, other in measured.items() if other_rank != number]
        waterfalls += [_waterfall(one, which, budget, others) for which in chosen]
    waterfalls.sort(key=lambda waterfall: (waterfall.step, waterfall.rank))
    notes = [
        note if said_by == shown else f"rank {', '.join(map(str, said_by))}: {note}"
        for note, said_by in ranks_of_note.items()
    ]
    return JobExplanation(tuple(waterfalls), tuple(notes))


def _budget(trace: Trace) -> NeededWork | None:
    return None if trace.headway is None else NeededWork(trace.headway, str(trace.path))


def _notes_of_budget(budget: NeededWork | None) -> list[str]:
    if budget is None:
        return [
            "the matmul-class line is not split into needed work at peak, ceiling loss, recomputation, padding and "
            "losses by component: that needs the steps' workloads and the device's peak, which Headway writes into its "
            "own traces."
        ]
    notes = []
    if budget.profiler_overhead_s > 0:
        notes.append(
            f"{format_duration(budget.profiler_overhead_s)} of each step is the profiler's, as Headway measured."
        )
    if budget.peak_flops_per_s is None:
        notes.append(
            "the matmul-class line is not split: the trace does not tell the device's peak. Set HEADWAY_PEAK_FLOPS "
            "[FLOP/s] and profile again."
        )
    elif budget.ceiling_flops_per_s is None:
        notes.append(
            "the device's ceiling was not measured, so it is taken as the peak (`headway ceiling` measures it)."
        )
    return notes


def _chosen(measured: MeasuredTrace, step: int | None) -> tuple[list[MeasuredStep], list[str]]:
    """The steps to show, and what to say of the edges."""
    if step is not None:
        found = [one for one in measured.steps if one.window.step == step]
        if not found:
            there = ", ".join(str(one.window.step) for one in measured.steps)
            raise ConfigError(f"--step {step}: {measured.trace.path} has the steps {there}.")
    else:
        found = [one for one in measured.steps if not one.window.is_edge]
        if found:
            left_out = [str(one.window.step) for one in measured.steps if one.window.is_edge]
            said = " and ".join(left_out)
            told = f"steps {said}, the first and the last of the trace, are left out; --step N shows them."
            return found, [told] if left_out else []
        found = list(measured.steps)
    edges = [str(one.window.step) for one in found if one.window.is_edge]
    told = f"step {' and '.join(edges)}: first or last of the trace, so where the window begins or ends is less sure."
    return found, [told] if edges else []


def _waterfall(
    measured: MeasuredTrace, step: MeasuredStep, budget: NeededWork | None, others: Sequence[MeasuredTrace]
) -> StepWaterfall:
    duration_ns, number = step.window.ns, step.window.step
    needs = budget.needs(number) if budget else None
    amounts: list[tuple[str, str, int, dict[str, int]]] = []  # key, name, ns, parts
    names = {**_NAMES, **_NAMES_ON_CPU} if measured.trace.is_cpu_only else _NAMES
    spent, parts = _spent(measured, step)
    if needs is None or budget is None:
        amounts.append((MATMUL, names[MATMUL], spent[MATMUL], parts[MATMUL]))
    else:
        took = _matmul_by_component(measured, step, budget)
        for key, name, attribute_of in (
            ("useful", "needed work at peak", "useful"),
            ("ceiling", "ceiling loss", "ceiling_loss"),
            ("recomputation", "recomputation", "recomputed"),
            ("padding", "padding and masked work", "padding"),
        ):
            by_component = {one: getattr(need, attribute_of) for one, need in needs.items()}
            amounts.append((key, name, sum(by_component.values()), by_component))
        for component in [*needs, *(one for one in took if one not in needs)]:
            needed = needs[component].total if component in needs else 0
            lost = took.get(component, 0) - needed
            amounts.append((f"slow.{component}", f"{_SLOW}: {component}", lost, {}))
    waits = waiting_in(measured, step, others)
    for key in ("memory", "optimizer"):
        amounts.append((key, names[key], spent[key], parts[key]))
    if waits is None:
        amounts.append(("communication", names["communication"], spent["communication"], parts["communication"]))
    else:
        for key, ns in (("transfer", spent["communication"] - waits), ("waiting", waits)):
            amounts.append((f"communication.{key}", names[f"communication.{key}"], ns, {}))
    for key in ("copies", "idle.data", "idle.launch", "idle.sync", "idle.other", "aside", "unexplained"):
        amounts.append((key, names[key], spent[key], parts[key]))
    useful_flops = budget.useful_flops(number) if budget and needs is not None else None
    peak = budget.peak_flops_per_s if budget else None
    at_peak_ns = useful_flops / peak * 1e9 if useful_flops is not None and peak else None
    mfu = None if at_peak_ns is None else at_peak_ns / duration_ns
    lines = tuple(
        WaterfallLine(key, name, ns, ns / duration_ns, mfu, _without(at_peak_ns, duration_ns, key, ns), of_it)
        for key, name, ns, of_it in amounts
    )
    return StepWaterfall(number, measured.trace.rank, duration_ns, mfu, lines, step.window.is_edge, (measured, step))


def _without(at_peak_ns: float | None, duration_ns: int, key: str, ns: int) -> float | None:
    if at_peak_ns is None or key == "useful" or not 0 < ns < duration_ns:
        return None
    return at_peak_ns / (duration_ns - ns)


def _spent(measured: MeasuredTrace, step: MeasuredStep) -> tuple[Counter[str], dict[str, dict[str, int]]]:
    """Time of each line that the trace tells by itself, and what it consists of."""
    spent: Counter[str] = Counter()
    of_line: dict[str, Counter[str]] = {key: Counter() for key in _NAMES}
    attribution, idle = measured.attribution, step.idle
    for owned in step.owned:
        spent[owned.line] += owned.ns
        of_line[owned.line][attribution.phase[owned.event].value] += owned.ns
    for phase, ns in idle.by_phase.items():
        key = "aside" if phase in ASIDE else "idle.data"
        spent[key] += ns
        of_line[key][f"{phase.value}, idle" if phase in ASIDE else "idle"] += ns
    spent["idle.launch"] += idle.host_late_ns
    spent["idle.other"] += idle.other_ns
    for waited, ns in idle.by_wait.items():
        spent["idle.sync"] += ns
        of_line["idle.sync"][waited] += ns
    return spent, {key: dict(counted.most_common()) for key, counted in of_line.items()}


def _matmul_by_component(measured: MeasuredTrace, step: MeasuredStep, budget: NeededWork) -> Counter[str]:
    took: Counter[str] = Counter()
    for owned in step.owned:
        if owned.line == MATMUL:
            took[budget.component_of(measured.attribution.module[owned.event])] += owned.ns
    return took
