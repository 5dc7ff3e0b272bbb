"""The steps of a run, or of two: the parts of their time, and charts and tables of series, stages, phases, sources."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headway.explain.explanation import UNSEPARATED, MeanWaterfall
from headway.explain.phases import phase_section, phase_sentences
from headway.log.run_files import further_losses
from headway.pages.folder import restarts
from headway.report import format_duration, format_flops, format_rounded, format_share
from headway.report.charts import FORMS, ChartMark, DrawnLine, Form, histogram, lines_chart
from headway.report.quantity import number
from headway.report.section import ReportSection
from headway.report.step_lines import NAMES, SLOW

Records = Sequence[Mapping[str, Any]]
"""Records of a run's steps, each step once."""
LETTERS = "AB"
_FEW, _FEW_TIMES = 2, 20  # values; fewer make no line, and fewer steps no picture of how long steps took
_SLOW, _MOST_SLOW = 1.5, 10  # a step that is told by its number took so many times the median
_TOLD = 0.1  # share of a step, or of its tokens, that may explain it
_BY_RATIO = re.compile(r"(.+_)?loss|grad_norm")  # numbers whose falls to a hundredth are seen on an axis of ratios
Series = tuple[tuple[str, str, Form], ...]  # key of a record, title, and how a value reads
FIRST: Series = (
    ("loss", "Loss", "plain"),
    ("mfu", "MFU", "share"),
    ("tokens_per_s", "Tokens per second", "count"),
    ("step_s", "Time of a step", "duration"),
)
LEARNING: Series = (("lr", "Learning rate", "plain"), ("grad_norm", "Gradient norm", "plain"))
DATA: Series = (
    ("data_wait_share", "Waiting for data, share of a step", "share"),
    ("padding_share", "Padding, share of slots", "share"),
    ("fill", "Fill, tokens over the room of the packs", "share"),
    ("balance", "Balance, mean over most FLOPs of the ranks", "share"),
)
_SHOWN_FURTHER = 1000  # last records in which further losses are looked for
# Chance that a source of a mixture stays away by itself for so long; below it the source was not in the mixture.
_CHANCE = 1e-4
_LEAST = 5  # records with a source, of which one can tell how often it comes
_APART = 2  # records within which two changes are one
_LEFT_OVER = 0.05  # part of a run's records within which a source ends after another source has taken over
_MOST_STAGES = 30  # more are no stages
USEFUL = NAMES["useful"]
# Parts of a step by the beginnings of the keys of their lines; the last has what no other claims.
_PARTS = {
    USEFUL: ("useful",),
    "slower than peak": ("ceiling", "recomputation", "padding", "matmul", "memory", SLOW, UNSEPARATED),
    "optimizer": ("optimizer",),
    "data": ("idle.data",),
    "exchange": ("communication",),
    "other": ("",),
}
_NOT_TOLD_APART = "work and waiting, not told apart"
_NO_PROFILE = "Without a profile, kernels are not told apart from launches, copies and exchanges."


class StepPart(NamedTuple):
    """A part of the mean step of a run, or of two."""

    name: str
    colour: int  # number of its colour, the same on every page
    ns: Sequence[int]  # time in the step of each run [ns]
    lines: Sequence[tuple[str, Sequence[int]]]  # lines that it is made of, where a profile or a record tells several


def step_parts(means: Sequence[MeanWaterfall]) -> list[StepPart]:
    """Join the lines of mean steps to at most six parts, which add up to the steps."""
    by_key = [{line.key: line.ns for line in mean.lines} for mean in means]
    names = {line.key: line.name for mean in reversed(means) for line in mean.lines}
    left, parts = dict.fromkeys(key for lines in by_key for key in lines), []
    has_work = "useful" in left
    for colour, (name, begins) in enumerate(_PARTS.items()):
        keys = [key for key in left if key.startswith(begins)]
        left = {key: None for key in left if key not in keys}
        rows = [(names[key], [lines.get(key, 0) for lines in by_key]) for key in keys]
        rows = [row for row in rows if any(row[1])]
        ns = [sum(of_run) for of_run in zip(*(row[1] for row in rows), strict=True)]
        if rows:
            title = name if has_work or UNSEPARATED not in keys else _NOT_TOLD_APART
            parts.append(StepPart(title, colour, ns, rows if len(rows) > 1 else ()))
    return parts


