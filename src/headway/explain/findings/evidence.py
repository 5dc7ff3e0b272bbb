"""Evidence that the rules read: the lines of all steps added up, what each event was for, and the loop's own facts.

A rule sees waterfalls of a trace and those made of a run's records alike: the latter have lines and no events, so what
needs events gives nothing for them, and the rule stays silent.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from headway.explain.attribution import Phase
from headway.explain.events import NONE
from headway.explain.measurement import MATMUL, MeasuredStep, MeasuredTrace
from headway.explain.ranks import WaitedFor
from headway.report import format_share
from headway.report.numbers import quantity


class AnyLine(Protocol):
    """Line as a rule reads it; a `WaterfallLine` has it."""

    @property
    def key(self) -> str:
        """Key of the line."""

    @property
    def ns(self) -> int:
        """Time of the line [ns]."""

    @property
    def parts(self) -> dict[str, int]:
        """Parts that the line consists of [ns]."""


class AnyStep(Protocol):
    """Step as a rule reads it; a `StepWaterfall` has it, and imports the rules, so they cannot name it."""

    @property
    def step(self) -> int:
        """Number of the step."""

    @property
    def rank(self) -> int:
        """Rank of the process."""

    @property
    def duration_ns(self) -> int:
        """Time of the step [ns]."""

    @property
    def mfu(self) -> float | None:
        """MFU of the step, where it is known."""

    @property
    def lines(self) -> Sequence[AnyLine]:
        """Lines that add up to the step's time."""

    @property
    def device_name(self) -> str:
        """Name of the device that it ran on."""

    @property
    def measured(self) -> tuple[MeasuredTrace, MeasuredStep] | None:
        """Events of the step; None where there was no trace."""


class Observation(NamedTuple):
    """Observation of a rule in all steps together.

    Attributes:
        ns: what it costs them, at most [ns].
        message: what was seen, with its number, as a sentence.
        cause: the likely cause, as a sentence.
        next: what to try next, as a sentence.
    """

    ns: int
    message: str
    cause: str
    next: str


class EventTime(NamedTuple):
    """Time that one event took of a step.

    Attributes:
        ns: time that it owned [ns].
        late_ns: time before it in which nothing ran, since the host had not launched it yet [ns].
        line: key of the line that its own time counts towards.
        phase: of the step.
        module: path; "" where it is not known.
        operator: innermost operator around its launch, on a CPU itself; "" where there is none.
        name: the kernel's; on a CPU the operator's.
        group: what a collective says of itself; "" of others.
        trace: where it stands.
        event: its index there.
    """

    ns: int
    late_ns: int
    line: str
    phase: Phase
    module: str
    operator: str
    name: str
    group: str
    trace: MeasuredTrace
    event: int


def as_number(value: Any) -> float | None:
    """A number of a loop's facts; the reader of traces leaves fractions as they are written, as text."""
    try:
        return None if value is None else quantity(float(value))
    except (TypeError, ValueError, OverflowError):
        return None


class Evidence:
    """Waterfalls of a job's steps, added up.

    Args:
        steps: at least one.
        facts: of each rank, what the loop said of itself, as the key `headway` of a trace has it.
        waits: of each step of several ranks, the one that the others waited for, and why.
    """

    def __init__(
        self, steps: Sequence[AnyStep], facts: Mapping[int, Mapping[str, Any]], waits: Sequence[WaitedFor] = ()
    ) -> None:
        self.steps, self.waits = steps, waits
        self._facts = facts
        self.duration_ns = sum(step.duration_ns for step in steps)
        self._lines: Counter[str] = Counter()
        self._parts: dict[str, Counter[str]] = {}
        for line in (line for step in steps for line in step.lines):
            self._lines[line.key] += line.ns
            self._parts.setdefault(line.key, Counter()).update(line.parts)

    @property
    def num_steps(self) -> int:
        """Waterfalls: steps of all ranks."""
        return len(self.steps)

    @property
    def ranks(self) -> list[int]:
        """Ranks that have waterfalls."""
        return sorted({step.rank for step in self.steps})

    @property
    def is_cpu(self) -> bool:
        """Whether nothing ran on a device, as far as is known."""
        return all(step.measured is not None and step.measured[0].trace.is_cpu_only for step in self.steps)

    def ns(self, key: str) -> int:
        """Time of the line with a key, and of the lines below it, such as `idle.data` below `idle` [ns]."""
        return sum(ns for name, ns in self._lines.items() if name == key or name.startswith(f"{key}."))

    def parts(self, key: str) -> Counter[str]:
        """Parts that a line consists of, over all steps [ns]."""
        return self._parts.get(key, Counter())

    def share(self, ns: int) -> str:
        """A time as a share of all steps, for people."""
        return format_share(ns / self.duration_ns)

    def fact(self, name: str, rank: int | None = None) -> Any:
        """Fact that a rank's loop recorded of itself; of the first rank if none is named. None where not known."""
        facts = self._facts.get(self.ranks[0] if rank is None else rank)
        return None if facts is None else facts.get(name)

    def step_fact(self, step: AnyStep, name: str) -> Any:
        """Fact that the loop recorded of one step; None where it is not known."""
        steps = self.fact("steps", step.rank)
        facts = steps.get(str(step.step)) if isinstance(steps, Mapping) else None
        return facts.get(name) if isinstance(facts, Mapping) else None

    def total(self, name: str) -> float | None:
        """Add up a number that the loop recorded for each step; None where a step lacks it."""
        values = [self.step_fact(step, name) for step in self.steps]
        numbers = [number for number in map(as_number, values) if number is not None]
        return sum(numbers) if len(numbers) == len(values) else None

    @cached_property
    def spent(self) -> tuple[EventTime, ...]:
        """Every event that took time of a step; none where a step was made of records."""
        return tuple(
            event_time for step in self.steps if step.measured is not None for event_time in _spent(*step.measured)
        )

    @cached_property
    def matmul_ns(self) -> int:
        """Time of matmul-class kernels, however their line is split [ns]."""
        unsplit_ns = self.ns(MATMUL)
        keys = ("useful", "ceiling", "recomputation", "padding", "slow")
        return unsplit_ns or sum(self.ns(key) for key in keys)


def _spent(measured: MeasuredTrace, step: MeasuredStep) -> Iterator[EventTime]:
    attribution, names, events = measured.attribution, measured.trace.names, measured.events
    owned = {owned_time.event: owned_time for owned_time in step.owned}
    for event in sorted({*owned, *step.idle.late_before} - {NONE}):
        owned_time = owned.get(event)
        yield EventTime(
            ns=owned_time.ns if owned_time else 0,
            late_ns=step.idle.late_before[event],
            line=owned_time.line if owned_time else "",
            phase=attribution.phase[event],
            module=attribution.module[event],
            operator=attribution.operator[event],
            name=names[events.name[event]],
            group=names[group] if (group := int(events.group[event])) != NONE else "",
            trace=measured,
            event=event,
        )
