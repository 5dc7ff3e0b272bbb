"""Evidence that rules read, of two kinds: the waterfalls of steps, and the records of a run's steps in a row.

A waterfall has lines, and where it is of a trace also events and what the loop wrote beside them; a rule that needs
what is not there gives nothing. Records tell little of each step, and much of how steps differ.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from headway.explain.attribution import Phase
from headway.explain.breakdown import Owners
from headway.explain.budget import NeededWork
from headway.explain.events import NONE, Product
from headway.explain.explanation import StepWaterfall, num_first_steps
from headway.explain.findings.own_time import AddedCost, OwnTime
from headway.explain.measurement import ASIDE, MATMUL, MeasuredStep, MeasuredTrace
from headway.explain.phases import PhaseLine
from headway.explain.ranks import WaitedFor
from headway.log.losses import StepLoss
from headway.report import format_share
from headway.report.quantity import quantity
from headway.report.step_lines import SLOW


@dataclass(frozen=True, slots=True)
class RunStep:
    """One step as its record or its line of a log describes it."""

    step: int  # number of the step
    duration_ns: int  # duration [ns]
    mfu: float | None = None  # a fraction; None where it is not known
    # work per second without waits for data and for a core, in a unit that all steps have; None if not known
    rate: float | None = None
    waited_ns: int = 0  # part of it in which the device waited for data [ns]; 0 where that is not known
    core_wait_ns: int = 0  # part of it in which the loop's thread waited for a core; 0 where a device computes [ns]
    tokens: float | None = None  # tokens of the step; None where they are not known
    memory_share: float | None = None  # peak memory / the device's, a fraction; None where it is not known
    has_compiled_again: bool = False  # whether something was compiled again in it
    imbalance: float = 0.0  # part of it in which ranks wait for the one with the most work, at least; a fraction
    heaviest_rank: int = 0  # rank with the most work
    slowest_rank: int | None = None  # the rank whose device computes slowest; None where it is not known
    slowest_speed: float | None = None  # speed of that rank / the median of all ranks; None where it is not known
    padding_ns: int = 0  # part of it that went to padding, at most [ns]
    empty_share: float = 0.0  # padding / slots, a fraction
    recomputed_ns: int = 0  # part of it that went to computing activations again, at most [ns]
    stage: frozenset[str] = frozenset()  # sources of data that its tokens come from
    # part of it in each phase of the loop [ns]; empty where nobody looked
    phases_ns: Mapping[str, int] = field(default_factory=dict)
    # the most that the host was ahead of the device in it [ns]; None where there is no such device
    lead_ns: int | None = None
    collection_ns: int = 0  # part of it in Python's garbage collections [ns]
    # number and time [ns] of passes and updates beyond those that it needs: "forward", "backward", "update"
    extra: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    # code that the loop's thread was in between phases: gap, code, purpose, and time [ns]
    places: tuple[tuple[str, str, str, int], ...] = ()
    late_rank: int | None = None  # the rank that came last to its backward; None where ranks were not compared
    late_ns: int = 0  # time by which it was later than any other [ns]
    late_phase: str = ""  # phase in which that rank lost most of `late_ns`; "" where unknown
    # about the loop, as its record has them: `optimizer`, `anomaly_mode`, `weights_dtype`
    facts: Mapping[str, Any] = field(default_factory=dict)
    loop_phases: tuple[PhaseLine, ...] = ()  # phases that the loop names
    clock: float | None = None  # clock of a busy device / its highest, a fraction; None where it was not sampled
    limits: tuple[str, ...] = ()  # reasons that held this clock


Step = TypeVar("Step", StepWaterfall, RunStep)

SHARED = 0.15  # part of the time for which a thread waits for a core, from which the machine is shared


class Evidence(ABC, Generic[Step]):
    """Steps as the engine of findings sees them, whichever parts the rules read.

    Attributes:
        steps: in their order.
        beside_ns: time outside of the steps by what it was, such as "checkpoint" [ns].
        most_mfu: the largest MFU that a finding may promise.
    """

    most_mfu: ClassVar[float]

    def __init__(self, steps: Sequence[Step], beside_ns: Mapping[str, int] | None = None) -> None:
        self.steps: Sequence[Step] = steps
        self.beside_ns: Mapping[str, int] = beside_ns or {}

    @property
    def num_steps(self) -> int:
        """Number of steps of all ranks."""
        return len(self.steps)

    @cached_property
    def duration_ns(self) -> int:
        """Time of all steps [ns]."""
        return sum(step.duration_ns for step in self.steps)

    @property
    def full_ns(self) -> int:
        """Time of all steps, time taken by profiler and other processes included [ns]."""
        return sum(step.duration_ns for step in self.steps)

    @property
    def useful_ns(self) -> float | None:
        """Time that the useful FLOPs of all steps take at peak [ns]; None if one step's FLOPs are unknown."""
        useful_ns = [step.mfu * step.duration_ns for step in self.steps if step.mfu is not None]
        return sum(useful_ns) if len(useful_ns) == self.num_steps else None

    @property
    @abstractmethod
    def core_wait_ns(self) -> int:
        """Time in which the loop's thread waited for a core, in all steps; 0 where nobody counted [ns]."""

    @property
    def is_crowded(self) -> bool:
        """True if the loop's thread waited for a core most of the time: how fast anything ran then tells nothing."""
        return 2 * self.core_wait_ns > self.full_ns

    def share(self, ns: float, total_ns: int | None = None) -> str:
        """A part of a time as a share of it, for people: of the steps' own time, or of another time that holds it [ns].

        Every share of time that a finding tells is made here. One of over 100 % is a rule that adds up too much.
        """
        return format_share(ns / (self.duration_ns if total_ns is None else total_ns))

    @abstractmethod
    def of_a_step(self, ns: int) -> int:
        """Mean of a time over the steps, in whole nanoseconds."""