def time_section(means: Sequence[MeanWaterfall], about: str = "") -> ReportSection:
    """Show the parts of the mean step of a run, or of two with their difference, each with its lines below it."""
    parts, total = step_parts(means), [mean.duration_ns for mean in means]
    is_timed = all(mean.is_timed for mean in means)
    rows = []
    for part in parts:
        rows.append([part.name, *time_cells(part.ns, total, is_timed=is_timed)])
        rows += [[f"- {name}", *time_cells(ns, total, is_timed=is_timed)] for name, ns in part.lines]
    headings = ["part", "A", "B", "B - A"] if len(means) > 1 else ["part", *["time"] * is_timed, "share"]
    footer = ["the step", *time_cells(total, total, is_timed=is_timed)]
    says = [f"{about[:1].upper()}{about[1:].removesuffix('.')}."] if about else []
    if any(line.key == UNSEPARATED for mean in means for line in mean.lines):
        says.append(_NO_PROFILE)
    return ReportSection("Where a step's time goes", headings, rows, " ".join(says), footer=footer)


def time_cells(ns: Sequence[int], total: Sequence[int], *, is_timed: bool) -> list[str]:
    """A time and its share of the step; of two runs both times and their difference."""
    if len(ns) > 1:
        return [*(f"{time / 1e6:,.1f} ms" for time in ns), f"{round((ns[1] - ns[0]) / 1e6, 1) + 0.0:+,.1f} ms"]
    return [*([f"{ns[0] / 1e6:,.1f} ms"] if is_timed else []), format_share(ns[0] / total[0])]


def phases(mean: MeanWaterfall) -> list[ReportSection]:
    """Table of the phases that a loop names, and what each phase that generates takes at least."""
    if not mean.phases:
        return []
    table = phase_section(mean.phases, mean.duration_ns)
    bars = [max(0, line.ns) / mean.duration_ns for line in mean.phases if line.ns or line.flops]
    rows, says = [*table.rows, table.footer], " ".join(phase_sentences(mean.phases))
    headings = ["phase", *table.headings[1:]]
    return [ReportSection("Phases of a step", headings, rows, says, bars=[*bars, 0.0])]


def is_broken(record: Mapping[str, Any]) -> bool:
    """Tell whether the loss of a record is not finite, where there was something to learn."""
    is_missing = "loss" in record and number(record["loss"]) is None
    return is_missing and not record.get("empty") and not further_losses(record)


def further_series(records: Records) -> Series:
    """Series of the losses that an objective records beside "loss"."""
    names = dict.fromkeys(name for record in records[-_SHOWN_FURTHER:] for name in further_losses(record))
    return tuple((f"{name}_loss", f"{name.capitalize()} loss", "plain") for name in names)


def series_charts(
    runs: Sequence[Records], series: Series, marks: Sequence[ChartMark] = (), dots: Sequence[DrawnLine] = ()
) -> list[ReportSection]:
    """A chart over the steps for each number of the records that changes; dots belong to the loss."""
    sections = []
    for key, name, form, by_run in _series_of(runs, series):
        values = {value for values in by_run for value in values if value is not None}
        if len(values) < _FEW:
            continue
        steps = [[float(record["step"]) for record in records] for records in runs]
        names = LETTERS if len(runs) > 1 else [""]
        lines = [DrawnLine(*line) for line in zip(names, steps, by_run, strict=False)]
        points = dots if key == "loss" else ()
        title, _, remark = name.partition(", ")
        if points:
            remark = "line: training, dots: held out" if len(runs) == 1 else "dots: held out"
        chart = lines_chart(
            title, lines, form=form, marks=marks, dots=points, by_ratio=bool(_BY_RATIO.fullmatch(key)), is_noisy=True
        )
        sections.append(ReportSection(title, chart=chart, remark=remark))
    return sections


