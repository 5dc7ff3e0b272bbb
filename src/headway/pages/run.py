"""A run's records read, and reported as one HTML page or as Markdown."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import LogError
from headway.explain.comparison import MeanStep, mean_step
from headway.explain.explanation import UNSEPARATED, JobExplanation
from headway.explain.records import explain_with_records
from headway.explain.run_folder import UNFINISHED_NOTE
from headway.explain.text import as_text
from headway.log.jsonl import as_object
from headway.log.run_files import CONFIG, METRICS, RUN
from headway.meter.goodput_report import FILE_NAME, GoodputReport, read_goodput
from headway.pages.folder import changed_settings, folder_sections, held_out_loss, provenance, restarts
from headway.pages.phases import mean_phase_lines, phase_chart
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
from headway.report.charts import DrawnLine, bar_chart, histogram, lines_chart
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
_Format = Callable[[float], str]


def _plain(value: float) -> str:
    return f"{value:.4g}"


_BY_RATIO = ("loss", "flow_loss", "grad_norm")  # numbers whose falls to a hundredth are seen on an axis of ratios
_Series = tuple[tuple[str, str, _Format], ...]  # key of a record, title, and how a value reads
_LEARNING: _Series = (
    ("loss", "Loss", _plain),
    ("flow_loss", "Loss of drawn images", _plain),
    ("lr", "Learning rate", _plain),
    ("grad_norm", "Gradient norm", _plain),
)
_SPEED: _Series = (
    ("mfu", "MFU", format_share),
    ("tokens_per_s", "Tokens per second", lambda value: f"{value:,.0f}"),
    ("step_s", "Time of a step", format_duration),
)
_DATA: _Series = (
    ("data_wait_share", "Waiting for data, share of a step", format_share),
    ("padding_share", "Padding, share of slots", format_share),
    ("fill", "Fill, tokens over the room of the packs", format_share),
    ("balance", "Balance, mean over most FLOPs of the ranks", format_share),
)
SERIES = (*_LEARNING, *_SPEED, *_DATA)


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """A run as its records tell it.

    Attributes:
        name: of the run folder or file.
        folder: of the run; None for a file of a meter's records.
        records: of steps, each step once.
        explanation: what `headway explain` says of them.
        mean: its mean step.
        goodput: of the whole run; None where there is no ledger that can be read.
        notes: what a reader must know.
        files: text of config.yaml and run.json, where they are.
        restarts: steps after which it went on.
    """

    name: str
    folder: Path | None
    records: Sequence[Mapping[str, Any]]
    explanation: JobExplanation
    mean: MeanStep
    goodput: GoodputReport | None
    notes: tuple[str, ...]
    files: Mapping[str, str]
    restarts: Sequence[float]


def read_run(path: Path) -> ReportedRun:
    """Read a run folder, or a file of a meter's records.

    Raises:
        ConfigError: there is no record of a step.
    """
    file = path / METRICS if path.is_dir() else path
    with _without_search_for_cycles():
        explanation, records = explain_with_records(file)
    # Of a run folder, what stands beside the records.
    folder = file.parent
    notes, goodput = list(explanation.notes), None
    if (folder / FILE_NAME).is_file():
        try:
            goodput = read_goodput(folder)
            notes += goodput.warnings
        except LogError as error:
            notes.append(f"goodput is not known: {error}")
    texts = {
        name: without_secrets((folder / name).read_text(encoding="utf-8", errors="replace"), longest=_LONGEST_FILE)
        for name in (CONFIG, RUN)
        if file.name == METRICS and (folder / name).is_file()
    }
    name = path.resolve().name
    return ReportedRun(
        name=name,
        folder=folder if file.name == METRICS else None,
        records=records,
        explanation=explanation,
        mean=mean_step(name, explanation),
        goodput=goodput,
        notes=tuple(notes),
        files=texts,
        restarts=restarts(folder) if file.name == METRICS else (),
    )


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
        first=[_waterfall(run), *_goodput(run)],
        phases=phase_chart(run.explanation.steps),
        findings=run.explanation.findings,
        by_heading=_over_the_run(run),
        notes=run.notes,
        files=run.files,
        numbers=machine(run),
    )


def report_markdown(run: ReportedRun) -> str:
    """Render a run as Markdown: verdict, facts, what `headway explain` says, and the tables below the page's charts."""
    table = markdown_table([Column("what", "left"), Column("value", "left")], facts(run), None)
    sections = [*_goodput(run), *chain.from_iterable(_over_the_run(run).values())]
    explained = as_text(run.explanation, markdown=True)
    return "\n\n".join(
        [f"**{markdown_text(verdict(run))}**", table, explained, *(section.as_markdown() for section in sections)]
    )


