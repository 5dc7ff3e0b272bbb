"""What the records of a run's steps show, told while it goes: each cause once."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from statistics import median
from typing import Any

from headway.report import format_share
from headway.report.numbers import number

LEAST = 0.1  # share of the time that a warning is worth
_EVERY, _KEPT = 50, 300  # steps from one look to the next, and that each looks back at
_LOOKS = 4  # so many before a fall against their median can be told
# Passes by itself, names no cause, is what a shared machine is like, or is told with the guard that failed.
_NOT_TOLD = ("first-steps", "not-compute-bound", "unstable-steps", "recompilation")


class RunWarnings:
    """Looks at the records of the last 300 steps, every 50 steps, with the rules of `headway explain`.

    A fall that takes longer, or came at once, shows against the run itself: the median MFU of the last 50 steps beside
    that of all looks before.

    Args:
        note: prints a line.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._records: deque[Mapping[str, Any]] = deque(maxlen=_KEPT)
        self._since, self._warned = 0, set[str]()
        self._usual: list[float] = []  # median MFU of each look

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a step's record, and warn of what has become of the run since the last look."""
        from headway.explain.findings.series import FALLING, FALLING_CAUSE, FALLING_HINT  # not before the first step
        from headway.explain.records import find_in_records

        self._records.append(record)
        self._since += 1
        if self._since < _EVERY:
            return
        self._since = 0
        for finding in find_in_records(self._records):
            if finding.share >= LEAST and finding.id not in _NOT_TOLD:
                self._warn(finding.id, f"{finding.seen} Likely: {finding.cause} Try: {finding.next}")
        if fall := self._fall(list(islice(reversed(self._records), _EVERY))):
            self._warn(FALLING, f"{fall} Likely: {FALLING_CAUSE} Try: {FALLING_HINT}")

    def _warn(self, cause: str, text: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            self._note(f"warning: {text}")

    def _fall(self, last: Sequence[Mapping[str, Any]]) -> str:
        """Say that MFU is below the run's own median by a tenth, and by more than looks differ; "" where it is not."""
        measured = [mfu for record in last if (mfu := _mfu(record)) is not None]
        if not measured:
            return ""
        now, before = median(measured), [*self._usual]
        self._usual.append(now)
        if len(before) < _LOOKS:
            return ""
        usual = median(before)
        scatter = median(
            abs(after - before_it) for before_it, after in pairwise(before)
        )  # which a slow fall does not widen
        if usual - now <= max(LEAST * usual, 3 * scatter):
            return ""
        return (
            f"MFU of the last {len(last)} steps is {format_share(now)}, {format_share(1 - now / usual)} below the "
            f"run's own median of {format_share(usual)}; waiting for data is in neither."
        )


def _mfu(record: Mapping[str, Any]) -> float | None:
    """Of the time in which data did not have to be waited for, whose warning is another one."""
    flops = record.get("flops")
    total = number(flops.get("total")) if isinstance(flops, Mapping) else None
    peak, wall_s = number(record.get("peak_flops_per_s")), number(record.get("wall_s"))
    if total is None or not peak or wall_s is None:
        return None
    busy_s = wall_s - (number(record.get("data_wait_s")) or 0.0)
    return total / (busy_s * peak * (number(record.get("world_size")) or 1.0)) if busy_s > 0 else None
