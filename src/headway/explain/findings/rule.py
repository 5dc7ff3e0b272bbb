"""A rule of findings: one cause of lost time, and its observers in a trace and in the records of a run."""

import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cache
from pathlib import Path
from statistics import median_low
from string import Formatter
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from headway.explain.findings.evidence import Evidence, RunEvidence, StepEvidence
from headway.report import format_duration, format_ms, format_share

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
    """Place of a finding in the list: losses come first, then findings that name a cause, the dearest at the top."""

    LEARNING = -1  # a run that does not learn, whose speed nobody needs
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
    # the cost in each step that has some [ns], by the step's number, of what need not come in every step
    by_step: Mapping[int, float] = MappingProxyType({})
    when: str = ""  # steps of what costs no time, such as "from step 380"
    once: str = ""  # words for it where it came once or twice, with {} for how long it took at which step


_FIELDS = ("seen", "why", "next", "setting", "once")  # sentences of a finding


class _Values(Formatter):
    """Writes the values of a sentence; of the steps of an evidence, where shares of their time are among them."""

    def __init__(self, evidence: Evidence[Any]) -> None:
        self._evidence = evidence

    def format_field(self, value: Any, format_spec: str) -> str:
        """Write a value: a time as a `share` of the steps', as `time` or as `ms`, a fraction as `part`, `a_step`."""
        match format_spec:
            case "share":
                return self._evidence.share(value)
            case "part":
                return format_share(value)
            case "a_step":
                return f"{value / self._evidence.num_steps:,.0f}"
            case "time":
                return format_duration(value / 1e9)
            case "ms":
                return format_ms(value)
        return format(value, format_spec)


@cache
def sentences(name: str) -> Mapping[str, str]:
    """Read the sentences of a rule ("small-gemms"), or of a kind of it ("small-gemms/loop"), from `sentences.toml`."""
    table = tomllib.loads(Path(__file__).with_name("sentences.toml").read_text("utf-8"))
    return {**table[name.partition("/")[0]], **table[name]}


def observe(evidence: Evidence[Any], name: str, ns: float, /, **values: Any) -> Observation:
    """Make an observation of the sentences of a name and the values in them, among which are `by_step` and `when`."""
    row = dict(sentences(name))
    if isinstance(evidence, RunEvidence) and "seen_in_records" in row:
        row["seen"] = row["seen_in_records"]
    words = [_Values(evidence).vformat(row.get(key, ""), (), {"ns": ns, **values}) for key in _FIELDS]
    message, cause, advice, setting, once = words
    by_step, when = values.get("by_step", MappingProxyType({})), values.get("when", "")
    return Observation(ns, message, cause, advice, setting, by_step=by_step, when=when, once=once)


def most_common(names: Counter[str], otherwise: str = "the model") -> str:
    """The name that was counted most; the empty name stands for an unknown one and is passed over."""
    return next((name for name, _ in names.most_common() if name), otherwise)


_COMES_AGAIN = 3  # steps in which a thing must have come to be told as what comes again
_MOST_NAMED = 5  # steps whose numbers are told
_ONCE_CAUSE = "in {} of {} steps nothing like it came, so nothing here tells that it comes again."
_ONCE_ADVICE = "nothing, unless it comes again; then {}"


def as_it_came(observation: Observation, steps: Collection[int], least_ns: float) -> tuple[Observation, str]:
    """Charge an observation with what every step has of it, or tell what came once or twice with its steps.

    Args:
        observation: what a rule saw.
        steps: numbers of all steps in which it could have come.
        least_ns: cost in all steps from which it is worth a word [ns].

    Returns:
        The observation, and when it came, for people; "" of what comes again.
    """
    by_step, total = observation.by_step, sum(observation.by_step.values())
    if total <= 0 or len(steps) < 2:
        return observation, ""
    high = [step for step in sorted(by_step) if 2 * by_step[step] > max(by_step.values())]
    # The usual step is the median one, so that a single step makes no rule; of two it is the lesser one.
    usual_part = min(1.0, median_low(by_step.get(step, 0.0) for step in steps) * len(steps) / total)
    if usual_part * observation.ns >= least_ns or 2 * len(high) > len(steps):
        return observation._replace(ns=usual_part * observation.ns), ""
    if len(high) >= _COMES_AGAIN:
        more = len(high) - _MOST_NAMED
        numbers = ", ".join(map(str, high[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
        came = f"It came in {len(high)} of {len(steps)} steps: {numbers}."
        return observation._replace(message=f"{observation.message} {came}"), ""
    # Times are as the rule sums them up, which may be less than the steps' clock.
    scale = observation.ns / total
    took = " and ".join(f"{format_duration(by_step[step] * scale / 1e9)} at step {step}" for step in high)
    return observation._replace(
        ns=sum(by_step[step] for step in high) * scale,
        message=f"{observation.once.replace('{}', took, 1)}, and far less in the rest of {len(steps)} steps.",
        cause=_ONCE_CAUSE.format(len(steps) - len(high), len(steps)),
        next=_ONCE_ADVICE.format(observation.next),
    ), f"{'once' if len(high) == 1 else 'twice'}, {took}"


@dataclass(frozen=True, slots=True)
class RuleObserver(Generic[EvidenceKind]):
    """One way to see a cause."""

    # the condition, the loss and the sentences: from evidence to what is seen there; None where the evidence does not
    # tell, or tells otherwise
    look: Callable[[EvidenceKind], Observation | None]
    # least loss that is told, a share of `time`; 0: whenever `look` sees it
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
