"""Seconds per bucket from the lines of a goodput ledger."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from headway.errors import LogError
from headway.log.jsonl import read_jsonl
from headway.report import Column, format_count, format_duration, format_share, presentable, render_pairs, render_table
from headway.report.quantity import finite, integer

Bucket = Literal["set-up", "compile", "data wait", "step", "evaluation", "checkpoint", "recovery", "idle"]
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)
SCHEMA_VERSION = 1
FILE_NAME = "goodput.jsonl"


@dataclass(frozen=True, slots=True)
class GoodputReport:
    """Wall time of a run by bucket.

    Attributes:
        ns: time in each bucket, all buckets in their order [ns].
        lost_ns: part of `recovery` that is steps done after the last checkpoint before a restart [ns].
        restarts: processes that went on with the run.
        warnings: what makes the numbers less sure.
        failure: the error that ended the last process; "" if none is known.
    """

    ns: Mapping[Bucket, int]
    lost_ns: int
    restarts: int
    warnings: tuple[str, ...]
    failure: str = ""

    @property
    def seconds(self) -> dict[Bucket, float]:
        """Time in each bucket [s]."""
        return {bucket: ns / 1e9 for bucket, ns in self.ns.items()}

    @property
    def wall_s(self) -> float:
        """Time from the first process's start to the last line, in whichever bucket [s]."""
        return sum(self.ns.values()) / 1e9

    @property
    def goodput(self) -> float:
        """Steps that were not lost / wall time, a fraction; 0 of no time."""
        total_ns = sum(self.ns.values())
        return self.ns["step"] / total_ns if total_ns else 0.0

    def to_dict(self) -> dict[str, Any]:
        """One JSON-ready object; seconds, counts and fractions."""
        return {
            "schema_version": SCHEMA_VERSION,
            "wall_s": self.wall_s,
            "goodput": self.goodput,
            "seconds": self.seconds,
            "lost_s": self.lost_ns / 1e9,
            "restarts": self.restarts,
            "warnings": list(self.warnings),
            "failure": self.failure,
        }

    def as_table(self) -> str:
        """A row per bucket, and the goodput, for people."""
        wall_s = self.wall_s
        columns = [Column("bucket", "left"), Column("time"), Column("share")]
        rows = [
            [bucket, format_duration(seconds), format_share(seconds / wall_s if wall_s else 0.0)]
            for bucket, seconds in self.seconds.items()
        ]
        footer = ["wall time", format_duration(wall_s), format_share(1.0)]
        pairs = [
            ("goodput", format_share(self.goodput)),
            ("restarts", format_count(self.restarts)),
            ("lost progress", f"{format_duration(round(self.lost_ns / 1e9, 3))} of steps were done again, in recovery"),
            *([("ended by", presentable(self.failure))] if self.failure else []),
        ]
        return f"{render_table(columns, rows, footer=footer)}\n\n{render_pairs(pairs)}"


def read_goodput(path: Path) -> GoodputReport:
    """Sum up a ledger, that of a running process until its last line.

    Args:
        path: the file, or the run folder that holds it as goodput.jsonl.

    Raises:
        LogError: the file cannot be read or is no ledger.
    """
    if path.is_dir():
        path = path / FILE_NAME
    return account(read_jsonl(path), str(path))


def account(lines: Iterable[Mapping[str, Any]], source: str) -> GoodputReport:
    """Sum up the lines of a ledger.

    Time between two processes is `idle`. Lost progress is the `step` time since the checkpoint that a restart loaded.

    Raises:
        LogError: a line is not one of a ledger.
    """
    books = _Books(source)
    number = 0
    for number, line in enumerate(lines, start=1):
        try:
            books.enter(line)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LogError(
                f"{source}, line {number} is not a line of a goodput ledger: {str(dict(line))[:200]}. Give a run "
                "folder or its goodput.jsonl."
            ) from error
    if number == 0:
        raise LogError(f"{source} holds no line of a goodput ledger.")
    return GoodputReport(books.ns, books.lost_ns, books.num_processes - 1, tuple(books.warnings), books.failure)


class _Books:
    def __init__(self, source: str) -> None:
        self.source = source
        self.ns: dict[Bucket, int] = dict.fromkeys(BUCKETS, 0)
        self.lost_ns = 0
        self.num_processes = 0
        self.warnings: list[str] = []
        self.failure = ""
        self._wall_s: float | None = None
        # Step time since each checkpoint that still counts, the run's start first: [(checkpoint's step, ns)].
        self._since: list[tuple[int, int]] = [(0, 0)]

    def enter(self, line: Mapping[str, Any]) -> None:
        kind = line["kind"]
        if kind == "start":
            self._start(line["schema_version"], finite(line["wall_s"]))
        elif kind == "spans":
            self._spans(line["ns"])
            self._wall_s = finite(line["wall_s"])
        elif kind == "checkpoint":
            self._since.append((integer(line["step"]), 0))
        elif kind == "resumed":
            self._lose_after(integer(line["step"]))
        elif kind == "failed":
            self.failure = str(line["error"])
        else:
            raise ValueError(kind)

    def _start(self, version: int, wall_s: float) -> None:
        if version != SCHEMA_VERSION:
            raise LogError(f"{self.source} is of version {version}; this Headway reads version {SCHEMA_VERSION}.")
        if self._wall_s is not None:
            gap_s = wall_s - self._wall_s
            if gap_s < 0:
                self.warnings.append(
                    f"the wall clock was {format_duration(-gap_s)} further when one process ended than when the next "
                    "began, so it stepped back between them; the time between them is taken as 0."
                )
            self.ns["idle"] += round(max(0.0, gap_s) * 1e9)
        self.num_processes += 1
        self.failure = ""
        self._wall_s = wall_s

    def _spans(self, ns: Mapping[Bucket, int]) -> None:
        for bucket, span in ns.items():
            if integer(span) < 0:
                raise ValueError(span)
            self.ns[bucket] = self.ns[bucket] + integer(span)  # a bucket that is not known is a KeyError
        step, since = self._since[-1]
        self._since[-1] = step, since + ns.get("step", 0)

    def _lose_after(self, from_step: int) -> None:
        lost = 0
        while len(self._since) > 1 and self._since[-1][0] > from_step:
            lost += self._since.pop()[1]
        step, since = self._since[-1]
        self._since[-1] = step, 0
        if step != from_step and since:
            self.warnings.append(
                f"the run went on from step {from_step}, of which the ledger knows no checkpoint; all steps since "
                f"{f'that of step {step}' if step else 'the start'} are taken as lost. Call "
                "checkpoint_saved(step) after each checkpoint."
            )
        lost += since
        self.lost_ns += lost
        self.ns["step"] -= lost
        self.ns["recovery"] += lost
