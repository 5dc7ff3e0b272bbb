"""A run's records read, and reported as one HTML page or as Markdown."""

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import LogError
from headway.explain.comparison import MeanStep, mean_step
from headway.explain.explanation import PER_SECOND_NOTE, Finding, JobExplanation
from headway.explain.records import explain_with_records
from headway.explain.run_folder import UNFINISHED_NOTE
from headway.explain.text import as_text
from headway.log.jsonl import as_object
from headway.log.run_files import CONFIG, METRICS, RUN, SUMMARY, further_losses
from headway.meter.goodput_report import FILE_NAME, GoodputReport, read_goodput
from headway.pages.folder import changed_settings, folder_sections, held_out, held_out_loss, provenance
from headway.pages.marks import legend, marks_of, stages
from headway.pages.names import names_of_runs
from headway.pages.phases import mean_phase_lines, phase_chart
from headway.pages.profiled import StepProfile, in_order, read_profile
from headway.pages.verdict import first_sentence
from headway.report import (
    Column,
    format_bytes,
    format_count,
    format_duration,
    format_flops,
    format_ms,
    format_rate,
    format_share,
)
from headway.report.bars import bar_chart, histogram
from headway.report.charts import FORMS, ChartMark, DrawnLine, Form, lines_chart
from headway.report.markdown import markdown_table, markdown_text
from headway.report.numbers import number
from headway.report.page import render
from headway.report.secrets import without_secrets
from headway.report.section import ReportSection

SCHEMA_VERSION = 1
_LONGEST_FILE = 20_000  # of config.yaml and run.json on the page [characters]
_FEW = 2  # steps; fewer have no percentiles
_SLOW, _MOST_SLOW = 1.5, 10  # a step that is told by its number took so many times the median
_TOLD = 0.1  # share of a step, or of its tokens, that may explain it
_MOST_KNOTS = 1000  # steps of which the page holds tokens and time; between them these are on a straight line
DETAIL = 400  # buckets of a long run that the page holds for zooming

_plain = FORMS["plain"]
_BY_RATIO = re.compile(r"(.+_)?loss|grad_norm")  # numbers whose falls to a hundredth are seen on an axis of ratios
_Series = tuple[tuple[str, str, Form], ...]  # key of a record, title, and how a value reads
_LEARNING: _Series = (
    ("loss", "Loss", "plain"),
    ("lr", "Learning rate", "plain"),
    ("grad_norm", "Gradient norm", "plain"),
)
_SPEED: _Series = (
    ("mfu", "MFU", "share"),
    ("tokens_per_s", "Tokens per second", "count"),
    ("step_s", "Time of a step", "duration"),
)
_DATA: _Series = (
    ("data_wait_share", "Waiting for data, share of a step", "share"),
    ("padding_share", "Padding, share of slots", "share"),
    ("fill", "Fill, tokens over the room of the packs", "share"),
    ("balance", "Balance, mean over most FLOPs of the ranks", "share"),
)
SERIES = (*_LEARNING, *_SPEED, *_DATA)


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """A run as its records tell it.

    Attributes:
        name: of the run folder or file.
        path: of it.
        folder: of the run; None for a file of a meter's records.
        records: of steps, each step once.
        explanation: what `headway explain` says of them.
        mean: its mean step.
        profile: of its newest profiled steps; None where there is none.
        findings: what to mend, by the profile and the records.
        goodput: of the whole run; None where there is no ledger that can be read.
        notes: what a reader must know.
        files: text of config.yaml and run.json, where they are.
        marks: restarts, stages and evaluations.
    """

    name: str
    path: Path
    folder: Path | None
    records: Sequence[Mapping[str, Any]]
    explanation: JobExplanation
    mean: MeanStep
    profile: StepProfile | None
    findings: tuple[Finding, ...]
    goodput: GoodputReport | None
    notes: tuple[str, ...]
    files: Mapping[str, str]
    marks: Sequence[ChartMark]


def read_run(path: Path) -> ReportedRun:
    """Read a run folder, or a file of a meter's records.

    Raises:
        ConfigError: there is no record of a step.
    """
    file = path / METRICS if path.is_dir() else path
    with _without_search_for_cycles():
        explanation, records = explain_with_records(file)
    return assembled(path, explanation, records)


