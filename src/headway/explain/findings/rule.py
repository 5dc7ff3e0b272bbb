"""A rule of findings: one cause of lost time, and its observers in a trace and in the records of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

from headway.explain.findings.evidence import Evidence, RunEvidence, StepEvidence

EvidenceKind = TypeVar("EvidenceKind", bound=Evidence[Any])


class TimeOf(Enum):
    """Part of the time that a loss lies in, and is a share of."""

    STEPS = "in the steps, of a run without the slow first ones"
    MACHINE = "in the steps, and no part of their own time"
    DATA = "in the steps, waiting for data"
    RUN = "in all steps of a run"
    BESIDE = "between the steps of a run"


# Observers of these times read all steps, other observers only the steps behind slow first ones.
OF_A_WHOLE_RUN = (TimeOf.RUN, TimeOf.BESIDE)


class FindingPlace(IntEnum):
    """Place of a finding in the list: findings that name a cause come first, the dearest at the top."""

    CAUSE = 0
    CHOICE = 1  # costs what it does for its result: without it something else would be trained
    LIMIT = 2  # costs nothing yet
    UNEXPLAINED = 3  # the largest loss, of which no cause is known
    VAGUE = 4  # names no cause, so that it is charged with what no other finding names
    PASSING = 5  # passes by itself


class Observation(NamedTuple):
    """Observation of a rule in all steps together.

    Attributes:
        ns: what it costs them [ns].
        message: what was seen, with its number, as a sentence.
        cause: the likely cause, as a sentence.
        next: what to try next in any loop, as a sentence.
        setting: what to set in `headway train`, which is told to those who use it; "" where nothing is.
        time: in which the loss lies, where the observer sees it elsewhere than mostly.
    """

    ns: float
    message: str
    cause: str
    next: str
    setting: str = ""
    time: TimeOf | None = None


@dataclass(frozen=True, slots=True)
class RuleObserver(Generic[EvidenceKind]):
    """One way to see a cause.

    Attributes:
        look: the condition, the loss and the sentences: from evidence to what is seen there; None where the evidence
            does not tell, or tells otherwise.
        least: share of the time below which it stays silent: a smaller loss is not worth a change, or every run has
            it; 0 where the condition says all.
        time: in which the loss lies.
        place: of the finding.
        lines: beginnings of the keys of the waterfall's lines in which the loss lies.
    """

    look: Callable[[EvidenceKind], Observation | None]
    least: float
    time: TimeOf = TimeOf.STEPS
    place: FindingPlace = FindingPlace.CAUSE
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause of lost time, and its observers.

    Attributes:
        name: the finding's.
        in_trace: its observer of waterfalls; those of records have lines and no events.
        in_records: its observer of the steps of a run in a row, which goes before the other.
    """

    name: str
    in_trace: RuleObserver[StepEvidence] | None = None
    in_records: RuleObserver[RunEvidence] | None = None

    @property
    def observers(self) -> tuple[RuleObserver[Any], ...]:
        """Its observers, that of traces first."""
        return tuple(observer for observer in (self.in_trace, self.in_records) if observer is not None)
