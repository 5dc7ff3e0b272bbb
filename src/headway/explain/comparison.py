"""Two explanations line by line: which lines got better and worse, in seconds per step, for programs and for people."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError
from headway.explain.explanation import (
    SCHEMA_VERSION,
    UNSEPARATED,
    JobExplanation,
    MeanWaterfall,
    mean_of,
)
from headway.report import format_ms, format_share
from headway.report.section import ReportSection

_SAME = 0.005  # part of a step; the sentence does not name smaller differences
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class ComparedJob:
    """One of two jobs."""

    name: str  # name that the user gave it
    mean: MeanWaterfall  # mean step, without slow first ones
    notes: tuple[str, ...]  # remarks on it

    def to_dict(self) -> dict[str, Any]:
        """Give the JSON-ready record."""
        return mean_record(self.name, self.mean, self.notes)


def mean_record(name: str, mean: MeanWaterfall, notes: Sequence[str]) -> dict[str, Any]:
    """Facts of a job's mean step without its lines, JSON-ready."""
    return {
        "name": name,
        "num_steps": mean.num_steps,
        "left_out": list(mean.left_out),
        "duration_ns": mean.duration_ns,
        "mfu": mean.mfu,
        "notes": list(notes),
    }


@dataclass(frozen=True, slots=True)
class LineDifference:
    """A line of both waterfalls."""

    key: str  # name for programs
    name: str  # name for people
    a_ns: int  # time in a mean step of the first job [ns]; 0 where that has no such line
    b_ns: int  # the same of the second one [ns]

    @property
    def ns(self) -> int:
        """Time that the second job takes longer [ns]; below 0 where it is faster."""
        return self.b_ns - self.a_ns


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two jobs line by line."""

    a: ComparedJob  # the first one, which is compared against
    b: ComparedJob  # the second one
    lines: tuple[LineDifference, ...]  # in the waterfall's order; their differences add up to that of the steps
    notes: tuple[str, ...]  # remarks on both

    @property
    def ns(self) -> int:
        """Time that a step of the second job takes longer [ns]."""
        return self.b.mean.duration_ns - self.a.mean.duration_ns

    def to_dict(self) -> dict[str, Any]:
        """The object that `headway explain A B --json` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "a": self.a.to_dict(),
            "b": self.b.to_dict(),
            "difference_ns": self.ns,
            "lines": [
                {"name": line.name, "key": line.key, "a_ns": line.a_ns, "b_ns": line.b_ns, "difference_ns": line.ns}
                for line in self.lines
            ],
            "notes": list(self.notes),
        }


def compare(a: tuple[str, JobExplanation], b: tuple[str, JobExplanation]) -> Comparison:
    """Compare the mean steps of two jobs, each with its name, the second against the first.

    Raises:
        ConfigError: the log of one does not tell how long a step takes, so that its "step" is a second.
    """
    if not (a[1].is_timed and b[1].is_timed):
        which = b[0] if a[1].is_timed else a[0]
        raise ConfigError(
            f"{which} does not tell how long its steps took, so there is nothing to compare in seconds per step. Give "
            "a log whose lines have a time or a stamp; `headway explain` shows each by itself."
        )
    jobs = [ComparedJob(name, mean_of(explanation.steps), explanation.notes) for name, explanation in (a, b)]
    # A line that one of the two does not have took no time there, so that differences still add up.
    of_a, of_b = ({line.key: line for line in job.mean.lines} for job in jobs)
    lines = [
        LineDifference(
            key,
            (of_a.get(key) or of_b[key]).name,
            of_a[key].ns if key in of_a else 0,
            of_b[key].ns if key in of_b else 0,
        )
        for key in _in_both_orders([*of_a], [*of_b])
    ]
    # A note that holds for both stands once, a note on one job begins with its letter.
    notes = []
    if (UNSEPARATED in of_a) != (UNSEPARATED in of_b):
        notes.append("one of the two has no profile: what it cannot separate stands in one line.")
    for letter, job in zip("AB", jobs, strict=True):
        if job.mean.left_out:
            slow = ", ".join(map(str, job.mean.left_out))
            notes.append(f"{letter}: step {slow} at the beginning took over twice the median and is left out.")
    both = [note for note in jobs[0].notes if note in jobs[1].notes]
    notes += both
    for letter, job in zip("AB", jobs, strict=True):
        notes += [f"{letter}: {note}" for note in job.notes if note not in both]
    return Comparison(jobs[0], jobs[1], tuple(lines), tuple(notes))