def assembled(path: Path, explanation: JobExplanation, records: Sequence[Mapping[str, Any]]) -> ReportedRun:
    """Add what stands beside the records of a run.

    Args:
        path: run folder, file of a meter's records, or another tool's log.
        explanation: of its steps.
        records: of as many steps, each once, with its number as "step".
    """
    file = path / METRICS if path.is_dir() else path
    # Of a run folder, what stands beside the records.
    folder = file.parent
    notes, goodput = list(explanation.notes), None
    if (folder / FILE_NAME).is_file():
        try:
            goodput = read_goodput(folder)
            notes += goodput.warnings
        except LogError as error:
            notes.append(f"goodput is not known: {error}")
    profile, about_profile = read_profile(folder) if file.name == METRICS else (None, ())
    (name,) = names_of_runs([path])
    return ReportedRun(
        name=name,
        path=path,
        folder=folder if file.name == METRICS else None,
        records=records,
        explanation=explanation,
        mean=mean_step(name, explanation),
        profile=profile,
        findings=in_order(None if profile is None else profile.findings, explanation.findings),
        goodput=goodput,
        notes=(*notes, *about_profile),
        files=texts_of(path),
        marks=marks_of(folder if file.name == METRICS else None, records),
    )


def texts_of(path: Path) -> dict[str, str]:
    """Texts of config.yaml and run.json of a run folder, where they are, without secrets."""
    folder = path if path.is_dir() else path.parent
    return {
        name: without_secrets((folder / name).read_text(encoding="utf-8", errors="replace"), longest=_LONGEST_FILE)
        for name in (CONFIG, RUN)
        if (path.is_dir() or path.name == METRICS) and (folder / name).is_file()
    }


@contextmanager
def _without_search_for_cycles() -> Iterator[None]:
    """Leave the garbage collector out: a million small objects without cycles took it a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def report_page(run: ReportedRun) -> str:
    """Render a run as one HTML page."""
    return render(
        "run.html.jinja",
        name=run.name,
        verdict=verdict(run),
        facts=facts(run),
        has_goodput=run.goodput is not None,
        first=[*_waterfalls(run), *_goodput(run)],
        legend=legend(run.marks),
        phases=phase_chart(run.explanation.steps),
        findings=run.findings,
        by_heading=_over_the_run(run),
        notes=run.notes,
        files=run.files,
        numbers=machine(run),
    )


def report_markdown(run: ReportedRun) -> str:
    """Render a run as Markdown: verdict, facts, what `headway explain` says, and the tables below the page's charts."""
    table = markdown_table([Column("what", "left"), Column("value", "left")], facts(run), None)
    profiled = [] if run.profile is None else [waterfall_section(run.profile.mean, run.profile.about)]
    sections = [*profiled, *_goodput(run), *chain.from_iterable(_over_the_run(run).values())]
    explained = as_text(replace(run.explanation, findings=run.findings), markdown=True)
    return "\n\n".join(
        [f"**{markdown_text(verdict(run))}**", table, explained, *(section.as_markdown() for section in sections)]
    )


def _over_the_run(run: ReportedRun) -> dict[str, list[ReportSection]]:
    """Charts over the steps and tables of totals, by the heading that they stand under."""
    held_out = None if run.folder is None else held_out_loss(run.folder)
    of = partial(_series, run, companions={} if held_out is None else {"loss": held_out})
    config, facts_of_run = run.files.get(CONFIG, ""), run.files.get(RUN, "")
    of_records = {
        "Learning": of((*_LEARNING, *_further_series(run.records))),
        "Speed and memory": [*of(_SPEED), *_times(run), *_components(run)],
        "Data": [*of(_DATA), *_sources(run), stages(run.marks, run.records)],
        "The run": [],
    }
    of_folder = folder_sections(run.folder, run.records, run.marks)
    of_files = {"The run": [changed_settings(config, facts_of_run), provenance(facts_of_run)]}
    by_heading = {}
    for heading in of_records:
        sections = chain.from_iterable(part.get(heading, ()) for part in (of_records, of_folder, of_files))
        by_heading[heading] = [section for section in sections if section.rows]
    return {heading: sections for heading, sections in by_heading.items() if sections}


