"""A run's records and its newest profile read, and reported as one HTML page or as Markdown."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import HeadwayError, LogError
from headway.explain.comparison import mean_record
from headway.explain.explanation import (
    MOST,
    Finding,
    JobExplanation,
    MeanWaterfall,
    mean_of,
)
from headway.explain.findings.rule import FindingPlace, TimeOf
from headway.explain.findings.rules import RULES
from headway.explain.records import explain_with_records
from headway.explain.run_folder import UNFINISHED_NOTE, newest_window
from headway.explain.text import as_text
from headway.explain.trace import read_traces
from headway.explain.waterfall import explain
from headway.log.jsonl import as_object
from headway.log.run_files import CONFIG, METRICS, RUN, SUMMARY
from headway.meter.goodput_report import FILE_NAME, GoodputReport, read_goodput
from headway.pages import steps
from headway.pages.folder import changed_settings, folder_sections, held_out, held_out_loss, names_of_runs, provenance
from headway.report import (
    Column,
    format_bytes,
    format_count,
    format_duration,
    format_ms,
    format_rate,
    format_share,
)
from headway.report.charts import FORMS, ChartMark, bar_chart
from headway.report.page import render
from headway.report.quantity import number
from headway.report.secrets import without_secrets
from headway.report.section import ReportSection, markdown_table, markdown_text

SCHEMA_VERSION = 1
_LONGEST_FILE = 20_000  # length of config.yaml and run.json on the page [characters]


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Sections of a profile on its steps."""

    about: str  # steps and number of ranks, in words
    mean: MeanWaterfall  # mean of the steps
    findings: tuple[Finding, ...]  # findings of its rules, the first to mend first


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """A run as its records show it."""

    name: str  # name of the run folder or file
    path: Path  # path of the run folder or file
    folder: Path | None  # folder of the run; None for a file of a meter's records
    records: Sequence[Mapping[str, Any]]  # records of steps, each step once
    explanation: JobExplanation  # explanation of its steps, as `headway explain` has it
    mean: MeanWaterfall  # mean step
    profile: StepProfile | None  # profile of the newest profiled steps; None where there is none
    findings: tuple[Finding, ...]  # findings of the profile and the records
    goodput: GoodputReport | None  # goodput of the whole run; None where there is no ledger that can be read
    notes: tuple[str, ...]  # remarks on the run
    files: Mapping[str, str]  # text of config.yaml and run.json, where they are
    marks: Sequence[ChartMark]  # restarts, stages and evaluations


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
    """Add the files that stand beside the records of a run, or another tool's log, to its explanation."""
    file = path / METRICS if path.is_dir() else path
    # Files that stand beside the records of a run folder.
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
        mean=mean_of(explanation.steps),
        profile=profile,
        findings=in_order(None if profile is None else profile.findings, explanation.findings),
        goodput=goodput,
        notes=(*notes, *about_profile),
        files=texts_of(path),
        marks=steps.marks_of(folder if file.name == METRICS else None, records),
    )


def read_profile(folder: Path) -> tuple[StepProfile | None, tuple[str, ...]]:
    """Read the newest profile of a run folder.

    Returns:
        The profile, None where there is none or it cannot be read; and what a reader must know of it.
    """
    paths, about = newest_window(folder)
    if not paths:
        return None, ()
    stamps = tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
    profile = _read_traces(stamps, about)
    if isinstance(profile, str):
        return None, (f"the profile cannot be read, and records alone tell where the time went: {profile}",)
    return profile, ()


@lru_cache(maxsize=2)  # a page that is shown again and again, as by --serve, reads a profile once
def _read_traces(stamps: tuple[tuple[Path, int, int], ...], about: str) -> StepProfile | str:
    try:
        explanation = explain([trace for path, *_ in stamps for trace in read_traces(path)])
    except (HeadwayError, OSError) as error:
        return str(error)
    return StepProfile(about, mean_of(explanation.steps), explanation.findings)


