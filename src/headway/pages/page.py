"""The page of a run, or of two with their differences: the same sections as HTML, as Markdown and on a terminal."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headway.explain.comparison import mean_record
from headway.explain.explanation import Finding, MeanWaterfall
from headway.explain.findings.rules import RULES
from headway.explain.run_folder import UNFINISHED_NOTE
from headway.log.jsonl import as_object
from headway.log.run_files import CONFIG, RUN, SUMMARY, LossTally
from headway.pages import steps
from headway.pages.comparison import (
    compared,
    difference_points,
    difference_sections,
    settings_that_differ,
    step_interval,
)
from headway.pages.folder import changed_settings, folder_sections, held_out_loss, names_of_runs, provenance
from headway.pages.run import ReportedRun, texts_of
from headway.report import (
    format_bytes,
    format_compact,
    format_count,
    format_duration,
    format_rate,
    format_rounded,
    format_share,
)
from headway.report.page import render
from headway.report.quantity import number
from headway.report.secrets import hide_people
from headway.report.section import ReportSection, markdown_text

SCHEMA_VERSION = 2
HEADINGS = ("Learning", "Speed and memory", "Data", "The run")
_HEADLINE = 0.05  # share of the time from which a finding is the first to show, whatever it does to MFU
_SPREAD = ("median", "95 % below", "from")  # remarks that say nothing where they repeat the number
_PRAISE = "What the run did well"
_SENTENCES = re.compile(r"(?<=[a-z0-9)]\.) (?=[A-Z])")  # between two sentences
_NOTHING_FIRST = "No finding would change a number that is printed above."
_NOTHING_AT_ALL = "No rule finds anything to change."
# Advice by the largest part of a step beside the useful work, where no rule names a cause.
_ADVICE = {
    "optimizer": "more packs in an update (optim.accumulation), or a fused optimizer.",
    "data": "more workers (data.workers), or samples that are decoded once, ahead of training.",
    "exchange": "more packs in an update (optim.accumulation), so that ranks exchange gradients less often.",
}


class Measure(NamedTuple):
    """A number of the first screen."""

    value: float
    text: str  # the value with its unit
    remark: str  # a few words on it
    is_share: bool = False


@dataclass(frozen=True)
class RunPage:
    """Contents of a page, in the order in which it shows them, in plain text of anyone."""

    title: str
    facts: Sequence[str]  # a line for each run
    tiles: ReportSection  # name, value of each run, and a remark or the difference
    time: ReportSection | None = None  # parts of the mean step
    parts: Sequence[steps.StepPart] = ()  # the same as numbers
    totals: Sequence[int] = ()  # duration of the mean step of each run [ns]
    is_timed: bool = True  # whether these are times
    card: ReportSection | None = None  # sentences on what to change first, on what ended the run, or on what differs
    more: Sequence[ReportSection] = ()  # findings behind it
    charts: Sequence[ReportSection] = ()
    folds: Mapping[str, Sequence[ReportSection]] = field(default_factory=dict)  # sections by heading
    files: Mapping[str, str] = field(default_factory=dict)  # texts by name
    numbers: Mapping[str, Any] = field(default_factory=dict)  # numbers for programs

    @property
    def sections(self) -> list[ReportSection]:
        """Sections of the first screen as text."""
        return [part for part in (self.tiles, self.time, self.card) if part is not None]

    def cells(self, ns: Sequence[int]) -> list[str]:
        """A time of each run beside the step, as its table has it."""
        return steps.time_cells(ns, self.totals, is_timed=self.is_timed)

    def as_html(self) -> str:
        """Render it as one HTML page."""
        return render("run.html.jinja", page=self)

    def as_markdown(self) -> str:
        """Render it for an issue."""
        lines = [f"# {markdown_text(self.title)}", *map(markdown_text, self.facts)]
        lines += [part.as_markdown() for part in self.sections]
        if self.more:
            points = [" ".join([f"{part.remark[:1].upper()}{part.remark[1:]}.", *part.points]) for part in self.more]
            lines.append(ReportSection(points=points).as_markdown())
        for heading, parts in self.folds.items():
            lines += [f"## {heading}", *(part.as_markdown(3) for part in parts if part.rows or part.points)]
        return "\n\n".join(lines)

    def as_terminal(self) -> str:
        """Render its first screen for a terminal, a pipe or a log."""
        head = ReportSection(points=[self.title, *self.facts])
        return "\n\n".join(part.as_terminal() for part in (head, *self.sections))


def page_of(*runs: ReportedRun) -> RunPage:
    """Make the page of a run, or of two runs that are compared, the second against the first."""
    if len(runs) == 1:
        (run,) = runs
        mean, about = (run.mean, "") if run.profile is None else (run.profile.mean, f"the mean of {run.profile.about}")
        numbers, differ = machine(run), dict[str, list[ReportSection]]()
        title, notes, means, (card, more) = run.name, run.notes, [mean], _card(run, mean)
    else:
        a, b, lines = compared(*runs)
        runs, about, notes, means = (a, b), "", lines.notes, [a.mean, b.mean]
        title, differ = f"{a.name} (A) and {b.name} (B)", difference_sections(a, b)
        card, more = ReportSection("What differs", points=difference_points(a, b, lines)), []
        numbers = {
            "schema_version": SCHEMA_VERSION,
            "runs": [machine(run) for run in runs],
            "compared": lines.to_dict(),
            "step_interval_95": step_interval(a, b),
            "settings": {name: [of_a, of_b] for name, of_a, of_b in settings_that_differ(a, b).rows},
        }
    letters = ("A: ", "B: ") if len(runs) > 1 else ("",)
    # A log that tells neither times nor work has one part, of which nothing is known.
    parts, is_timed = steps.step_parts(means), all(mean.is_timed for mean in means)
    dots = [line for run in runs if (line := held_out_loss(run.evaluations)) is not None]
    chart = partial(
        steps.series_charts, [run.records for run in runs], marks=runs[0].marks if len(runs) == 1 else (),
        dots=dots if len(dots) == len(runs) else (),
    )  # fmt: skip
    has_parts = is_timed or len(parts) > 1
    return RunPage(
        title=title,
        facts=[f"{letter}{' · '.join(facts_of(run))}" for letter, run in zip(letters, runs, strict=True)],
        tiles=_tiles([measures_of(run) for run in runs]),
        time=steps.time_section(means, about) if has_parts else None,
        parts=parts,
        totals=[mean.duration_ns for mean in means],
        is_timed=is_timed,
        card=card if has_parts or more or card.title != _PRAISE else None,
        more=more,
        charts=chart(steps.FIRST),
        folds=_folds(runs, chart, differ, notes),
        files=runs[0].files if len(runs) == 1 else {},
        numbers=numbers,
    )


def report_page(*runs: ReportedRun) -> str:
    """Render a run, or two, as one HTML page."""
    return page_of(*runs).as_html()


def _card(run: ReportedRun, mean: MeanWaterfall) -> tuple[ReportSection, list[ReportSection]]:
    """Choose what a reader of a run must know first, and the findings that stand behind it."""
    sections = [
        ReportSection("What to change first", points=_sentences(finding), remark=finding.extent)
        for finding in sorted(run.findings, key=is_headline, reverse=True)
    ]
    if failure := run.goodput.failure if run.goodput is not None else "":
        return ReportSection("What ended the run", points=_SENTENCES.split(hide_people(failure))), sections
    if any(map(is_headline, run.findings)):
        return sections[0], sections[1:]
    return ReportSection(_PRAISE, points=_praise(run, mean, has_findings=bool(sections))), sections


def is_headline(finding: Finding) -> bool:
    """Tell whether a finding would change what is printed: a loss of some per cent of a small MFU may not."""
    if finding.mfu_from is None or finding.mfu_to is None:
        return True
    return finding.share >= _HEADLINE or format_share(finding.mfu_from) != format_share(finding.mfu_to)


def _sentences(finding: Finding) -> list[str]:
    """Sentences of a finding: its observation, its cause, and what to do next."""
    return [f"{finding.seen[:1].upper()}{finding.seen[1:]}", f"Why: {finding.cause}", f"Next: {finding.next}"]


def _praise(run: ReportedRun, mean: MeanWaterfall, *, has_findings: bool) -> list[str]:
    """Sentences where no finding is a headline: what was measured, the limit of the rules, and what to try next."""
    shares = {part.name: part.ns[0] / mean.duration_ns for part in steps.step_parts([mean])}
    largest = max((name for name in shares if name != steps.USEFUL), key=shares.__getitem__, default="")
    if not largest or "data" not in shares:
        return [_NOTHING_FIRST if has_findings else _NOTHING_AT_ALL]
    least = next(rule.in_trace.least for rule in RULES if rule.name == "data-bound" and rule.in_trace)
    advice = _ADVICE.get(largest, f"`headway explain {run.path} --by component`, which divides that part.")
    if largest not in _ADVICE and run.profile is None:
        advice = "a profile of some steps (`--set run.profile.start=N`, or `headway.profile`), which divides that part."
    return [
        f"The step waited for data {format_share(shares['data'])} of the time.",
        f"Limit: a wait is a finding from {format_share(least)} of the time. "
        f"{_NOTHING_FIRST if has_findings else _NOTHING_AT_ALL}",
        f"Next: the largest part beside useful work is {largest}, {format_share(shares[largest])} of the time. Try "
        f"{advice}",
    ]


def facts_of(run: ReportedRun) -> list[str]:
    """Model, devices, steps with their time, and the end of a run, each in a few words."""
    recorded = as_object(run.files.get(RUN, "").encode()) or {}
    model, device = (value if isinstance(value := recorded.get(key), Mapping) else {} for key in ("model", "device"))
    parts = []
    if (parameters := number(model.get("parameters"))) is not None:
        kind = str(model.get("class")).partition("For")[0]  # Qwen3 of Qwen3ForCausalLM
        parts.append(f"{kind}, {format_compact(parameters)} parameters")
    if (ranks := number(run.records[-1].get("world_size"))) is not None:
        name = device.get("name") or ("rank" if ranks == 1 else "ranks")
        parts.append(f"{ranks:g} x {name}" if "name" in device else f"{ranks:g} {name}")
    count = round(sum(number(record.get("num_steps", 1)) or 1.0 for record in run.records))
    took = f"{format_count(count)} step{'' if count == 1 else 's'}"
    wall_s = run.goodput.wall_s if run.goodput is not None else 0.0
    wall_s = wall_s or (_seconds(run) if run.explanation.is_timed else 0.0)
    return [*parts, f"{took} in {format_duration(wall_s)}" if wall_s else took, *_state(run)]


def _seconds(run: ReportedRun) -> float:
    """Time of all records, without pauses between processes [s]."""
    counts = [number(record.get("num_steps", 1)) or 1.0 for record in run.records]
    return sum(step.duration_ns / 1e9 * n for step, n in zip(run.explanation.steps, counts, strict=True))


def _state(run: ReportedRun) -> list[str]:
    """End of a run in words; none where nothing tells it."""
    if run.goodput is not None and run.goodput.failure:
        return ["failed"]
    if any(note.startswith(UNFINISHED_NOTE) for note in run.notes):
        return ["unfinished"]
    file = run.folder / SUMMARY if run.folder is not None else None
    ended = (as_object(file.read_bytes()) if file is not None and file.is_file() else None) or {}
    done, planned = number(ended.get("steps")), number(ended.get("planned_steps"))
    if done is None or planned is None:
        return []
    if ended.get("ended_early") is True:
        return [f"ended early, after step {done:,.0f} of {planned:,.0f}, as evaluations no longer got better"]
    return ["finished"] if ended.get("complete") is not False else [f"stopped after step {done:,.0f} of {planned:,.0f}"]


def measures_of(run: ReportedRun) -> dict[str, Measure]:
    """Numbers of the first screen by their names; what is not known is not among them."""
    measures: dict[str, Measure] = {}
    values_of = partial(steps.known, run.records)
    if run.mean.mfu is not None or values_of("mfu"):
        median = float(np.median(values_of("mfu"))) if values_of("mfu") else None
        # MFU of the whole run, as its summary says it; the mean of steps below leaves some steps out
        timed = [(number(r.get("mfu")), number(r.get("wall_s"))) for r in run.records]
        weighed = [(mfu * wall_s, wall_s) for mfu, wall_s in timed if mfu is not None and wall_s]
        total_s = sum(wall_s for _, wall_s in weighed)
        run_mfu = sum(work for work, _ in weighed) / total_s if weighed else run.mean.mfu
        mean = run_mfu if run_mfu is not None else median or 0.0
        remark = "" if median is None or run.mean.mfu is None else f"median {format_share(median)}"
        measures["MFU"] = Measure(mean, format_share(mean), remark, is_share=True)
    if any(rates := values_of("tokens_per_s")):  # a model without tokens has none
        tokens, wall_s = sum(values_of("tokens")), sum(values_of("wall_s"))
        rate = (
            tokens / wall_s
            if tokens and wall_s and len(values_of("tokens")) == len(run.records)
            else float(np.median(rates))
        )
        remark = f"{format_compact(tokens)} in all" if tokens else "median"
        measures["Tokens/s"] = Measure(rate, format_rounded(rate), remark)
    if times := values_of("step_s"):
        middle, high = (float(value) for value in np.percentile(times, [50, 95]))
        measures["Step"] = Measure(middle, format_duration(middle), f"95 % below {format_duration(high)}")
    measures |= _losses(run)
    measures |= _scores(run.evaluations[-1] if run.evaluations else {})
    if run.goodput is not None and run.goodput.wall_s:
        lost = max(((s, name) for name, s in run.goodput.seconds.items() if name != "step"), default=(0.0, ""))
        count = run.goodput.restarts
        remark = f"{count} restart{'' if count == 1 else 's'}" if count else f"{format_duration(lost[0])} of {lost[1]}"
        measures["Goodput"] = Measure(run.goodput.goodput, format_share(run.goodput.goodput), remark, is_share=True)
    return measures


def _plain(value: float) -> str:
    return f"{value:.3g}"


def _losses(run: ReportedRun) -> dict[str, Measure]:
    """Last loss of a run beside the first, or beside that of held-out samples; of one without any, why."""
    tally = LossTally()
    for record in run.records:
        numbers = {key: number(value) for key, value in record.items() if key == "loss" or key.endswith("_loss")}
        tally.add({**numbers, "kind": "step", "empty": record.get("empty")})
    lost = sum(map(steps.is_broken, run.records))
    about = f"not finite in {lost:,} of {len(run.records):,} records" if lost else ""
    if lost and steps.is_broken(run.records[-1]):
        return {"Loss": Measure(float("nan"), "NaN", about)}
    if tally.first is not None and tally.last is not None:
        held_out = number(run.evaluations[-1].get("loss")) if run.evaluations else None
        remark = f"from {_plain(tally.first)}" if held_out is None else f"held out {_plain(held_out)}"
        return {"Loss": Measure(tally.last, _plain(tally.last), about or remark)}
    if further := next(iter(tally.last_further.items()), None):
        return {f"{further[0].capitalize()} loss": Measure(further[1], _plain(further[1]), "")}
    return {}


def _scores(judged: Mapping[str, Any]) -> dict[str, Measure]:
    """Part of the held-out answers, or pairs, that is right."""
    for key, name, of in (("exact_match", "Answers right", "samples"), ("accuracy", "Pairs right", "pairs")):
        if (score := number(judged.get(key))) is not None:
            count = number(judged.get(of))
            remark = f"of {count:,.0f} held out" if count else "held out"
            return {name: Measure(score, format_share(score), remark, is_share=True)}
    return {}


def _tiles(by_run: Sequence[Mapping[str, Measure]]) -> ReportSection:
    """Measures side by side: value and remark of one run, both values and their difference of two."""
    names = dict.fromkeys(name for measures in by_run for name in measures)
    if len(by_run) == 1:
        rows = [
            [name, m.text, "" if m.remark in [f"{what} {m.text}" for what in _SPREAD] else m.remark]
            for name, m in by_run[0].items()
        ]
        return ReportSection("", ["", "value", "remark"], rows, left=(0, 2))
    rows = []
    for name in names:
        of = [measures.get(name) for measures in by_run]
        both = [measure for measure in of if measure is not None]
        differ = steps.change(*(m.value for m in both), is_share=both[0].is_share) if len(both) == len(of) else ""
        rows.append([name, *("-" if measure is None else measure.text for measure in of), differ])
    return ReportSection("", ["", "A", "B", "B against A"], rows)


def _folds(
    runs: Sequence[ReportedRun], chart: Any, differ: Mapping[str, Sequence[ReportSection]], notes: Sequence[str]
) -> dict[str, list[ReportSection]]:
    """Everything behind the first screen, by heading."""
    records = [run.records for run in runs]
    learning = (*steps.LEARNING, *steps.further_series(records[0]))
    table = partial(steps.series_numbers, records)
    folds = {
        "Learning": [*chart(learning), table((steps.FIRST[0], *learning))],
        "Speed and memory": [table(steps.FIRST[1:])],
        "Data": [*chart(steps.DATA), table(steps.DATA)],
        "The run": [],
    }
    for heading, sections in differ.items():
        folds[heading] = [*sections, *folds[heading]]
    if len(runs) == 1:
        (run,) = runs
        of_folder = folder_sections(run.folder, run.records, run.marks)
        of_run = {
            "Speed and memory": [
                *([] if run.profile is None else [_all_steps(run.mean)]),
                *steps.phases(run.mean),
                *steps.step_times(run.records),
                *steps.components(run.records),
            ],
            "Data": [*steps.source_tokens(run.records), steps.stages(run.records)],
            "The run": [*_goodput(run), _settings_of(run.files), provenance(run.files.get(RUN, ""))],
        }
        for part in (of_run, of_folder):
            folds = {heading: [*sections, *part.get(heading, ())] for heading, sections in folds.items()}
    folds["The run"] += [_basis(runs), ReportSection("What to know of these numbers", points=notes)]
    return {
        heading: shown
        for heading in HEADINGS
        if (shown := [s for s in folds[heading] if s.rows or s.chart or s.points])
    }


def _settings_of(files: Mapping[str, str]) -> ReportSection:
    return changed_settings(files.get(CONFIG, ""), files.get(RUN, ""))


def _all_steps(mean: MeanWaterfall) -> ReportSection:
    section = steps.time_section(
        [mean], f"the mean of {mean.num_steps:,} steps, of which records tell less than a profile"
    )
    rows = [*section.rows, section.footer]
    return ReportSection("Where the time of all steps goes", section.headings, rows, section.says)


def _goodput(run: ReportedRun) -> list[ReportSection]:
    if run.goodput is None or not run.goodput.wall_s:
        return []
    spent = {bucket: seconds for bucket, seconds in run.goodput.seconds.items() if seconds}
    rows = [[name, format_duration(s), format_share(s / run.goodput.wall_s)] for name, s in spent.items()]
    says = f"Goodput {format_share(run.goodput.goodput)}: time of the steps that were not lost / wall time of the run."
    bars = [seconds / run.goodput.wall_s for seconds in spent.values()]
    return [ReportSection("Where the run's wall time goes", ["bucket", "time", "share"], rows, says, bars=bars)]


def _basis(runs: Sequence[ReportedRun]) -> ReportSection:
    """Basis of the numbers: convention, peak, steps, memory, energy."""
    by_run = [_facts_of_basis(run) for run in runs]
    names = dict.fromkeys(name for facts in by_run for name in facts)
    rows = [[name, *(facts.get(name, "-") for facts in by_run)] for name in names]
    says = "MFU is useful model FLOPs / (wall time x peak); the convention says what is useful."
    return ReportSection("What the numbers rest on", ["what", *("AB" if len(runs) > 1 else ["value"])], rows, says)


def _facts_of_basis(run: ReportedRun) -> dict[str, str]:
    last, rows = run.records[-1], dict[str, str]()
    first = run.explanation.steps[0].step - int(number(run.records[0].get("num_steps")) or 1) + 1
    if isinstance(last.get("convention"), str):
        rows["convention"] = last["convention"]
    if (peak := number(last.get("peak_flops_per_s"))) is not None:
        rows["peak of a device"] = f"{format_rate(peak)}, {last.get('peak_dtype')}: {last.get('peak_source')}"
    rows["steps"] = f"{first} to {last['step']}, {len(run.records)} records"
    if memory := steps.known(run.records, "peak_memory_bytes"):
        rows["memory, most of a rank"] = format_bytes(max(memory))
    if len(energy := steps.known(run.records, "energy_j")) == len(run.records):
        rows["energy, as the devices measured it"] = f"{sum(energy) / 3.6e6:.4g} kWh"
    return rows


def machine(run: ReportedRun) -> dict[str, Any]:
    """Numbers of the page of a run, JSON-ready."""
    series = (*steps.FIRST, *steps.LEARNING, *steps.DATA, *steps.further_series(run.records))
    by_key = {key: [number(record.get(key)) for record in run.records] for key, _, _ in series}
    return {
        "schema_version": SCHEMA_VERSION,
        "name": run.name,
        "num_records": len(run.records),
        "mean_step": mean_record(run.name, run.mean, run.explanation.notes)
        | {"lines": {line.key: line.ns for line in run.mean.lines}},
        "phases": [phase.to_dict() for phase in run.mean.phases],
        "goodput": None if run.goodput is None else run.goodput.to_dict(),
        "findings": [finding.to_dict() for finding in run.findings],
        "series": {
            key: steps.summary_of(run.records, values)
            for key, values in by_key.items()
            if any(value is not None for value in values)
        },
    }


def judged_page(path: Path, evaluations: Sequence[Mapping[str, Any]]) -> RunPage:
    """Make the page of a folder that holds evaluations and no step of training."""
    (name,) = names_of_runs([path])
    files, measures = texts_of(path), dict[str, Measure]()
    if (loss := number(evaluations[-1].get("loss"))) is not None:
        measures["Loss"] = Measure(loss, _plain(loss), "held out")
    sections = folder_sections(path if path.is_dir() else path.parent, ())
    sections["The run"] = [*sections["The run"], _settings_of(files), provenance(files.get(RUN, ""))]
    count = f"{format_count(len(evaluations))} evaluation{'' if len(evaluations) == 1 else 's'}"
    return RunPage(
        title=name,
        facts=[f"{count} and no step of training"],
        tiles=_tiles([measures | _scores(evaluations[-1])]),
        folds={heading: shown for heading in HEADINGS if (shown := [s for s in sections[heading] if s.rows])},
        files=files,
        numbers={"schema_version": SCHEMA_VERSION, "name": name, "evaluations": [*evaluations]},
    )
