"""An explanation: waterfalls of steps, findings and notes, as the readers of traces, records and logs make it.

A waterfall has lines, each a use or a loss of time with a name, that add up to the step exactly.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from headway.explain.budget import DeviceRates
from headway.explain.measurement import MeasuredStep, MeasuredTrace
from headway.explain.phases import PhaseLine, mean_phases
from headway.explain.ranks import WaitedFor
from headway.report import format_share

SCHEMA_VERSION = 1
MOST = 5  # findings that are told: more are no order of work
UNSEPARATED = "unseparated"
# Fastest memories, for devices of unknown bandwidth: Xeon Max with HBM2e, and B300 with HBM3e [B/s].
_FASTEST_CPU_BYTES_PER_S = 1e12
_FASTEST_BYTES_PER_S = 8e12
# Times the memory's bandwidth, and bytes. Source: MI300X's Infinity Cache, the largest of an accelerator: 256 MB at
# 17.2 TB/s beside 5.3 TB/s of HBM3 (AMD CDNA 3 white paper, 2023), which is 3.2 times; with room for caches nearer by.
_CACHE_SPEED = 5
_LARGEST_CACHE = 2**28
NO_PROFILE_NOTE = (
    "unseparated: kernels, communication, copies, launches and synchronisation are not separable without a profile. "
    "Record some steps with `--set run.profile.start=N` of `headway train`, or with `headway.profile` in a loop of "
    "your own, and explain the run again."
)
UNTIMED_NOTE = (
    "the lines do not tell how long a step takes, so no time is shown: shares are of steps of equal work, each at the "
    "rate that its line tells."
)


@dataclass(frozen=True, slots=True)
class WaterfallLine:
    """A use or a loss of time."""

    key: str  # name for programs
    name: str  # name for people
    ns: int  # part of the step [ns]; below 0 only where a component's kernels beat the ceiling
    share: float  # ns / the step's duration
    mfu_from: float | None = None  # MFU of the step; None without its workload and a peak
    mfu_to: float | None = None  # MFU that the step would have without this line; None where that says nothing
    parts: dict[str, int] = field(default_factory=dict)  # parts, such as phases or the operators that waited [ns]

    def to_dict(self, *, is_timed: bool = True) -> dict[str, Any]:
        """Give the JSON-ready record, with a time only where there is one."""
        ns = self.ns if is_timed else None
        return {"name": self.name, "ns": ns, "share": self.share, "key": self.key, "mfu_from": self.mfu_from,
                "mfu_to": self.mfu_to, "parts": self.parts if is_timed else {}}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OperandTraffic:
    """Bytes that the operators of a step's memory-bound kernels read and wrote, each operand once."""

    num_bytes: int  # bytes of the operators whose operands are known
    known_ns: int  # time of these operators' kernels [ns]
    all_ns: int  # time of all memory-bound kernels [ns]
    bytes_per_s: float | None  # bandwidth of the device's memory [B/s]; None where it is not known
    # time of operators whose operands are more than the memory can move in it, so that they read but a part of them,
    # and which is not known [ns]
    implausible_ns: int = 0

    @property
    def at_bandwidth_ns(self) -> int | None:
        """Time that the bytes take at full bandwidth [ns]; None if it is unknown."""
        return None if self.bytes_per_s is None else round(self.num_bytes / self.bytes_per_s * 1e9)

    def to_dict(self) -> dict[str, Any]:
        """Give the JSON-ready record."""
        return {
            "bytes": self.num_bytes,
            "at_bandwidth_ns": self.at_bandwidth_ns,
            "known_ns": self.known_ns,
            "implausible_ns": self.implausible_ns,
            "bytes_per_s": self.bytes_per_s,
        }