def verdict(run: ReportedRun) -> str:
    """Result of the run, its time, and the first thing to mend, in a sentence."""
    judged = held_out(run.folder) if run.folder is not None else []
    summary = run.folder / SUMMARY if run.folder is not None else None
    ended = as_object(summary.read_bytes()) if summary is not None and summary.is_file() else None
    seconds = None if PER_SECOND_NOTE in run.explanation.notes else float(_seconds(run)[-1])
    return first_sentence(
        run.records,
        run.mean,
        run.findings,
        summary=ended or {},
        judged=judged[-1] if judged else {},
        wall_s=run.goodput.wall_s if run.goodput is not None and run.goodput.wall_s else seconds,
        is_unfinished=any(note.startswith(UNFINISHED_NOTE) for note in run.notes),
    )


def _seconds(run: ReportedRun) -> "np.ndarray":
    """Time from the first step's begin to the end of each record, without pauses between processes [s]."""
    counts = [number(record.get("num_steps", 1)) or 1.0 for record in run.records]
    return np.cumsum([step.duration_ns / 1e9 * n for step, n in zip(run.explanation.steps, counts, strict=True)])


def facts(run: ReportedRun) -> list[tuple[str, str]]:
    """Names and values of the first screen."""
    last = run.records[-1]
    first = run.explanation.steps[0].step - int(number(run.records[0].get("num_steps")) or 1) + 1
    rows = []
    # How well the hardware was used, and by which rule that is counted.
    if mfu := _known(run, "mfu"):
        low, middle, high = (format_share(float(value)) for value in np.percentile(mfu, [5, 50, 95]))
        rows.append(("MFU, median of records (5th to 95th percentile)", f"{middle} ({low} to {high})"))
    if run.mean.mfu is not None:
        rows.append(("MFU of the mean step, evaluations and checkpoints in its time", format_share(run.mean.mfu)))
    if isinstance(last.get("convention"), str):
        rows.append(("convention", last["convention"]))
    if (peak := number(last.get("peak_flops_per_s"))) is not None:
        rows.append(("peak of a device", f"{format_rate(peak)}, {last.get('peak_dtype')}: {last.get('peak_source')}"))
    if run.goodput is not None:
        rows.append(("goodput", format_share(run.goodput.goodput)))
        rows.append(("restarts", format_count(run.goodput.restarts)))
    rows.append(("steps", f"{first} to {last['step']}, {len(run.records)} records"))
    # What ran, and what it spent.
    run_facts = as_object(run.files.get(RUN, "").encode()) or {}
    model, device = (value if isinstance(value := run_facts.get(key), Mapping) else {} for key in ("model", "device"))
    if (parameters := number(model.get("parameters"))) is not None:
        rows.append(("model", f"{model.get('class')}, {parameters / 1e6:,.4g} M parameters"))
    if (ranks := number(last.get("world_size"))) is not None:
        rows.append(("ranks", f"{ranks:g}" + (f" x {device['name']}" if "name" in device else "")))
    if loss := _known(run, "loss"):
        rows.append(("loss, first and last record", f"{_plain(loss[0])}, {_plain(loss[-1])}"))
    if tokens := _known(run, "tokens"):
        rows.append(("tokens", format_count(int(sum(tokens)))))
    if memory := _known(run, "peak_memory_bytes"):
        rows.append(("memory, most of a rank", format_bytes(max(memory))))
    if len(energy := _known(run, "energy_j")) == len(run.records):
        rows.append(("energy, as the devices measured it", f"{sum(energy) / 3.6e6:.4g} kWh"))
    return rows


def _waterfalls(run: ReportedRun) -> list[ReportSection]:
    """The mean step of the newest profile, which tells all apart, and that of all records."""
    says = "Each bar begins where the one before ends; together they are the step."
    sections = [] if run.profile is None else [waterfall_section(run.profile.mean, run.profile.about)]
    return [
        *sections,
        waterfall_section(run.mean, says if not sections else "Of all steps, of which records tell less."),
    ]


