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
    MACHINE = "in the steps by the clock on the wall, waits for a core included"
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
    """Observation of a rule in all steps together."""

    ns: float  # cost in all steps together [ns]
    message: str  # observation, with its number, as a sentence
    cause: str  # the likely cause, as a sentence
    next: str  # advice for any loop, as a sentence
    setting: str = ""  # setting of `headway train`, which is told to those who use it; "" where there is none
    time: TimeOf | None = None  # time in which the loss lies, where the observer sees it elsewhere than mostly


@dataclass(frozen=True, slots=True)
class RuleObserver(Generic[EvidenceKind]):
    """One way to see a cause."""

    # the condition, the loss and the sentences: from evidence to what is seen there; None where the evidence does not
    # tell, or tells otherwise
    look: Callable[[EvidenceKind], Observation | None]
    # share of the time below which it stays silent: a smaller loss is not worth a change, or every run has it; 0 where
    # the condition says all
    least: float
    time: TimeOf = TimeOf.STEPS  # time in which the loss lies
    place: FindingPlace = FindingPlace.CAUSE  # place of the finding
    lines: tuple[str, ...] = ()  # beginnings of the keys of the waterfall's lines in which the loss lies


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause of lost time, and its observers."""

    name: str  # the finding's
    # observer of waterfalls; those of records have lines and no events
    in_trace: RuleObserver[StepEvidence] | None = None
    # observer of the steps of a run in a row, which goes before the other
    in_records: RuleObserver[RunEvidence] | None = None

    @property
    def observers(self) -> tuple[RuleObserver[Any], ...]:
        """Its observers, that of traces first."""
        return tuple(observer for observer in (self.in_trace, self.in_records) if observer is not None)