def in_order(by_profile: Sequence[Finding] | None, by_records: Sequence[Finding]) -> tuple[Finding, ...]:
    """Put findings of a profile and of the records of its run in one order, the first to mend first.

    A profile sees all of its steps, so that it goes before what records suspect of the time within them; what lies
    between the steps it cannot see. What names no cause, the records have nothing to add to.

    Args:
        by_profile: of the profiled steps; None without a profile.
        by_records: of all steps.
    """
    if by_profile is None:
        return tuple(by_records)
    places = {rule.name: observer.place for rule in RULES for observer in rule.observers}
    between = {rule.name for rule in RULES if rule.in_records is not None and rule.in_records.time is TimeOf.BESIDE}
    names = {finding.id for finding in by_profile}
    more = [f for f in by_records if f.id not in names and places.get(f.id) not in (FindingPlace.VAGUE, None)]

    def order(finding: Finding) -> tuple[FindingPlace, bool, float]:
        is_suspected = finding.id not in names and finding.id not in between
        return places.get(finding.id, FindingPlace.UNEXPLAINED), is_suspected, -finding.share

    return tuple(sorted([*by_profile, *more], key=order)[:MOST])


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
        legend=steps.legend(run.marks),
        phases=steps.phase_chart(run.explanation.steps),
        findings=run.findings,
        by_heading=_over_the_run(run),
        notes=run.notes,
        files=run.files,
        numbers=machine(run),
    )


def report_markdown(run: ReportedRun) -> str:
    """Render a run as Markdown: verdict, facts, what `headway explain` says, and the tables below the page's charts."""
    table = markdown_table([Column("what", "left"), Column("value", "left")], facts(run), None)
    profiled = [] if run.profile is None else [waterfall_section(run.profile.mean, run.profile.about, "profiled steps")]
    sections = [*profiled, *_goodput(run), *chain.from_iterable(_over_the_run(run).values())]
    explained = as_text(replace(run.explanation, findings=run.findings), markdown=True)
    return "\n\n".join(
        [f"**{markdown_text(verdict(run))}**", table, explained, *(section.as_markdown() for section in sections)]
    )


def _over_the_run(run: ReportedRun) -> dict[str, list[ReportSection]]:
    """Charts over the steps and tables of totals, by the heading that they stand under."""
    held_out = None if run.folder is None else held_out_loss(run.folder)
    of = partial(steps.step_series, run.records, run.marks, {} if held_out is None else {"loss": held_out})
    of_records = {
        "Learning": of((*steps.LEARNING, *steps.further_series(run.records))),
        "Speed and memory": [*of(steps.SPEED), *steps.step_times(run.records), *steps.components(run.records)],
        "Data": [*of(steps.DATA), *steps.source_tokens(run.records), steps.stages(run.marks, run.records)],
    }
    return _by_heading(run.files, of_records, folder_sections(run.folder, run.records, run.marks))


def _by_heading(files: Mapping[str, str], *parts: Mapping[str, list[ReportSection]]) -> dict[str, list[ReportSection]]:
    """Put parts of a page and the sections of its files together under their headings, without sections of no rows."""
    config, run_facts = files.get(CONFIG, ""), files.get(RUN, "")
    of_files = {"The run": [changed_settings(config, run_facts), provenance(run_facts)]}
    sections = {
        heading: [section for part in (*parts, of_files) for section in part.get(heading, ()) if section.rows]
        for heading in ("Learning", "Speed and memory", "Data", "The run")
    }
    return {heading: shown for heading, shown in sections.items() if shown}