def waterfall_section(mean: MeanStep, says: str) -> ReportSection:
    """Show the lines of a mean step as a table, and those above zero as bars.

    Args:
        mean: the step; that of a profile has the name "profile".
        says: a sentence before the table.
    """
    bars = [(name, ns / 1e9) for name, ns in mean.lines.values() if ns > 0]
    rows = [[name, format_ms(ns), format_share(ns / mean.duration_ns)] for name, ns in mean.lines.values()]
    rows.append(["step", format_ms(mean.duration_ns), format_share(1.0)])
    what = "profiled steps" if mean.name == "profile" else "records"
    title = f"Where the time of a step went (mean of {mean.num_steps} {what})"
    chart = bar_chart(title, bars, form=format_duration, stacked=True)
    return ReportSection(title, ["part", "time [ms]", "share"], rows, says, chart)


def _goodput(run: ReportedRun) -> list[ReportSection]:
    if run.goodput is None or not run.goodput.wall_s:
        return []
    spent = {bucket: seconds for bucket, seconds in run.goodput.seconds.items() if seconds}
    title = f"Where the wall time of the run went: goodput {format_share(run.goodput.goodput)}"
    rows = [[name, format_duration(s), format_share(s / run.goodput.wall_s)] for name, s in spent.items()]
    chart = bar_chart(title, [*spent.items()], form=format_duration, stacked=True)
    return [ReportSection(title, ["bucket", "time", "share"], rows, chart=chart)]


def _further_series(records: Sequence[Mapping[str, Any]]) -> _Series:
    """Series of the losses that an objective records beside "loss"."""
    names = dict.fromkeys(name for record in records[-_MOST_KNOTS:] for name in further_losses(record))
    return tuple((f"{name}_loss", f"{name.capitalize()} loss", "plain") for name in names)


def _series(run: ReportedRun, series: _Series, companions: Mapping[str, DrawnLine]) -> list[ReportSection]:
    """A chart over the steps for each number of the records; numbers that never change share one table.

    Args:
        run: it.
        series: numbers of its records.
        companions: a line that is drawn with such a number, by its key.
    """
    steps = [float(record["step"]) for record in run.records]
    sections, constant = [], []
    for key, title, form in series:
        write = FORMS[form]
        values = [number(record.get(key)) for record in run.records]
        if all(value is None for value in values):
            continue
        summary = _summary(run.records, values)
        if summary["smallest"] == summary["largest"] and len(values) > 1:
            constant.append([title, write(summary["smallest"])])
            continue
        other = companions.get(key)
        lines = [DrawnLine("training" if other else "", steps, values), *([other] if other else [])]
        chart = lines_chart(
            title, lines, form=form, marks=run.marks, by_ratio=bool(_BY_RATIO.fullmatch(key)), detail=DETAIL
        )
        rows = [[name, write(summary[name])] for name in ("5 %", "50 %", "95 %")]
        rows.insert(0, [f"smallest, step {summary['step of smallest']:.0f}", write(summary["smallest"])])
        rows.append([f"largest, step {summary['step of largest']:.0f}", write(summary["largest"])])
        sections.append(ReportSection(title, ["of the records", "value"], rows, chart=chart))
    if constant:
        sections.append(ReportSection("The same in every record", ["what", "value"], constant))
    return sections


def _times(run: ReportedRun) -> list[ReportSection]:
    """Percentiles of step times, and the slowest steps with the reasons that their records give."""
    timed = [(value, record) for record in run.records if (value := number(record.get("step_s"))) is not None]
    times = [value for value, _ in timed]
    if len(times) < _FEW:
        return []
    spread = [[f"{q} %", format_duration(float(np.percentile(times, q)))] for q in (5, 25, 50, 75, 95, 99)]
    chart = histogram(title := "How long steps took", times, form=format_duration)
    sections = [ReportSection(title, ["percentile of steps", "time"], spread, chart=chart)]
    usual_s = float(np.median(times))
    slow = sorted((pair for pair in timed if pair[0] > _SLOW * usual_s), key=lambda pair: -pair[0])
    usual_tokens = float(np.median(_known(run, "tokens") or [0.0]))
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
    """Cause that a slow step's own record tells; mostly there is none."""
    reasons = []
    if (waited := number(record.get("data_wait_share")) or 0.0) >= _TOLD:
        reasons.append(f"waited for data {format_share(waited)}")
    if usual_tokens and (tokens := number(record.get("tokens")) or 0.0) >= (1 + _TOLD) * usual_tokens:
        reasons.append(f"{tokens / usual_tokens:.1f} times the usual tokens")
    if number(record.get("recompiles")):
        reasons.append("compiled again")
    return ", ".join(reasons)


