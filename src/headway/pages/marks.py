"""Events of a run for its charts over steps: restarts, evaluations, and where another stage of the data begins."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from headway.pages.folder import held_out, restarts
from headway.report.charts import ChartMark
from headway.report.numbers import number
from headway.report.section import ReportSection

_CHANCE = 1e-4  # that a source of a mixture stays away by itself for as long as it did, below which it was not in it
_LEAST = 5  # records with a source, of which one can tell how often it comes
_APART = 2  # records within which two changes are one
_LEFT_OVER = 0.05  # of a run's records within which a source ends that another one has taken over from
_LOOKS = {
    "restart": "a dashed line is a restart",
    "stage": "a dotted line is the beginning of another stage of the data",
    "evaluation": "a short line at the top is an evaluation",
}
_MOST_STAGES = 30  # more are no stages


def marks_of(folder: Path | None, records: Sequence[Mapping[str, Any]]) -> list[ChartMark]:
    """Collect restarts, stages and evaluations of a run.

    Args:
        folder: of the run; None for a file of records.
        records: of steps.
    """
    marks = [ChartMark(step, "restart") for step in (restarts(folder) if folder is not None else ())]
    begins = stage_begins([sources_of(record) for record in records])
    marks += [ChartMark(records[place]["step"], "stage", f"stage {n}") for n, place in enumerate(begins, start=2)]
    evaluated = {number(record.get("step")) for record in (held_out(folder) if folder is not None else ())}
    return marks + [ChartMark(step, "evaluation") for step in sorted(step for step in evaluated if step is not None)]


def legend(marks: Sequence[ChartMark]) -> str:
    """Say how the marks of a run look in its charts; "" of a run without any."""
    kinds = {mark.kind for mark in marks}
    parts = [words for kind, words in _LOOKS.items() if kind in kinds]
    return f"In the charts over steps {', '.join(parts)}." if parts else ""


def sources_of(record: Mapping[str, Any]) -> frozenset[str]:
    """Sources that a record has tokens of."""
    sources = record.get("sources")
    if not isinstance(sources, Mapping):
        return frozenset()
    tokens = {name: number(source.get("tokens")) for name, source in sources.items() if isinstance(source, Mapping)}
    return frozenset(name for name, count in tokens.items() if count)


def stage_begins(sources: Sequence[frozenset[str]]) -> list[int]:
    """Find where a source begins or ends to be played, and not by chance, as a rare one of a mixture may.

    Args:
        sources: of each record.

    Returns:
        Places of the records that begin a stage, without the first; none of a run whose sources change all the time.

    >>> stage_begins([frozenset("a")] * 10 + [frozenset("ab")] * 10)
    [10]
    """
    places: dict[str, list[int]] = {}
    for place, names in enumerate(sources):
        for name in names:
            places.setdefault(name, []).append(place)
    starts, ends = set(), set()
    for first, last, count in ((of[0], of[-1], len(of)) for of in places.values()):
        # The chance that a source which comes so often is missing so many records in a row.
        often = (count - 1) / (last - first + 1)
        if count >= _LEAST and (1 - often) ** first < _CHANCE:
            starts.add(first)
        if count >= _LEAST and (1 - often) ** (len(sources) - 1 - last) < _CHANCE:
            ends.add(last + 1)
    begins: list[int] = []
    for place in sorted(starts | ends):
        # What is left of a source in shuffled packs plays on for a while where the next one has begun.
        apart = _APART if place in starts else max(_APART, _LEFT_OVER * len(sources))
        if not begins or place > begins[-1] + apart:
            begins.append(place)
    return begins if len(begins) < _MOST_STAGES else []


def stages(marks: Sequence[ChartMark], records: Sequence[Mapping[str, Any]]) -> ReportSection:
    """Steps, sources and tokens of each stage; no rows where there is one alone."""
    steps = [record["step"] for record in records]
    begins = [0, *(steps.index(mark.step) for mark in marks if mark.kind == "stage"), len(steps)]
    rows = []
    for stage, (begin, end) in enumerate(pairwise(begins), start=1):
        names = dict.fromkeys(name for record in records[begin:end] for name in sorted(sources_of(record)))
        tokens = sum(number(record.get("tokens")) or 0.0 for record in records[begin:end])
        rows.append([f"{stage}", f"{steps[begin]} to {steps[end - 1]}", ", ".join(names), f"{tokens:,.0f}"])
    headings = ["stage", "steps", "sources", "tokens"]
    return ReportSection("Stages of the data", headings, rows if len(rows) > 1 else ())