def verdict(run: ReportedRun) -> str:
    """Result of the run, its time, and the first thing to mend, in a sentence."""
    judged = held_out(run.folder) if run.folder is not None else []
    summary = run.folder / SUMMARY if run.folder is not None else None
    ended = as_object(summary.read_bytes()) if summary is not None and summary.is_file() else None
    seconds = float(_seconds(run)[-1]) if run.explanation.is_timed else None
    return steps.first_sentence(
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
    # Use of the hardware, and the rule by which it is counted.
    if mfu := steps.known(run.records, "mfu"):
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
    # Model and device of the run, and its costs.
    run_facts = as_object(run.files.get(RUN, "").encode()) or {}
    model, device = (value if isinstance(value := run_facts.get(key), Mapping) else {} for key in ("model", "device"))
    if (parameters := number(model.get("parameters"))) is not None:
        rows.append(("model", f"{model.get('class')}, {parameters / 1e6:,.4g} M parameters"))
    if (ranks := number(last.get("world_size"))) is not None:
        rows.append(("ranks", f"{ranks:g}" + (f" x {device['name']}" if "name" in device else "")))
    if loss := steps.known(run.records, "loss"):
        rows.append(("loss, first and last record", f"{FORMS['plain'](loss[0])}, {FORMS['plain'](loss[-1])}"))
    if tokens := steps.known(run.records, "tokens"):
        rows.append(("tokens", format_count(int(sum(tokens)))))
    if memory := steps.known(run.records, "peak_memory_bytes"):
        rows.append(("memory, most of a rank", format_bytes(max(memory))))
    if len(energy := steps.known(run.records, "energy_j")) == len(run.records):
        rows.append(("energy, as the devices measured it", f"{sum(energy) / 3.6e6:.4g} kWh"))
    return rows


def _waterfalls(run: ReportedRun) -> list[ReportSection]:
    says = "Each bar begins where the one before ends; together they are the step."
    sections = [] if run.profile is None else [waterfall_section(run.profile.mean, run.profile.about, "profiled steps")]
    return [
        *sections,
        waterfall_section(run.mean, says if not sections else "Of all steps, of which records tell less."),
    ]


def waterfall_section(mean: MeanWaterfall, says: str, what: str = "records") -> ReportSection:
    """Show the lines of a mean step as a table, and lines above zero as bars."""
    bars = [(line.name, line.ns / 1e9) for line in mean.lines if line.ns > 0]
    title = f"Where the time of a step went (mean of {mean.num_steps} {what})"
    if not mean.is_timed:
        return ReportSection(title, ["part", "share"], [[line.name, format_share(line.share)] for line in mean.lines])
    rows = [[line.name, format_ms(line.ns), format_share(line.share)] for line in mean.lines]
    rows.append(["step", format_ms(mean.duration_ns), format_share(1.0)])
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


def machine(run: ReportedRun) -> dict[str, Any]:
    """Numbers of the page of a run, JSON-ready."""
    series = (*steps.SERIES, *steps.further_series(run.records))
    by_key = {key: [number(record.get(key)) for record in run.records] for key, _, _ in series}
    return {
        "schema_version": SCHEMA_VERSION,
        "name": run.name,
        "num_records": len(run.records),
        "mean_step": mean_record(run.name, run.mean, run.explanation.notes)
        | {"lines": {line.key: line.ns for line in run.mean.lines}},
        "phases": [phase.to_dict() for phase in steps.mean_phase_lines(run.explanation.steps)],
        "goodput": None if run.goodput is None else run.goodput.to_dict(),
        "findings": [finding.to_dict() for finding in run.findings],
        "axes": _axes(run),
        "series": {
            key: steps.summary_of(run.records, values)
            for key, values in by_key.items()
            if any(value is not None for value in values)
        },
    }


def _axes(run: ReportedRun) -> dict[str, list[float]]:
    """Tokens and time up to steps of the run, evenly chosen, for charts over either."""
    last = len(run.records) - 1
    places = np.unique(np.linspace(0, last, min(last + 1, steps.MOST_KNOTS)).round().astype(int))
    axes = {"step": [run.records[place]["step"] for place in places]}
    if run.explanation.is_timed:
        axes["seconds"] = [round(float(seconds), 3) for seconds in _seconds(run)[places]]
    tokens = [number(record.get("tokens")) for record in run.records]
    if all(tokens):
        axes["tokens"] = [int(count) for count in np.cumsum([count or 0.0 for count in tokens])[places]]
    return axes


def judged_alone(path: Path) -> list[Mapping[str, Any]]:
    """Read the evaluations of a run folder, or of its metrics.jsonl; none where there is no such file."""
    file = path / METRICS if path.is_dir() else path
    return held_out(file.parent) if file.name == METRICS and file.is_file() else []


def judged_page(path: Path, evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Render evaluations as one HTML page."""
    (name,) = names_of_runs([path])
    sections = _judged_sections(path)
    return render(
        "run.html.jinja",
        name=name,
        verdict=_judged_sentence(evaluations),
        findings=(),
        facts=(),
        has_goodput=False,
        first=(),
        legend="",
        phases=None,
        by_heading=sections,
        notes=(),
        files=texts_of(path),
        numbers={"schema_version": SCHEMA_VERSION, "name": name, "evaluations": [*evaluations]},
    )


def judged_markdown(path: Path, evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Render evaluations as Markdown."""
    sections = [section for of_heading in _judged_sections(path).values() for section in of_heading]
    return "\n\n".join(
        [f"**{markdown_text(_judged_sentence(evaluations))}**", *(section.as_markdown() for section in sections)]
    )


def _judged_sentence(evaluations: Sequence[Mapping[str, Any]]) -> str:
    count = len(evaluations)
    many = f"{format_count(count)} evaluation{'' if count == 1 else 's'} and no step of training"
    step, score = number(evaluations[-1].get("step")), steps.scores(evaluations[-1])
    when = "" if step is None else f", after step {step:,.0f}"
    result = f"the loss was {score}" if number(evaluations[-1].get("loss")) is not None else score
    return f"{many}; at the last one{when}, {result or 'no score is recorded'}."


def _judged_sections(path: Path) -> dict[str, list[ReportSection]]:
    return _by_heading(texts_of(path), folder_sections(path if path.is_dir() else path.parent, ()))
