"""Rows of a log: what each line reports, as the interval of numbers that are printed so, and what the log is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from headway.log.losses import StepLoss

STEP_NUMBER = r"(\d{1,18})"  # a number of 64 bits; more digits are no number of a step
NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?)"
"""A step's number and any other in a log, as patterns with a group."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A closed interval of non-negative numbers.

    >>> Interval(1, 2) / Interval(4, 5)
    Interval(low=0.2, high=0.5)
    """

    low: float
    high: float

    def __mul__(self, other: "Interval | float") -> "Interval":
        if isinstance(other, Interval):
            return Interval(self.low * other.low, self.high * other.high)
        return Interval(self.low * other, self.high * other)

    def __truediv__(self, other: "Interval | float") -> "Interval":
        if isinstance(other, Interval):
            return Interval(self.low / other.high, self.high / other.low if other.low else float("inf"))
        return Interval(self.low / other, self.high / other)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def middle(self) -> float:
        """The number halfway."""
        return (self.low + self.high) / 2

    def widened(self, share: float) -> "Interval":
        """The interval with a relative margin on both sides."""
        return Interval(self.low * (1 - share), self.high * (1 + share))


@dataclass(frozen=True, slots=True)
class Reading:
    """Number as printed, and the numbers that it can have been."""

    value: float  # the printed number, in the unit that the code uses
    range: Interval  # the numbers that round (or truncate) to it


def printed(text: str, scale: float = 1.0, *, truncated: bool = False, step: float | None = None) -> Reading:
    """Read a printed decimal with the range that rounds to it.

    Args:
        text: digits with an optional point and thousands separators.
        scale: unit of the printed number in the unit wanted, e.g. 0.01 for percent.
        truncated: whether the printer cut the rest off instead of rounding.
        step: rounding step in the printed unit where it is coarser than the last digit.

    >>> printed("0.5").range
    Interval(low=0.45, high=0.55)
    >>> printed("6,590").range
    Interval(low=6589.5, high=6590.5)
    """
    digits = text.replace(",", "")
    value = float(digits)
    unit = step if step is not None else 10.0 ** -len(digits.partition(".")[2])
    low, high = (value, value + unit) if truncated else (value - unit / 2, value + unit / 2)
    return Reading(value * scale, Interval(max(low, 0.0) * scale, high * scale))


def common(intervals: Iterable[Interval]) -> Interval | None:
    """Intersect intervals; None when no number lies in all, or there are none.

    >>> common([Interval(1, 3), Interval(2, 4)])
    Interval(low=2, high=3)
    """
    parts = list(intervals)
    if not parts:
        return None
    low, high = max(part.low for part in parts), min(part.high for part in parts)
    return Interval(low, high) if low <= high else None


def hull(intervals: Iterable[Interval]) -> Interval | None:
    """Find the smallest interval around all; None for none."""
    parts = list(intervals)
    return Interval(min(part.low for part in parts), max(part.high for part in parts)) if parts else None


Counted: TypeAlias = Literal["billed", "rows", "real"]
"""Token positions that a log counts: those that the tool's rule bills, whole rows, or real tokens alone."""


@dataclass(frozen=True, slots=True)
class LogRow:
    """The numbers of one line of a log; None where it has none."""

    step: int  # number of the step
    mfu: Reading | None = None  # fraction
    flops_per_s: Reading | None = None  # FLOP/s, of one device unless the log says otherwise
    # token positions per second, of one device or of the job as `Log.whole_job` says
    tokens_per_s: Reading | None = None
    step_s: Reading | None = None  # time of the step [s]
    tokens: Reading | None = None  # token positions of the step on one device
    sequences: int | None = None  # sequences of the step, all devices together
    stamp_s: float | None = None  # time at which the line was written [s]
    memory_share: float | None = None  # peak memory / the device's, a fraction


@dataclass(frozen=True, slots=True)
class LengthSpread:
    """Lengths of a step's prompts, or of its answers [tokens]."""

    mean: float
    least: float | None = None  # None where the log does not tell
    most: float | None = None


@dataclass(frozen=True, slots=True)
class PhasedStep:
    """A step of a trainer that generates, by phase; None where the log does not tell."""

    step: int  # number of the step
    trainer: str  # key of `headway.integrations.rl.TRAINERS`
    times: Mapping[str, float]  # time of each phase and of the step, by the trainer's names [s]
    prompt: LengthSpread | None = None
    answer: LengthSpread | None = None
    tokens: int | None = None  # tokens of prompts and answers together, all devices
    num_samples: int | None = None
    num_devices: int | None = None
    mfu: Mapping[str, float] = field(default_factory=dict)  # MFU as printed, by phase; a fraction
    flops_per_s: Mapping[str, float] = field(default_factory=dict)  # rate as printed, by phase [FLOP/s of one device]


@dataclass(frozen=True, slots=True)
class RecordBasis:
    """Convention, peak and ranks of Headway's own records."""

    convention: str  # rule that counted their FLOPs, such as "useful/1"
    peak_flops_per_s: float | None  # peak below their MFU [FLOP/s of one device]; None where the run knew none
    peak_source: str  # source of that peak
    num_ranks: int  # devices of the job


@dataclass(frozen=True, slots=True)
class Log:
    """A tool's log."""

    tool: str  # name of the tool that wrote the log
    conventions: tuple[str, ...]  # the rules that this tool has used, newest first
    rows: tuple[LogRow, ...]  # in the order of the file
    whole_job: bool = False  # whether tokens/s (and FLOP/s, if any) are those of all devices together
    smoothed: bool = False  # whether its MFU is a running mean, so that a row does not stand for its own step
    # basis of Headway's own records, which count useful FLOPs already; None for another tool's log
    recorded: RecordBasis | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)  # lines that look like steps and are no rows, by reason
    notes: tuple[str, ...] = ()  # remarks on its numbers
    counted: Counted = "billed"  # token positions that its tokens/s, or its sequences, are of
    phased: tuple[PhasedStep, ...] = ()  # steps by phase, for a trainer that generates
    losses: tuple[StepLoss, ...] = ()  # losses of its steps, by step
    # mean time of a step of the whole run, where its one row stands for the run [s]; None elsewhere
    mean_step_s: float | None = None


def per_device(log: Log, num_ranks: int) -> Log:
    """Divide rates of a whole job by its devices."""
    if not log.whole_job:
        return log

    def share(reading: Reading | None) -> Reading | None:
        return reading and Reading(reading.value / num_ranks, reading.range / num_ranks)

    rows = (replace(row, tokens_per_s=share(row.tokens_per_s), flops_per_s=share(row.flops_per_s)) for row in log.rows)
    return replace(log, rows=tuple(rows), whole_job=False)


def near(value: float, share: float) -> Reading:
    """Take a number that was printed with more digits than matter, within a share of it."""
    return Reading(value, Interval(value, value).widened(share))


@dataclass(frozen=True, slots=True)
class RestatedRow:
    """One row of a log in `useful`."""

    row: LogRow  # the line, with rates of one device
    flops_per_token: float  # useful FLOPs per token position that the log counts
    mfu: float | None  # useful MFU, a fraction; None without a peak
    seconds: float  # time that it stands for [s], or any measure proportional to it; 0 where the log has none
