"""The rank that the other ranks wait for, and why: more work, a slower device, or time in which it did not compute."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headway.report import format_flops, format_ms, format_rate, format_share

_BUSY = ("matmul", "memory", "unexplained")
# Lines in which a rank can be late, and what it did in them.
_LINE_REASONS = {
    "idle.data": "it waited {} longer for data",
    "idle.launch": "its host came {} later (launches, Python between operators)",
    "idle.sync": "its host waited {} longer for its device (synchronisations)",
    "idle.other": "its device did nothing for {} more, though work was launched",
    "copies": "it copied for {} more",
    "optimizer": "its optimizer took {} longer",
    "aside": "it logged, evaluated, wrote a checkpoint or compiled for {} more",
}
_LEAST_PART = 0.25  # part of the waiting; a cause that explains less is not the reason
_MOST = 0.75  # part of the waiting; the text names the part of a cause that covers less
_ALIKE = 0.05  # ratios as near to 1 as this are called the same


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step of one rank."""

    rank: int  # rank of the process
    spent: Mapping[str, int]  # time of each line [ns]
    useful_flops: int | None  # FLOPs that it had to compute; None where that is not known
    waits: Mapping[int, int]  # time for which it waited for each of the other ranks [ns]

    @property
    def busy_ns(self) -> int:
        """Time in which the rank computed forward and backward [ns]."""
        return sum(self.spent.get(key, 0) for key in _BUSY)


@dataclass(frozen=True, slots=True)
class WaitedFor:
    """The rank that the other ranks waited for longest in a step, and why."""

    step: int  # number of the step
    rank: int  # rank that was waited for
    wait_ns: int  # time that another rank waited for it, on average [ns]
    # "work", "speed", "busy" (longer at work, FLOPs not known), the key of the line in which it was longer than the
    # others, or "unknown"
    cause: str
    cause_ns: int  # time that this cost it more than the others' median [ns]
    # time by which the step would be shorter without its delay: the others wait for it no longer, up to the next one
    # that comes late [ns]
    cost_ns: int = 0
    flops: int | None = None  # useful FLOPs of the rank; None where those of some rank are not known
    flops_of_others: float | None = None  # median of the others
    flops_per_s: float | None = None  # useful FLOPs / time in which it computed [FLOP/s]; None likewise
    flops_per_s_of_others: float | None = None  # median of the others [FLOP/s]

    def sentence(self) -> str:
        """Sentence on the wait, without a full stop."""
        return f"rank {self.rank} made the others wait {format_ms(self.wait_ns)} ms: {self.why()}"

    def to_dict(self) -> dict[str, Any]:
        """Give the JSON-ready record."""
        return asdict(self)

    @property
    def explained(self) -> float:
        """Part of the wait that the cause covers, a fraction; 0 where no cause is known."""
        return min(1.0, self.cause_ns / self.wait_ns) if self.wait_ns > 0 else 0.0

    def why(self) -> str:
        """The reason alone, with its part of the wait if that is not most of the wait."""
        if self.cause == "unknown" or self.explained >= _MOST:
            return self._reason()
        return f"{self._reason()}, which explains {format_share(self.explained)} of it"

    def _reason(self) -> str:
        if self.cause in _LINE_REASONS:
            return _LINE_REASONS[self.cause].format(f"{format_ms(self.cause_ns)} ms")
        if self.cause == "busy":
            return (
                f"it computed {format_ms(self.cause_ns)} ms longer; whether on more work or on a slower device is not "
                "known without the FLOPs of each rank"
            )
        if self.flops is None or not self.flops_of_others or not self.flops_per_s or not self.flops_per_s_of_others:
            return "nothing that its trace shows took that much longer than on the others"
        more, faster = self.flops / self.flops_of_others, self.flops_per_s / self.flops_per_s_of_others
        if self.cause == "work":
            against = f"({format_flops(self.flops)} against {format_flops(self.flops_of_others)})"
            return f"it had {more:.2g}x the work {against}"
        if self.cause == "speed":
            of_work = "the same work" if abs(more - 1) < _ALIKE else f"{more:.2g}x the work"
            against = f"({format_rate(self.flops_per_s)} against {format_rate(self.flops_per_s_of_others)})"
            return f"it computed {faster:.2g}x as fast {against} with {of_work}"
        return "nothing that its trace shows took that much longer than on the others"


def waited_for(step: int, ranks: Sequence[RankStep]) -> WaitedFor | None:
    """Find the rank that the other ranks waited for longest in a step, and why.

    What it computed longer, by more work or at less speed, is set beside each line in which it did not compute: the
    largest of these times is the cause, if it is a fair part of the waiting.

    Returns:
        The rank; None where none waited.
    """
    # The rank that waits least came last. In a tree of messages others wait for one that is held up itself, and each
    # rank waits a little for each other: so what it waits less than the others is what they wait for it.
    own_ns = {rank_step.rank: sum(rank_step.waits.values()) for rank_step in ranks}
    slowest = min(ranks, key=lambda rank_step: own_ns[rank_step.rank])
    others = [rank_step for rank_step in ranks if rank_step is not slowest]
    longer_ns = [own_ns[rank_step.rank] - own_ns[slowest.rank] for rank_step in others]
    wait_ns = sum(longer_ns) // max(len(others), 1)
    if wait_ns <= 0:
        return None
    # Without its delay the step would end when the next one comes: the one that waited least of the others.
    cost_ns = min(longer_ns)
    # Time of the rank above the others' median, for each line in which it did not compute.
    longer = {
        key: round(slowest.spent.get(key, 0) - statistics.median(rank_step.spent.get(key, 0) for rank_step in others))
        for key in _LINE_REASONS
    }
    # Longer computing is more work or less speed, which only the FLOPs of all ranks tell apart.
    rates = [
        rank_step.useful_flops / rank_step.busy_ns * 1e9
        for rank_step in others
        if rank_step.useful_flops and rank_step.busy_ns
    ]
    rates_and_flops: dict[str, Any] = {}
    if slowest.useful_flops and slowest.busy_ns and len(rates) == len(others):
        usual = statistics.median(rates)
        flops = statistics.median(rank_step.useful_flops or 0 for rank_step in others)
        busy_ns = statistics.median(rank_step.busy_ns for rank_step in others)
        longer[_why_busy(slowest.useful_flops / flops, slowest.busy_ns / busy_ns)] = round(slowest.busy_ns - busy_ns)
        rates_and_flops = {
            "flops": slowest.useful_flops,
            "flops_of_others": flops,
            "flops_per_s": slowest.useful_flops / slowest.busy_ns * 1e9,
            "flops_per_s_of_others": usual,
        }
    else:
        longer["busy"] = round(slowest.busy_ns - statistics.median(rank_step.busy_ns for rank_step in others))
    # The cause is what took longest beyond the others, unless most of the waiting came from elsewhere.
    cause = max(longer, key=longer.__getitem__)
    if longer[cause] < _LEAST_PART * wait_ns:
        return WaitedFor(step, slowest.rank, wait_ns, "unknown", 0, cost_ns, **rates_and_flops)
    return WaitedFor(step, slowest.rank, wait_ns, cause, longer[cause], cost_ns, **rates_and_flops)


def _why_busy(times_the_work: float, times_as_long: float) -> str:
    """Tell more work from less speed.

    Time is work x time per FLOP, so what a rank takes times as long splits into two factors, and the larger one is the
    cause. Differences would not do: with thirty times the work, noise of the same order makes a device look slow.
    """
    return "work" if times_the_work**2 > times_as_long else "speed"
