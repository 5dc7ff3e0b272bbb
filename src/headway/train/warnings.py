"""What the records of a run's last steps show, told while it goes: each cause once."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

LEAST = 0.1  # share of the time that a warning is worth
_EVERY, _KEPT = 50, 300  # steps from one look to the next, and that each looks back at
# Passes by itself, names no cause, is what a shared machine is like, or is told with the guard that failed.
_NOT_TOLD = ("first-steps", "not-compute-bound", "unstable-steps", "recompilation")


class RunWarnings:
    """Looks at the records of the last 300 steps, every 50 steps, with the rules of `headway explain`.

    Args:
        tell: prints a line.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._records: deque[Mapping[str, Any]] = deque(maxlen=_KEPT)
        self._since, self._told = 0, set[str]()

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a step's record, and warn of what has become of the run since the last look."""
        from headway.explain.records import find_in_records  # not before the first step

        self._records.append(record)
        self._since += 1
        if self._since < _EVERY:
            return
        self._since = 0
        for finding in find_in_records(self._records):
            if finding.share >= LEAST and finding.id not in (*_NOT_TOLD, *self._told):
                self._told.add(finding.id)
                self._tell(f"warning: {finding.seen} Likely: {finding.cause} Try: {finding.next}")