def _over_the_run(run: ReportedRun) -> dict[str, list[ReportSection]]:
    """Charts over the steps and tables of totals, by the heading that they stand under."""
    held_out = None if run.folder is None else held_out_loss(run.folder)
    of = partial(_series, run, companions={} if held_out is None else {"loss": held_out})
    config, facts_of_run = run.files.get(CONFIG, ""), run.files.get(RUN, "")
    of_records = {
        "Learning": of(_LEARNING),
        "Speed and memory": [*of(_SPEED), *_times(run), *_components(run)],
        "Data": [*of(_DATA), *_sources(run)],
        "The run": [],
    }
    of_folder = folder_sections(run.folder, run.records)
    of_files = {"The run": [changed_settings(config, facts_of_run), provenance(facts_of_run)]}
    by_heading = {}
    for heading in of_records:
        sections = chain.from_iterable(part.get(heading, ()) for part in (of_records, of_folder, of_files))
        by_heading[heading] = [section for section in sections if section.rows]
    return {heading: sections for heading, sections in by_heading.items() if sections}


def verdict(run: ReportedRun) -> str:
    """One sentence: MFU, and what costs most of the time."""
    is_unfinished = any(note.startswith(UNFINISHED_NOTE) for note in run.notes)
    mfu = _known(run, "mfu")
    first = f"steps reached MFU {format_share(float(np.median(mfu)))} (median)" if mfu else "MFU is not known"
    text = f"Unfinished run: {first}" if is_unfinished else first[0].upper() + first[1:]
    lost = [(ns, key, name) for key, (name, ns) in run.mean.lines.items() if key != "useful" and ns > 0]
    if lost and "useful" in run.mean.lines:
        ns, key, name = max(lost)
        share = format_share(ns / run.mean.duration_ns)
        if key == UNSEPARATED:
            text += f"; {share} of the mean step are kernels and waiting that only a profile tells apart"
        else:
            text += f"; the largest loss of the mean step is {share}: {name}"
    return f"{text}."


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
        rows.append(("loss, first and last", f"{_plain(loss[0])}, {_plain(loss[-1])}"))
    if tokens := _known(run, "tokens"):
        rows.append(("tokens", format_count(int(sum(tokens)))))
    if memory := _known(run, "peak_memory_bytes"):
        rows.append(("memory, most of a rank", format_bytes(max(memory))))
    if len(energy := _known(run, "energy_j")) == len(run.records):
        rows.append(("energy, as the devices measured it", f"{sum(energy) / 3.6e6:.4g} kWh"))
    return rows


def _waterfall(run: ReportedRun) -> ReportSection:
    mean = run.mean
    bars = [(name, ns / 1e9) for name, ns in mean.lines.values() if ns > 0]
    rows = [[name, format_ms(ns), format_share(ns / mean.duration_ns)] for name, ns in mean.lines.values()]
    rows.append(["step", format_ms(mean.duration_ns), format_share(1.0)])
    title = f"Where the time of a step went (mean of {mean.num_steps} records)"
    chart = bar_chart(title, bars, form=format_duration, stacked=True)
    says = "Each bar begins where the one before ends; together they are the step."
    return ReportSection(title, ["part", "time [ms]", "share"], rows, says, chart)


def _goodput(run: ReportedRun) -> list[ReportSection]:
    if run.goodput is None or not run.goodput.wall_s:
        return []
    spent = {bucket: seconds for bucket, seconds in run.goodput.seconds.items() if seconds}
    title = f"Where the wall time of the run went: goodput {format_share(run.goodput.goodput)}"
    rows = [[name, format_duration(s), format_share(s / run.goodput.wall_s)] for name, s in spent.items()]
    chart = bar_chart(title, [*spent.items()], form=format_duration, stacked=True)
    return [ReportSection(title, ["bucket", "time", "share"], rows, chart=chart)]


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
        values = [number(record.get(key)) for record in run.records]
        if all(value is None for value in values):
            continue
        summary = _summary(run.records, values)
        if summary["smallest"] == summary["largest"] and len(values) > 1:
            constant.append([title, form(summary["smallest"])])
            continue
        other = companions.get(key)
        lines = [DrawnLine("training" if other else "", steps, values), *([other] if other else [])]
        chart = lines_chart(title, lines, form=form, marks=run.restarts, by_ratio=key in _BY_RATIO)
        rows = [[name, form(summary[name])] for name in ("5 %", "50 %", "95 %")]
        rows.insert(0, [f"smallest, step {summary['step of smallest']:.0f}", form(summary["smallest"])])
        rows.append([f"largest, step {summary['step of largest']:.0f}", form(summary["largest"])])
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
    """What a slow step's own record tells of why; mostly nothing does."""
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
    """What the page of a run says in numbers, JSON-ready."""
    by_key = {key: [number(record.get(key)) for record in run.records] for key, _, _ in SERIES}
    return {
        "schema_version": SCHEMA_VERSION,
        "name": run.name,
        "num_records": len(run.records),
        "mean_step": run.mean.to_dict() | {"lines": {key: ns for key, (_, ns) in run.mean.lines.items()}},
        "phases": [phase.to_dict() for phase in mean_phase_lines(run.explanation.steps)],
        "goodput": None if run.goodput is None else run.goodput.to_dict(),
        "findings": [finding.to_dict() for finding in run.explanation.findings],
        "series": {
            key: _summary(run.records, values)
            for key, values in by_key.items()
            if any(value is not None for value in values)
        },
    }


def _known(run: ReportedRun, key: str) -> list[float]:
    return [value for record in run.records if (value := number(record.get(key))) is not None]