class EventTime(NamedTuple):
    """Time that one event took of a step."""

    ns: int  # time of the step that it owned [ns]; of an event at the step's border, or that others overlap, a part
    late_ns: int  # time before it in which nothing ran, since the host had not launched it yet [ns]
    line: str  # key of the line that its own time counts towards
    phase: Phase  # phase of the step
    module: str  # path; "" where it is not known
    operator: str  # innermost operator around its launch, on a CPU itself; "" where there is none
    name: str  # the kernel's; on a CPU the operator's
    group: str  # group of a collective, as it says of itself; "" of others
    trace: MeasuredTrace  # trace of the event
    event: int  # index of the event there

    @property
    def duration_ns(self) -> int:
        """Duration of the whole event, in this step or beyond it, by which the event is judged [ns]."""
        return self.trace.duration_of(self.event)

    @property
    def product(self) -> Product | None:
        """Sizes of the matrix product of the event; None for other events, or if no sizes were recorded."""
        operands = self.trace.operands_of(self.event)
        return None if operands is None else operands.product(self.operator)


class StepEvidence(Evidence[StepWaterfall]):
    """Waterfalls of a job's steps, added up; on a CPU without what the profiler and other processes took (`OwnTime`).

    Args:
        steps: waterfalls of a trace, or of a run's records.
        facts: by rank, what the loop said of itself, as the key `headway` of a trace has it, in place of what the
            traces say. A key that is missing is not known.
        waits: of each step of several ranks, the one that the others waited for, and why.
    """

    most_mfu = 1.0  # rules tell the most that a loss may be, which may be more than the peak leaves

    def __init__(
        self,
        steps: Sequence[StepWaterfall],
        facts: Mapping[int, Mapping[str, Any]] | None = None,
        waits: Sequence[WaitedFor] = (),
    ) -> None:
        super().__init__(steps)
        self.waits = waits
        of_traces = {step.rank: step.measured[0].trace.headway or {} for step in steps if step.measured is not None}
        self._facts = {**of_traces, **(facts or {})}
        self._lines: Counter[str] = Counter()
        self._parts: dict[str, Counter[str]] = {}
        for line in (line for step in steps for line in step.lines):
            self._lines[line.key] += line.ns
            self._parts.setdefault(line.key, Counter()).update(line.parts)
        self._own_times = self._find_own_times() if self.is_cpu else {}
        self._matmul_beyond_ns = 0  # own time of products beyond what is left of their lines
        self._taken_off_ns = self._take_off()

    def _find_own_times(self) -> dict[int, OwnTime]:
        """Own time of each measured step that has some to take off, by the step's place."""
        own_times = {}
        for place, step in enumerate(self.steps):
            if step.measured is None:
                continue
            added = self.host_fact("added_ns", step.rank) or {}
            phases_ns = {str(name): round(as_number(ns) or 0) for name, ns in (added.get("phases_ns") or {}).items()}
            operator_ns, module_ns = (as_number(added.get(name)) or 0.0 for name in ("operator_ns", "module_ns"))
            cost = AddedCost(operator_ns, module_ns, phases_ns)
            preempted = self.preempted(step.measured[0], step.step)
            if added or preempted:
                own_times[place] = OwnTime(*step.measured, cost, preempted)
        return own_times

    def _take_off(self) -> int:
        """Take what is not the steps' own off their lines, and return the sum of it [ns].

        The steps' own time is what is left of their events and gaps: a share of it has one clock above and below.
        """
        taken_ns = 0
        for place, own_time in self._own_times.items():
            measured = self.steps[place].measured
            if measured is None:
                continue
            attribution, written = measured[0].attribution, measured[0].trace.headway
            has_needs = any(line.key == "useful" for line in self.steps[place].lines)
            owners = Owners(attribution, NeededWork(written, "")) if has_needs and written is not None else None
            idle = measured[1].idle
            for owned in measured[1].owned:
                is_split = owned.line == MATMUL and owners is not None
                line = f"{SLOW}.{owners.of(owned.event)}" if is_split and owners is not None else owned.line
                ns = min(owned.ns, own_time.of_event[owned.event])
                taken_ns += self._shorten(line, ns, attribution.phase[owned.event].value)
            for event, ns in idle.late_before.items():
                taken_ns += self._shorten("idle.launch", min(ns, own_time.of_gap[event]))
            for phase, ns in own_time.of_phase.items():
                line = "aside" if phase in ASIDE else "idle.data"
                part = f"{phase.value}, idle" if line == "aside" else "idle"
                taken_ns += self._shorten(line, min(ns, idle.by_phase[phase]), part)
        return taken_ns

    def not_own_ns(self, place: int) -> Mapping[int, int]:
        """Part of the gap before each event of a step that is not the step's own time, by the step's place [ns]."""
        return self._own_times[place].of_gap if place in self._own_times else {}

    def _shorten(self, line: str, ns: int, part: str = "") -> int:
        """Take a time off a line and its part, and return it; communication may be split in two."""
        key = line if line in self._lines else f"{line}.transfer"
        left_ns = max(0, self._lines[key])
        if key.startswith(SLOW):
            self._matmul_beyond_ns += max(0, ns - left_ns)
        self._lines[key] -= min(ns, left_ns)
        parts = self.parts(key)
        if part in parts:
            parts[part] = max(0, parts[part] - ns)
        return ns

    @cached_property
    def duration_ns(self) -> int:
        """Time of all steps, on a CPU without the time of the profiler and of other processes [ns]."""
        return max(1, self.full_ns - self._taken_off_ns)

    @property
    def core_wait_ns(self) -> int:
        """Time in which the loop's thread waited for a core, in all steps; 0 where nobody counted [ns]."""
        waited_ns = [ns for ns in map(self.core_wait_of, self.steps) if ns is not None]
        return round(sum(waited_ns) / len(waited_ns) * self.num_steps) if waited_ns else 0

    def core_wait_of(self, step: StepWaterfall) -> int | None:
        """Time of a step in which its rank's loop waited for a core [ns]; None where nobody counted."""
        moments = self.host_fact("core_wait_ns", step.rank) or {}
        begin, end = moments.get(str(step.step)), moments.get(str(step.step + 1))
        # A wait counts when it ends, and may have begun before the step.
        return None if begin is None or end is None else min(max(0, int(end) - int(begin)), step.duration_ns)

    def of_a_step(self, ns: int) -> int:
        """Mean of a time over the steps, to the nearest nanosecond."""
        return round(ns / self.num_steps)

    @property
    def ranks(self) -> list[int]:
        """Ranks that have waterfalls."""
        return sorted({step.rank for step in self.steps})

    @property
    def is_cpu(self) -> bool:
        """True if nothing ran on a device, as far as is known."""
        return all(step.measured is not None and step.measured[0].trace.is_cpu_only for step in self.steps)

    def ns(self, key: str) -> int:
        """Time of the line with a key, and of the lines below it, such as `idle.data` below `idle` [ns]."""
        return sum(ns for name, ns in self._lines.items() if name == key or name.startswith(f"{key}."))

    @property
    def keys(self) -> list[str]:
        """Keys of all lines."""
        return list(self._lines)

    def ns_of(self, key: str) -> int:
        """Time of one line alone [ns]."""
        return self._lines[key]

    def parts(self, key: str) -> Counter[str]:
        """Parts that a line consists of, over all steps [ns]."""
        return self._parts.get(key, Counter())

    def fact(self, name: str, rank: int | None = None) -> Any:
        """Fact that a rank's loop recorded of itself, the first rank's if none is named; None if it is unknown."""
        facts = self._facts.get(self.ranks[0] if rank is None else rank)
        return None if facts is None else facts.get(name)

    def step_fact(self, step: StepWaterfall, name: str) -> Any:
        """Fact that the loop recorded of one step; None if it is unknown."""
        steps = self.fact("steps", step.rank)
        facts = steps.get(str(step.step)) if isinstance(steps, Mapping) else None
        return facts.get(name) if isinstance(facts, Mapping) else None

    def total(self, name: str) -> float | None:
        """Add up a number that the loop recorded for each step; None if a step lacks the number."""
        values = [self.step_fact(step, name) for step in self.steps]
        numbers = [number for number in map(as_number, values) if number is not None]
        return sum(numbers) if len(numbers) == len(values) else None

    @cached_property
    def names(self) -> set[str]:
        """Names of all events of the traces."""
        return {name for step in self.steps if step.measured is not None for name in step.measured[0].trace.names}

    @property
    def measured_steps(self) -> list[StepWaterfall]:
        """Steps that were measured in a trace, without the steps of records."""
        return [step for step in self.steps if step.measured is not None]

    @cached_property
    def spent_by_step(self) -> tuple[tuple[EventTime, ...], ...]:
        """Events that took time of each step that was measured, in their order; a step made of records has none."""
        return tuple(
            tuple(_spent(*step.measured, self._own_times.get(place)))
            for place, step in enumerate(self.steps)
            if step.measured is not None
        )

    @cached_property
    def spent(self) -> tuple[EventTime, ...]:
        """Every event that took time of a step."""
        return tuple(event for events in self.spent_by_step for event in events)

    @property
    def is_headway_train(self) -> bool:
        """True if `headway train` ran the loop, so that its settings are advised; records name no other loop."""
        loops = [self.fact("loop", step.rank) for step in self.steps]
        return all(loop == "headway train" for loop in loops) or not self.spent_by_step

    def host_fact(self, name: str, rank: int) -> Any:
        """Fact of a rank's host beside its operators, as `HostEvidence.facts` has it; None if it is unknown."""
        host = self.fact("host", rank)
        return host.get(name) if isinstance(host, Mapping) else None

    @property
    def is_anomaly_mode(self) -> bool:
        """True if autograd's anomaly mode was on in any rank."""
        return any(self.host_fact("anomaly_mode", rank) for rank in self.ranks)

    def samples(self, measured: MeasuredTrace, step: int) -> Iterator[tuple[int, int, tuple[str, ...]]]:
        """Stacks of the loop's thread, sampled in the whole profile.

        Yields:
            Begin and end by the trace's clock [ns], and frames, innermost first; frames of packages begin with "~".
        """
        rank, shift_ns = measured.trace.rank, self._shift_ns(measured, step)
        if shift_ns is None:
            return
        stacks = [tuple(map(str, stack)) for stack in self.host_fact("stacks", rank) or ()]
        for begin, end, stack in self.host_fact("runs", rank) or ():
            yield int(begin) + shift_ns, int(end) + shift_ns, stacks[int(stack)]

    def preempted(self, measured: MeasuredTrace, step: int) -> list[tuple[int, int, int]]:
        """Times in which the loop's thread had no core: begin and end by the trace's clock, and how much of it [ns]."""
        shift_ns = self._shift_ns(measured, step)
        if shift_ns is None:
            return []
        rows = self.host_fact("preempted", measured.trace.rank) or ()
        # The system counts a wait when it is over, so it may have begun before the sample before.
        return [
            (min(int(begin), int(end) - int(ns)) + shift_ns, int(end) + shift_ns, int(ns)) for begin, end, ns in rows
        ]

    def _shift_ns(self, measured: MeasuredTrace, step: int) -> int | None:
        """Offset from the samples' clock to the trace's, by the beginning of a common step [ns]; None without one."""
        begins = self.host_fact("step_ns", measured.trace.rank) or {}
        annotated_ns = next((start for number, start, _ in measured.trace.steps if number == step), None)
        return None if annotated_ns is None or str(step) not in begins else annotated_ns - int(begins[str(step)])

    def time_in(self, word: str) -> int:
        """Time of the steps in which a frame of the loop's thread had a word in its name [ns]; 0 where not sampled."""
        total_ns = 0
        for step in self.steps:
            if step.measured is not None:
                measured, own = step.measured
                window = own.window
                for begin, end, stack in self.samples(measured, step.step):
                    if any(word in frame for frame in stack):
                        total_ns += max(0, min(end, window.end_ns) - max(begin, window.start_ns))
        return total_ns

    @cached_property
    def matmul_ns(self) -> int:
        """Time of matmul-class kernels, however their line is split [ns]."""
        unsplit_ns = self.ns(MATMUL)
        keys = ("useful", "ceiling", "recomputation", "padding", "slow")
        return unsplit_ns or max(0, sum(self.ns(key) for key in keys) - self._matmul_beyond_ns)