@dataclass(frozen=True, slots=True)
class StepWaterfall:
    """One step of one rank."""

    step: int  # number of the step
    rank: int  # rank of the process
    duration_ns: int  # from the step's begin on the host, or the end of what ran before, to the end of its work [ns]
    mfu: float | None  # MFU of the step; None without its workload and a peak
    lines: tuple[WaterfallLine, ...]  # lines that add up to `duration_ns`
    is_edge: bool  # first or last of its trace, so that its window is less sure
    device_name: str  # device that it ran on
    # time that each event owned, and the trace; None where there was no trace
    measured: tuple[MeasuredTrace, MeasuredStep] | None = field(default=None, repr=False)
    rates: DeviceRates | None = None  # rates of the device; None where there was no trace
    # bytes that memory-bound kernels had to move; None where no shapes were recorded
    traffic: OperandTraffic | None = None
    # phases that the loop names, the rest last, which add up to `duration_ns`; none of a loop that names none
    phases: tuple[PhaseLine, ...] = ()
    # whether `duration_ns` is a time; else it only compares the step with other steps of a log that tells none
    is_timed: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Give the JSON-ready record."""
        window = None if self.measured is None else self.measured[1].window
        return {
            "step": self.step,
            "rank": self.rank,
            "duration_ns": self.duration_ns if self.is_timed else None,
            "host_ns": None if window is None else window.host_ns,
            "device_ns": None if window is None else window.device_ns,
            "mfu": self.mfu,
            "is_edge": self.is_edge,
            "lines": [line.to_dict(is_timed=self.is_timed) for line in self.lines],
            "phases": [phase.to_dict() for phase in self.phases],
            "memory_bound": None if self.traffic is None else self.traffic.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class MeanWaterfall:
    """The mean of a job's steps: each line's time over all steps and ranks / their number."""

    num_steps: int  # steps in the mean; one of several ranks counts for each
    left_out: tuple[int, ...]  # numbers of slow first steps that are not in it
    duration_ns: int  # duration of the mean step [ns]
    mfu: float | None  # total over total; None where it is not known
    lines: tuple[WaterfallLine, ...]  # lines that add up to `duration_ns`
    # bytes that memory-bound kernels had to move; None where no shapes were recorded
    traffic: OperandTraffic | None = None
    phases: tuple[PhaseLine, ...] = ()  # phases that the loop names; they add up to `duration_ns`
    is_timed: bool = True  # whether `duration_ns` is a time

    def to_dict(self) -> dict[str, Any]:
        """Give the JSON-ready record."""
        return {
            "num_steps": self.num_steps,
            "left_out": list(self.left_out),
            "duration_ns": self.duration_ns if self.is_timed else None,
            "mfu": self.mfu,
            "lines": [line.to_dict(is_timed=self.is_timed) for line in self.lines],
            "phases": [phase.to_dict() for phase in self.phases],
            "memory_bound": None if self.traffic is None else self.traffic.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to do about a step's time."""

    id: str  # the rule that found it, such as "data-bound"
    seen: str  # observation, with its number, as a sentence
    cause: str  # the likely cause, as a sentence
    next: str  # advice, by the name of a setting of `headway train` where there is one, as a sentence
    ns: int  # cost of a step, at most [ns]
    share: float  # the same / the step's duration
    mfu_from: float | None = None  # MFU of the step; None where it is not known
    mfu_to: float | None = None  # MFU that the step would have without it; None where it is not known
    when: str = ""  # steps of what came in few, such as "once, 540 ms at step 14"

    @property
    def extent(self) -> str:
        """Its size for people, behind its name: what came once is no share of any other step."""
        return self.when or f"up to {format_share(self.share)} of the time"

    def to_dict(self) -> dict[str, Any]:
        """Give the JSON-ready record."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class JobExplanation:
    """Waterfalls of the steps of a job."""

    steps: tuple[StepWaterfall, ...]  # by step, then rank
    notes: tuple[str, ...]  # remarks on the traces, as sentences
    findings: tuple[Finding, ...] = ()  # first things to do, the dearest first
    waited_for: tuple[WaitedFor, ...] = ()  # rank that the others waited for, of each step of several ranks
    learning: str = ""  # sentence on the losses and norms of the run; "" where they are not known

    @property
    def is_timed(self) -> bool:
        """True if it is known how long the steps took."""
        return all(step.is_timed for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The object that `headway explain --json` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "steps": [step.to_dict() for step in self.steps],
            "mean": mean_of(self.steps).to_dict(),
            "learning": self.learning or None,
            "findings": [finding.to_dict() for finding in self.findings],
            "notes": list(self.notes),
            "waited_for": [wait.to_dict() for wait in self.waited_for],
        }


def unprofiled_waterfall(
    step: int, duration_ns: int, known_lines: Iterable[tuple[str, str, int, dict[str, int]]], device_name: str
) -> StepWaterfall:
    """Make the waterfall of a step from the lines that are known, and one line of the rest.

    Args:
        step: its number.
        duration_ns: how long it took [ns], above 0.
        known_lines: key, name, time [ns] and parts of each line that is known; "useful" has the time of the useful
            FLOPs at peak.
        device_name: what it ran on.

    Returns:
        Lines that add up to the duration; the rest is below zero where the lines that are told exceed it.
    """
    amounts = list(known_lines)
    rest_ns = duration_ns - sum(ns for _, _, ns, _ in amounts)
    amounts.append((UNSEPARATED, "unseparated: no profile", rest_ns, {}))
    useful_ns = next((ns for key, _, ns, _ in amounts if key == "useful"), None)
    mfu, lines = waterfall_lines(amounts, duration_ns, useful_ns)
    return StepWaterfall(step, 0, duration_ns, mfu, lines, is_edge=False, device_name=device_name)


def waterfall_lines(
    amounts: Iterable[tuple[str, str, int, dict[str, int]]], duration_ns: int, at_peak_ns: float | None
) -> tuple[float | None, tuple[WaterfallLine, ...]]:
    """Make the lines of a step of their keys, names, times [ns] and parts, with MFU of the step and without each."""
    mfu = None if at_peak_ns is None else at_peak_ns / duration_ns
    # A share is of the step, not of the lines: these add up to it, with lines below zero among them.
    return mfu, tuple(
        WaterfallLine(key, name, ns, ns / duration_ns, mfu, _mfu_without(at_peak_ns, duration_ns, key, ns), parts)
        for key, name, ns, parts in amounts
    )


def _mfu_without(at_peak_ns: float | None, duration_ns: int, key: str, ns: int) -> float | None:
    """MFU of the step without one of its lines; None for lines whose loss tells nothing."""
    if at_peak_ns is None or key in ("useful", UNSEPARATED) or not 0 < ns < duration_ns:
        return None
    return at_peak_ns / (duration_ns - ns)


def mean_of(steps: Sequence[StepWaterfall]) -> MeanWaterfall:
    """Add up the waterfalls of steps and divide by their number, in whole nanoseconds.

    Args:
        steps: at least one. Slow ones that a run of one rank begins with are left out.
    """
    is_one_rank = len({step.rank for step in steps}) == 1
    num_first = num_first_steps([step.duration_ns for step in steps]) if is_one_rank else 0
    steady = steps[num_first:]
    count, total_ns = len(steady), sum(step.duration_ns for step in steady)
    timed_mfu = [(step.mfu, step.duration_ns) for step in steady if step.mfu is not None]
    mfu = sum(mfu * ns for mfu, ns in timed_mfu) / total_ns if len(timed_mfu) == count else None
    # Lines of one key, in the order in which they come first.
    by_key: dict[str, list[WaterfallLine]] = {}
    for line in (line for step in steady for line in step.lines):
        by_key.setdefault(line.key, []).append(line)
    duration_ns, before, lines = total_ns // count, 0, []
    for key, of_key in by_key.items():
        ns = sum(line.ns for line in of_key)
        parts: Counter[str] = Counter()
        for line in of_key:
            parts.update(line.parts)
        # A share of the running sum, so that the lines add up to the whole nanosecond.
        line_ns = (before + ns) // count - before // count
        before += ns
        has_mfu = any(line.mfu_to is not None for line in of_key)
        mfu_to = _mfu_without(mfu * duration_ns, duration_ns, key, line_ns) if mfu is not None and has_mfu else None
        mean_parts = {name: part_ns // count for name, part_ns in parts.most_common()}
        lines.append(WaterfallLine(key, of_key[0].name, line_ns, line_ns / duration_ns, mfu, mfu_to, mean_parts))
    left_out = tuple(step.step for step in steps[:num_first])
    phases = mean_phases([(step.duration_ns, step.phases) for step in steady])
    is_timed = all(step.is_timed for step in steps)
    return MeanWaterfall(count, left_out, duration_ns, mfu, tuple(lines), _mean_traffic(steady), phases, is_timed)


def _mean_traffic(steps: Sequence[StepWaterfall]) -> OperandTraffic | None:
    traffics = [step.traffic for step in steps if step.traffic is not None]
    if not traffics:
        return None
    totals = [sum(column) // len(steps) for column in zip(*map(_counts, traffics), strict=True)]
    num_bytes, known_ns, all_ns, implausible_ns = totals
    return OperandTraffic(num_bytes, known_ns, all_ns, traffics[0].bytes_per_s, implausible_ns)


def _counts(traffic: OperandTraffic) -> tuple[int, int, int, int]:
    return traffic.num_bytes, traffic.known_ns, traffic.all_ns, traffic.implausible_ns


def operand_traffic(measured: MeasuredTrace, step: MeasuredStep, bytes_per_s: float | None) -> OperandTraffic | None:
    """Add up the operands of a step's memory-bound kernels; None if the trace has no shapes.

    An operator counts once, however many kernels it launched; on a CPU it moves nothing itself where one that it calls
    does. Operands that the memory cannot have moved in the operator's time are not counted.
    """
    trace = measured.trace
    # Time by operator, for operators whose operands were recorded.
    all_ns = 0
    owned_ns: Counter[int] = Counter()  # time that the kernels of each operator owned [ns]
    ran_ns: Counter[int] = Counter()
    for owned in (owned for owned in step.owned if owned.line == "memory"):
        all_ns += owned.ns
        if measured.operands_of(owned.event) is not None:
            operator = measured.operator_of(owned.event)
            owned_ns[operator] += owned.ns
            ran_ns[operator] += measured.duration_of(owned.event)
    moved = {
        operator: trace.operands[int(trace.host.operands[operator])].bytes_moved(trace.names[trace.host.name[operator]])
        for operator in owned_ns
    }
    # On a CPU operators stand within each other; the inner one moves what both are called with.
    moving = [operator for operator, num_bytes in moved.items() if num_bytes] if trace.is_cpu_only else []
    callers = measured.callers_of(moving)
    num_bytes = known_ns = implausible_ns = 0
    for operator, ns in owned_ns.items():
        operand_bytes = 0 if operator in callers else moved[operator]
        if operand_bytes is None:
            continue
        if operand_bytes > _most_bytes(ran_ns[operator], bytes_per_s, is_cpu=trace.is_cpu_only):
            implausible_ns += ns
            continue
        num_bytes += operand_bytes
        known_ns += ns
    has_any = known_ns or implausible_ns
    return OperandTraffic(num_bytes, known_ns, all_ns, bytes_per_s, implausible_ns) if has_any else None


def _most_bytes(ns: int, bytes_per_s: float | None, *, is_cpu: bool) -> float:
    """Bytes that a device can have moved in a time: its caches' size from the caches, the rest from its memory."""
    memory_bytes_per_s = bytes_per_s or (_FASTEST_CPU_BYTES_PER_S if is_cpu else _FASTEST_BYTES_PER_S)
    from_caches = min(_CACHE_SPEED * memory_bytes_per_s * ns / 1e9, _LARGEST_CACHE)
    return from_caches + memory_bytes_per_s * ns / 1e9


def num_first_steps(durations_ns: Sequence[int]) -> int:
    """Count the slow steps that a run begins with: in a row, each over twice the median of all, of four or more steps.

    >>> num_first_steps([50, 30, 10, 11, 12])
    2
    """
    if len(durations_ns) < 4:
        return 0
    limit = 2 * median(durations_ns)  # warm steps of one work lie within some per cent of each other
    slow = (number for number, duration_ns in enumerate(durations_ns) if duration_ns <= limit)
    return next(slow, 0)