def _series_of(runs: Sequence[Records], series: Series) -> Iterator[tuple[str, str, Form, list[list[float | None]]]]:
    """Values of the series that all runs have. The balance of one rank says nothing, and is left out."""
    for key, name, form in series:
        by_run = [[number(record.get(key)) for record in records] for records in runs]
        values = {value for values in by_run for value in values if value is not None}
        if all({*of_run} - {None} for of_run in by_run) and values - {1.0 if key == "balance" else 0.0}:
            yield key, name, form, by_run


def series_numbers(runs: Sequence[Records], series: Series) -> ReportSection:
    """Percentiles and extremes of each number of the records; of two runs the medians and what changed."""
    rows = []
    for _, title, form, by_run in _series_of(runs, series) if len(runs[0]) >= _FEW else ():
        write = FORMS[form]
        summaries = [summary_of(records, values) for records, values in zip(runs, by_run, strict=True)]
        medians = [summary["50 %"] for summary in summaries]
        if len(runs) > 1:
            rows.append([title, *map(write, medians), change(*medians, is_share=form == "share")])
            continue
        (of,) = summaries
        ends = [f"{write(of[end])} (step {of[f'step of {end}']:,.0f})" for end in ("smallest", "largest")]
        rows.append([title, *(write(of[name]) for name in ("5 %", "50 %", "95 %")), *ends])
    headings = ["of the records", "5 %", "50 %", "95 %", "smallest", "largest"]
    return ReportSection("Percentiles", headings if len(runs) == 1 else ["median", "A", "B", "B against A"], rows)


def change(before: float, after: float, *, is_share: bool = False) -> str:
    """Difference of two numbers for people: of shares in points, else as a share of the first."""
    if not is_share and not before:
        return "-"
    percent = round(100 * (after - before if is_share else after / before - 1), 1) + 0.0  # never -0.0
    return f"{percent:+.1f} {'points' if is_share else '%'}"


def step_times(records: Records) -> list[ReportSection]:
    """Percentiles of step times, and the slowest steps with the reasons that their records give."""
    timed = [(value, record) for record in records if (value := number(record.get("step_s"))) is not None]
    times = [value for value, _ in timed]
    if len(times) < _FEW_TIMES:
        return []
    sections = [ReportSection(title := "How long steps took", chart=histogram(title, times, form=format_duration))]
    usual_s = float(np.median(times))
    slow = sorted((pair for pair in timed if pair[0] > _SLOW * usual_s), key=lambda pair: -pair[0])
    usual_tokens = float(np.median(known(records, "tokens") or [0.0]))
    rows = [
        [f"{record['step']:,}", format_duration(time_s), f"{time_s / usual_s:.1f}", _why_slow(record, usual_tokens)]
        for time_s, record in slow[:_MOST_SLOW]
    ]
    if rows:
        says = f"{len(slow):,} of {len(times):,} took more than {_SLOW} times the median, {format_duration(usual_s)}."
        headings = ["step", "time", "x median", "its record says"]
        if not any(why for *_, why in rows):
            headings, rows = headings[:-1], [row[:-1] for row in rows]
        sections.append(ReportSection("The slowest steps", headings, rows, says))
    return sections


def _why_slow(record: Mapping[str, Any], usual_tokens: float) -> str:
    """Cause that a slow step's own record shows; mostly there is none."""
    reasons = []
    if (waited := number(record.get("data_wait_share")) or 0.0) >= _TOLD:
        reasons.append(f"waited for data {format_share(waited)}")
    if usual_tokens and (tokens := number(record.get("tokens")) or 0.0) >= (1 + _TOLD) * usual_tokens:
        reasons.append(f"{tokens / usual_tokens:.1f} times the usual tokens")
    if number(record.get("recompiles")):
        reasons.append("compiled again")
    return ", ".join(reasons)


def summary_of(records: Records, values: Sequence[float | None]) -> dict[str, float]:
    """Extremes of a number of records with their steps, and its percentiles."""
    pairs = [(value, int(record["step"])) for record, value in zip(records, values, strict=True) if value is not None]
    low, high = min(pairs), max(pairs)
    extremes = {"smallest": low[0], "step of smallest": low[1], "largest": high[0], "step of largest": high[1]}
    quantiles = np.percentile([value for value, _ in pairs], [5, 50, 95])
    return extremes | {f"{q} %": float(value) for q, value in zip((5, 50, 95), quantiles, strict=True)}