def _in_both_orders(first: list[str], second: list[str]) -> list[str]:
    """Keys of both jobs in the first job's order; a further key of the second job stands behind the key before it."""
    keys = list(first)
    for place, key in enumerate(second):
        if key not in keys:
            keys.insert(keys.index(second[place - 1]) + 1 if place else 0, key)
    return keys


def comparison_text(compared: Comparison, *, markdown: bool = False) -> str:
    """Render a comparison: the differences, then the table."""
    jobs = (("A", compared.a), ("B", compared.b))
    heads = [f"{letter}: {job.name}, mean of {_steps(job.mean.num_steps)}" for letter, job in jobs]
    first = ReportSection(points=[*heads, *differences(compared)])
    notes = [f"Note: {note}" for note in compared.notes]
    sections = [first, line_section(compared), *([ReportSection(points=notes)] if notes else [])]
    return "\n\n".join(section.as_markdown() if markdown else section.as_terminal() for section in sections)


def line_section(compared: Comparison) -> ReportSection:
    """Table of a comparison's lines, with the step as its last row: A, B, B - A [ms] and the share of A's step."""
    a, b = compared.a.mean, compared.b.mean
    rows = [
        [line.name, format_ms(line.a_ns), format_ms(line.b_ns), _signed(line.ns), _share(line.ns / a.duration_ns)]
        for line in compared.lines
        if line.a_ns or line.b_ns
    ]
    totals = [format_ms(a.duration_ns), format_ms(b.duration_ns), _signed(compared.ns)]
    footer = ["the step", *totals, _share(compared.ns / a.duration_ns)]
    return ReportSection("", ["per step", "A ms", "B ms", "B - A ms", "of A's step"], rows, footer=footer)


def differences(compared: Comparison) -> list[str]:
    """Say how the steps differ, by which lines most, and last how much of the difference only a profile separates."""
    share = compared.ns / compared.a.mean.duration_ns
    if abs(share) < _SAME:
        first = "A step of B takes as long as one of A, within 0.5 %."
    else:
        than = "less" if compared.ns < 0 else "more"
        first = f"A step of B takes {format_ms(abs(compared.ns))} ms {than} than one of A ({_share(share)})."
    if compared.a.mean.mfu is not None and compared.b.mean.mfu is not None:
        first += f" MFU {format_share(compared.a.mean.mfu)} -> {format_share(compared.b.mean.mfu)}."
    least_ns = _SAME * compared.a.mean.duration_ns
    separated = [line for line in compared.lines if line.key != UNSEPARATED]
    better = sorted((line for line in separated if line.ns < -least_ns), key=lambda line: line.ns)
    worse = sorted((line for line in separated if line.ns > least_ns), key=lambda line: -line.ns)
    unknown = [line for line in compared.lines if line.key == UNSEPARATED and abs(line.ns) > least_ns]
    return [
        first,
        *([f"Better: {_lines_text(better)}."] if better else []),
        *([f"Worse: {_lines_text(worse)}."] if worse else []),
        *(_unseparated(line, worse) for line in unknown),
    ]


def _unseparated(line: LineDifference, worse: Sequence[LineDifference]) -> str:
    """Say how much time only a profile separates, and whether padding beyond its time at peak is part of it."""
    text = f"Kernels and waiting that only a profile tells apart: {_signed(line.ns)} ms"
    if line.ns > 0 and any(other.key == "padding" for other in worse):
        text += "; what padding took beyond its time at peak is part of it"
    return f"{text}."


def _lines_text(lines: Sequence[LineDifference]) -> str:
    return ", ".join(f"{line.name} ({_signed(line.ns)} ms)" for line in lines[:_MOST_NAMED])


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


def _signed(ns: int) -> str:
    return f"{ns / 1e6:+,.2f}"


def _share(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f} %"  # never -0.0