def _spent(measured: MeasuredTrace, step: MeasuredStep, own_time: OwnTime | None) -> Iterator[EventTime]:
    attribution, names, events = measured.attribution, measured.trace.names, measured.events
    owned = {owned_time.event: owned_time for owned_time in step.owned}
    of_event, of_gap = (Counter[int](), Counter[int]()) if own_time is None else (own_time.of_event, own_time.of_gap)
    for event in sorted({*owned, *step.idle.late_before} - {NONE}):
        owned_time = owned.get(event)
        yield EventTime(
            ns=max(0, owned_time.ns - of_event[event]) if owned_time else 0,
            late_ns=max(0, step.idle.late_before[event] - of_gap[event]),
            line=owned_time.line if owned_time else "",
            phase=attribution.phase[event],
            module=attribution.module[event],
            operator=attribution.operator[event],
            name=names[events.name[event]],
            group=names[group] if (group := int(events.group[event])) != NONE else "",
            trace=measured,
            event=event,
        )


def as_number(value: Any) -> float | None:
    """A number of a loop's facts; the reader of traces leaves fractions as they are written, as text."""
    try:
        return None if value is None else quantity(float(value))
    except (TypeError, ValueError, OverflowError):
        return None


class RunEvidence(Evidence[RunStep]):
    """Steps of one run in a row, as its records or its log tell them.

    Args:
        steps: at least one.
        beside_ns: time of the run outside of its steps, by what it was: "evaluation", "checkpoint", "compile" [ns].
        left_out: records of steps that compiled something and are in no rate.
        beside_by_step: the same time by the step that it came before, where that is known [ns].
        losses: losses of the run, by step; also of steps whose time is not known.
        is_timed: whether durations are times; else they say how long steps of equal work take beside each other.
    """

    most_mfu = math.inf  # rules compare steps with faster ones, which have shown what can be had

    def __init__(
        self,
        steps: Sequence[RunStep],
        beside_ns: Mapping[str, int] | None = None,
        left_out: Sequence[RunStep] = (),
        beside_by_step: Mapping[str, Mapping[int, int]] | None = None,
        losses: Sequence[StepLoss] = (),
        *,
        is_timed: bool = True,
    ) -> None:
        super().__init__(steps, beside_ns)
        self.losses, self.is_timed = losses, is_timed
        self.left_out = left_out
        self.beside_by_step = beside_by_step or {}

    def of_a_step(self, ns: int) -> int:
        """Mean of a time over the steps, in whole nanoseconds, rounded down."""
        return ns // self.num_steps

    @property
    def core_wait_ns(self) -> int:
        """Time in which the first rank's loop waited for a core, in all steps [ns]."""
        return sum(min(step.core_wait_ns, step.duration_ns) for step in self.steps)

    @property
    def num_first(self) -> int:
        """Number of slow steps that the run begins with."""
        return num_first_steps([step.duration_ns for step in self.steps])

    @cached_property
    def steady(self) -> "RunEvidence":
        """The run without its slow first steps, and without the time beside the steps."""
        return RunEvidence(self.steps[self.num_first :], is_timed=self.is_timed)