def _summary(records: Sequence[Mapping[str, Any]], values: Sequence[float | None]) -> dict[str, float]:
    pairs = [(value, int(record["step"])) for record, value in zip(records, values, strict=True) if value is not None]
    low, high = min(pairs), max(pairs)
    extremes = {"smallest": low[0], "step of smallest": low[1], "largest": high[0], "step of largest": high[1]}
    quantiles = np.percentile([value for value, _ in pairs], [5, 50, 95])
    return extremes | {f"{q} %": float(value) for q, value in zip((5, 50, 95), quantiles, strict=True)}


def _components(run: ReportedRun) -> list[ReportSection]:
    totals: dict[str, float] = {}
    for record in run.records:
        by_component = record.get("flops_by_component")
        for name, flops in by_component.items() if isinstance(by_component, Mapping) else ():
            totals[name] = totals.get(name, 0.0) + max(number(flops) or 0.0, 0.0)
    if not (total := sum(totals.values())):
        return []
    ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    rows = [[name, format_flops(flops), format_share(flops / total)] for name, flops in ordered]
    title = "FLOPs by component, all steps"
    chart = bar_chart(title, [(name, float(flops)) for name, flops in ordered], form=format_flops)
    return [ReportSection(title, ["component", "FLOPs", "share"], rows, chart=chart)]


def _sources(run: ReportedRun) -> list[ReportSection]:
    tokens: dict[str, float] = {}
    losses: dict[str, float] = {}
    for record in run.records:
        sources = record.get("sources")
        for name, source in sources.items() if isinstance(sources, Mapping) else ():
            if isinstance(source, Mapping):
                tokens[name] = tokens.get(name, 0.0) + max(number(source.get("tokens")) or 0.0, 0.0)
                if (loss := number(source.get("loss"))) is not None:
                    losses[name] = loss
    if not tokens:
        return []
    rows = [[name, f"{tokens[name]:,.0f}", _plain(losses[name]) if name in losses else ""] for name in tokens]
    title = "Tokens by source"
    chart = bar_chart(title, [*tokens.items()], form=lambda value: f"{value:,.0f}")
    return [ReportSection(title, ["source", "tokens", "last loss"], rows, chart=chart)]


def machine(run: ReportedRun) -> dict[str, Any]:
    """Numbers of the page of a run, JSON-ready."""
    series = (*SERIES, *_further_series(run.records))
    by_key = {key: [number(record.get(key)) for record in run.records] for key, _, _ in series}
    return {
        "schema_version": SCHEMA_VERSION,
        "name": run.name,
        "num_records": len(run.records),
        "mean_step": run.mean.to_dict() | {"lines": {key: ns for key, (_, ns) in run.mean.lines.items()}},
        "phases": [phase.to_dict() for phase in mean_phase_lines(run.explanation.steps)],
        "goodput": None if run.goodput is None else run.goodput.to_dict(),
        "findings": [finding.to_dict() for finding in run.findings],
        "axes": _axes(run),
        "series": {
            key: _summary(run.records, values)
            for key, values in by_key.items()
            if any(value is not None for value in values)
        },
    }


def _axes(run: ReportedRun) -> dict[str, list[float]]:
    """Tokens and time up to steps of the run, evenly chosen, for charts over either."""
    last = len(run.records) - 1
    places = np.unique(np.linspace(0, last, min(last + 1, _MOST_KNOTS)).round().astype(int))
    axes = {"step": [run.records[place]["step"] for place in places]}
    if PER_SECOND_NOTE not in run.explanation.notes:
        axes["seconds"] = [round(float(seconds), 3) for seconds in _seconds(run)[places]]
    tokens = [number(record.get("tokens")) for record in run.records]
    if all(tokens):
        axes["tokens"] = [int(count) for count in np.cumsum([count or 0.0 for count in tokens])[places]]
    return axes


def _known(run: ReportedRun, key: str) -> list[float]:
    return [value for record in run.records if (value := number(record.get(key))) is not None]
