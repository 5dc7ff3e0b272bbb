"""A comparison for people: a table by line, and what got better and what worse in a sentence."""

from collections.abc import Sequence

from headway.explain.compare import Comparison, LineDifference
from headway.explain.text import markdown_table, plain_table, sentences
from headway.explain.unprofiled import UNSEPARATED
from headway.report import Column, format_ms, format_share

_SAME = 0.005  # of a step: smaller differences are not named in the sentence
_MOST_NAMED = 3


def comparison_text(compared: Comparison, *, markdown: bool = False) -> str:
    """Render a comparison.

    Args:
        compared: two jobs.
        markdown: a table as Markdown has it.
    """
    a, b = compared.a, compared.b
    columns = [Column("per step", "left"), Column("A ms"), Column("B ms"), Column("B - A ms"), Column("of A's step")]
    rows, footer = table_of(compared)
    heads = [f"{letter}: {job.name}, mean of {_steps(job.num_steps)}" for letter, job in (("A", a), ("B", b))]
    notes = [*differences(compared), *(f"Note: {note}" for note in compared.notes)]
    table = (markdown_table if markdown else plain_table)(columns, rows, footer)
    return "\n\n".join([sentences(heads, markdown=markdown), table, sentences(notes, markdown=markdown)])


def table_of(compared: Comparison) -> tuple[list[list[str]], list[str]]:
    """Rows of a comparison's lines, and the step as its last row: name, A, B, B - A [ms] and the share of A's step."""
    a, b = compared.a, compared.b
    rows = [
        [line.name, format_ms(line.a_ns), format_ms(line.b_ns), _signed(line.ns), _share(line.ns / a.duration_ns)]
        for line in compared.lines
        if line.a_ns or line.b_ns
    ]
    totals = [format_ms(a.duration_ns), format_ms(b.duration_ns), _signed(compared.ns)]
    return rows, ["the step", *totals, _share(compared.ns / a.duration_ns)]


def differences(compared: Comparison) -> list[str]:
    """Say how the steps differ, by which lines most, and last how much of it only a profile tells apart."""
    share = compared.ns / compared.a.duration_ns
    if abs(share) < _SAME:
        first = "A step of B takes as long as one of A, within 0.5 %."
    else:
        than = "less" if compared.ns < 0 else "more"
        first = f"A step of B takes {format_ms(abs(compared.ns))} ms {than} than one of A ({_share(share)})."
    if compared.a.mfu is not None and compared.b.mfu is not None:
        first += f" MFU {format_share(compared.a.mfu)} -> {format_share(compared.b.mfu)}."
    least_ns = _SAME * compared.a.duration_ns
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
    """Say how much time no line tells apart, and whether padding is in it, whose own line is its work at the peak."""
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