def flops_by_component(records: Records) -> dict[str, float]:
    """FLOPs of all steps by component, the most first, where records divide them."""
    totals: dict[str, float] = {}
    for record in records:
        parts = record.get("flops_by_component")
        for name, flops in parts.items() if isinstance(parts, Mapping) else ():
            totals[name] = totals.get(name, 0.0) + max(number(flops) or 0.0, 0.0)
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def components(records: Records) -> list[ReportSection]:
    """FLOPs of all steps by component, where records divide them."""
    totals = flops_by_component(records)
    if len(totals) < _FEW or not (total := sum(totals.values())):
        return []
    shares = [flops / total for flops in totals.values()]
    rows = [[name, format_flops(flops), format_share(flops / total)] for name, flops in totals.items()]
    return [ReportSection("FLOPs by component", ["component", "FLOPs", "share"], rows, bars=shares)]


def source_tokens(records: Records) -> list[ReportSection]:
    """Tokens of all steps by source of data, with the last loss of each."""
    tokens, losses = dict[str, float](), dict[str, str]()
    for name, source in (item for record in records for item in _sources(record)):
        tokens[name] = tokens.get(name, 0.0) + max(number(source.get("tokens")) or 0.0, 0.0)
        if (loss := number(source.get("loss"))) is not None:
            losses[name] = FORMS["plain"](loss)
    rows = [[name, format_rounded(count), losses.get(name, "")] for name, count in tokens.items()]
    bars = [count / (sum(tokens.values()) or 1.0) for count in tokens.values()]
    return [ReportSection("Tokens by source", ["source", "tokens", "last loss"], rows, bars=bars)]


def _sources(record: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    sources = record.get("sources")
    pairs = sources.items() if isinstance(sources, Mapping) else ()
    return [(name, source) for name, source in pairs if isinstance(source, Mapping)]


def known(records: Records, key: str) -> list[float]:
    """Values of a number, of the records that have it."""
    return [value for record in records if (value := number(record.get(key))) is not None]


def marks_of(folder: Path | None, records: Records) -> list[ChartMark]:
    """Collect restarts and stages of a run, and the step from which its loss is not finite to the end."""
    marks = [ChartMark(step, "restart") for step in (restarts(folder) if folder is not None else ())]
    begins = stage_begins([sources_of(record) for record in records])
    marks += [ChartMark(records[place]["step"], f"stage {n}") for n, place in enumerate(begins, start=2)]
    last = max((place for place, record in enumerate(records) if not is_broken(record)), default=-1) + 1
    return marks + [ChartMark(record["step"], "not finite") for record in records[last : last + 1]]


def sources_of(record: Mapping[str, Any]) -> frozenset[str]:
    """Sources that a record has tokens of."""
    return frozenset(name for name, source in _sources(record) if number(source.get("tokens")))


def stage_begins(sources: Sequence[frozenset[str]]) -> list[int]:
    """Find where a source begins or ends to be played, and not by chance, as a rare one of a mixture may.

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
        # The rest of a source in shuffled packs plays on for a while after the next source has begun.
        apart = _APART if place in starts else max(_APART, _LEFT_OVER * len(sources))
        if not begins or place > begins[-1] + apart:
            begins.append(place)
    return begins if len(begins) < _MOST_STAGES else []


def stages(records: Records) -> ReportSection:
    """Steps, sources and tokens of each stage; no rows where there is one alone."""
    steps = [record["step"] for record in records]
    begins = [0, *stage_begins([sources_of(record) for record in records]), len(steps)]
    rows = []
    for stage, (begin, end) in enumerate(pairwise(begins), start=1):
        names = dict.fromkeys(name for record in records[begin:end] for name in sorted(sources_of(record)))
        tokens = sum(number(record.get("tokens")) or 0.0 for record in records[begin:end])
        rows.append([f"{stage}", f"{steps[begin]} to {steps[end - 1]}", ", ".join(names), f"{tokens:,.0f}"])
    headings = ["stage", "steps", "sources", "tokens"]
    return ReportSection("Stages of the data", headings, rows if len(rows) > 1 else ())
