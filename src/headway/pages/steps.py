"""The steps of a run: its results in a sentence, and charts and tables of series, stages, marks, phases, sources."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from headway.explain.explanation import UNSEPARATED, Finding, MeanWaterfall, StepWaterfall, mean_of
from headway.explain.phases import ASIDE, PhaseLine, mean_phases, phase_section, phase_sentences
from headway.log.run_files import LossTally, further_losses
from headway.meter.step_phases import REST
from headway.pages.folder import held_out, restarts
from headway.report import format_count, format_duration, format_flops, format_share
from headway.report.charts import FORMS, ChartMark, DrawnLine, Form, bar_chart, histogram, lines_chart
from headway.report.quantity import number
from headway.report.section import ReportSection

_SAME = 0.005  # a loss that changed by less stayed as it was


def first_sentence(
    records: Sequence[Mapping[str, Any]],
    mean: MeanWaterfall,
    findings: Sequence[Finding],
    *,
    summary: Mapping[str, Any],
    judged: Mapping[str, Any],
    wall_s: float | None,
    is_unfinished: bool,
) -> str:
    """Say the run's results and the first thing to mend.

    Args:
        records: of steps, at least one.
        mean: its mean step.
        findings: what to mend, the first one first.
        summary: of a run that ended, as summary.json has it; empty without one.
        judged: the last evaluation's record; empty without one.
        wall_s: time of the run [s]; None where it is not known.
        is_unfinished: whether it neither ended nor was stopped, as far as its folder says.
    """
    num_steps = round(sum(number(record.get("num_steps", 1)) or 1.0 for record in records))
    # Loss and score first, then what they took, then how well the hardware was used.
    took = f"{format_count(num_steps)} {'step' if num_steps == 1 else 'steps'}"
    took += f" and {format_duration(wall_s)}" if wall_s is not None else ""
    learnt, score = _learnt(records), scores(judged)
    reached = f"{learnt} in {took}" if learnt else f"the run took {took}"
    if score:
        reached = f"{learnt} ({score}) in {took}" if learnt else f"{reached} ({score})"
    if not learnt and any(record.get("skipped") for record in records):
        reached += ", all without an update, since their numbers were not finite,"
    mfu = [value for record in records if (value := number(record.get("mfu"))) is not None]
    if mfu:
        reached += f" at MFU {format_share(float(np.median(mfu)))} (median)"
    beginning = _state(summary, is_unfinished=is_unfinished)
    text = f"{beginning}: {reached}" if beginning else reached[0].upper() + reached[1:]
    if not mfu:
        text += "; MFU is not known"
    if findings:
        first = next(filter(_is_headline, findings), None)
        if first is None:
            return f"{text}; what the findings name costs little."
        share = f" ({first.extent})" if first.share > 0 else ""
        return f"{text}; first finding, {first.id}{share}: {first.seen.removesuffix('.')}."
    return f"{text}{_largest_loss(mean)}."


def _is_headline(finding: Finding) -> bool:
    """Tell whether a finding would change what is printed: a loss of some per cent of a small MFU may not."""
    if finding.mfu_from is None or finding.mfu_to is None:
        return True
    return finding.share >= _HEADLINE or format_share(finding.mfu_from) != format_share(finding.mfu_to)


def _state(summary: Mapping[str, Any], *, is_unfinished: bool) -> str:
    """End of a run that did not take all its steps, in words; "" for a complete run, or if the end is unknown."""
    if is_unfinished:
        return "Unfinished run"
    done, planned = number(summary.get("steps")), number(summary.get("planned_steps"))
    if summary.get("ended_early") is True and done is not None and planned is not None:
        return f"Ended early after step {done:,.0f} of {planned:,.0f}, as evaluations no longer got better"
    if summary.get("complete") is False and done is not None and planned is not None:
        return f"Stopped after step {done:,.0f} of {planned:,.0f}"
    return ""


def _learnt(records: Sequence[Mapping[str, Any]]) -> str:
    tally = LossTally()
    for record in records:
        numbers = {key: number(value) for key, value in record.items() if key == "loss" or key.endswith("_loss")}
        tally.add({**numbers, "kind": "step", "empty": record.get("empty")})
    first, last = tally.first, tally.last
    if first is not None and last is not None:
        stayed = abs(last - first) <= _SAME * abs(first)
        return f"the loss stayed at {last:.4g}" if stayed else f"the loss went from {first:.4g} to {last:.4g}"
    further = [f"the {name} loss came to {value:.4g}" for name, value in tally.last_further.items()]
    return further[0] if further else ""


def scores(judged: Mapping[str, Any]) -> str:
    """Loss, exact answers and right pairs of one evaluation in words; "" without any."""
    loss, exact = number(judged.get("loss")), number(judged.get("exact_match"))
    parts = [] if loss is None else [f"{loss:.4g} on held-out samples"]
    parts += [] if exact is None else [f"{format_share(exact)} of the held-out answers exact"]
    right = number(judged.get("accuracy"))
    parts += [] if right is None else [f"{format_share(right)} of the held-out pairs right"]
    return ", ".join(parts)


def _largest_loss(mean: MeanWaterfall) -> str:
    lost = [(line.ns, line.key, line.name) for line in mean.lines if line.key != "useful" and line.ns > 0]
    if not lost or all(line.key != "useful" for line in mean.lines):
        return "; no rule finds anything to mend"
    ns, key, name = max(lost)
    share = format_share(ns / mean.duration_ns)
    if key == UNSEPARATED:
        return f"; {share} of the mean step are kernels and waiting that only a profile tells apart"
    return f"; no rule finds anything to mend, and the largest loss of the mean step is {share}: {name}"


_HEADLINE = 0.05  # share of the time from which a finding is worth the first sentence, whatever it does to MFU
_FEW = 2  # steps; fewer have no percentiles
_SLOW, _MOST_SLOW = 1.5, 10  # a step that is told by its number took so many times the median
_TOLD = 0.1  # share of a step, or of its tokens, that may explain it
DETAIL = 400  # buckets of a long run that the page holds for zooming
_plain = FORMS["plain"]
_BY_RATIO = re.compile(r"(.+_)?loss|grad_norm")  # numbers whose falls to a hundredth are seen on an axis of ratios
Series = tuple[tuple[str, str, Form], ...]  # key of a record, title, and how a value reads
LEARNING: Series = (
    ("loss", "Loss", "plain"),
    ("lr", "Learning rate", "plain"),
    ("grad_norm", "Gradient norm", "plain"),
)
SPEED: Series = (
    ("mfu", "MFU", "share"),
    ("tokens_per_s", "Tokens per second", "count"),
    ("step_s", "Time of a step", "duration"),
)
DATA: Series = (
    ("data_wait_share", "Waiting for data, share of a step", "share"),
    ("padding_share", "Padding, share of slots", "share"),
    ("fill", "Fill, tokens over the room of the packs", "share"),
    ("balance", "Balance, mean over most FLOPs of the ranks", "share"),
)
SERIES = (*LEARNING, *SPEED, *DATA)
MOST_KNOTS = 1000  # steps of which the page holds tokens and time; between them these are on a straight line
# Chance that a source of a mixture stays away by itself for so long; below it the source was not in the mixture.
_CHANCE = 1e-4
_LEAST = 5  # records with a source, of which one can tell how often it comes
_APART = 2  # records within which two changes are one
_LEFT_OVER = 0.05  # part of a run's records within which a source ends after another source has taken over
_LOOKS = {
    "restart": "a dashed line is a restart",
    "stage": "a dotted line is the beginning of another stage of the data",
    "evaluation": "a short line at the top is an evaluation",
}
_MOST_STAGES = 30  # more are no stages
WIDTH, HEIGHT = 1000, 160  # size of the drawing, which is stretched to its room
_MOST_BARS = 100  # most bars; with more steps each bar is the mean of several
_COLOURS = (0, 2, 3, 4, 5, 7)  # --c0 to --c7 of the page, of phases that the loop names
_COLOUR_OF = {REST: "--c6", ASIDE: "--grid"}
_TITLE = "Phases of a step"


def further_series(records: Sequence[Mapping[str, Any]]) -> Series:
    """Series of the losses that an objective records beside "loss"."""
    names = dict.fromkeys(name for record in records[-MOST_KNOTS:] for name in further_losses(record))
    return tuple((f"{name}_loss", f"{name.capitalize()} loss", "plain") for name in names)


def step_series(
    records: Sequence[Mapping[str, Any]],
    marks: Sequence[ChartMark],
    companions: Mapping[str, DrawnLine],
    series: Series,
) -> list[ReportSection]:
    """A chart over the steps for each number of the records; numbers that never change share one table."""
    steps = [float(record["step"]) for record in records]
    sections, constant = [], []
    for key, title, form in series:
        write = FORMS[form]
        values = [number(record.get(key)) for record in records]
        if all(value is None for value in values):
            continue
        summary = summary_of(records, values)
        if summary["smallest"] == summary["largest"] and len(values) > 1:
            constant.append([title, write(summary["smallest"])])
            continue
        other = companions.get(key)
        lines = [DrawnLine("training" if other else "", steps, values), *([other] if other else [])]
        chart = lines_chart(
            title, lines, form=form, marks=marks, by_ratio=bool(_BY_RATIO.fullmatch(key)), detail=DETAIL
        )
        rows = [[name, write(summary[name])] for name in ("5 %", "50 %", "95 %")]
        rows.insert(0, [f"smallest, step {summary['step of smallest']:.0f}", write(summary["smallest"])])
        rows.append([f"largest, step {summary['step of largest']:.0f}", write(summary["largest"])])
        sections.append(ReportSection(title, ["of the records", "value"], rows, chart=chart))
    if constant:
        sections.append(ReportSection("The same in every record", ["what", "value"], constant))
    return sections


def step_times(records: Sequence[Mapping[str, Any]]) -> list[ReportSection]:
    """Percentiles of step times, and the slowest steps with the reasons that their records give."""
    timed = [(value, record) for record in records if (value := number(record.get("step_s"))) is not None]
    times = [value for value, _ in timed]
    if len(times) < _FEW:
        return []
    spread = [[f"{q} %", format_duration(float(np.percentile(times, q)))] for q in (5, 25, 50, 75, 95, 99)]
    chart = histogram(title := "How long steps took", times, form=format_duration)
    sections = [ReportSection(title, ["percentile of steps", "time"], spread, chart=chart)]
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


def summary_of(records: Sequence[Mapping[str, Any]], values: Sequence[float | None]) -> dict[str, float]:
    """Extremes of a number of records with their steps, and its percentiles."""
    pairs = [(value, int(record["step"])) for record, value in zip(records, values, strict=True) if value is not None]
    low, high = min(pairs), max(pairs)
    extremes = {"smallest": low[0], "step of smallest": low[1], "largest": high[0], "step of largest": high[1]}
    quantiles = np.percentile([value for value, _ in pairs], [5, 50, 95])
    return extremes | {f"{q} %": float(value) for q, value in zip((5, 50, 95), quantiles, strict=True)}


def components(records: Sequence[Mapping[str, Any]]) -> list[ReportSection]:
    """FLOPs of all steps by component, where records divide them."""
    totals: dict[str, float] = {}
    for record in records:
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


def source_tokens(records: Sequence[Mapping[str, Any]]) -> list[ReportSection]:
    """Tokens of all steps by source of data, with the last loss of each."""
    tokens: dict[str, float] = {}
    losses: dict[str, float] = {}
    for record in records:
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


def known(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Values of a number, of the records that have it."""
    return [value for record in records if (value := number(record.get(key))) is not None]


def marks_of(folder: Path | None, records: Sequence[Mapping[str, Any]]) -> list[ChartMark]:
    """Collect restarts, stages and evaluations of a run."""
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


def mean_phase_lines(steps: Sequence[StepWaterfall]) -> tuple[PhaseLine, ...]:
    """Phases of the mean step; none of a loop that names none."""
    return mean_of(steps).phases if any(step.phases for step in steps) else ()


def _phases(steps: Sequence[StepWaterfall]) -> ReportSection | None:
    """Table of the phases of the mean step, with the least time of each phase that generates; None without phases."""
    if not (lines := mean_phase_lines(steps)):
        return None
    table = phase_section(lines, sum(line.ns for line in lines))
    headings = ["phase", "time [ms]", *table.headings[2:]]
    return ReportSection(_TITLE, headings, [*table.rows, table.footer], " ".join(phase_sentences(lines)))


def phase_chart(steps: Sequence[StepWaterfall]) -> dict[str, Any] | None:
    """Values of the template `phases.html.jinja`: the section's table, and bars over the steps; None without phases."""
    section = _phases(steps)
    if section is None:
        return None
    lines = mean_phase_lines(steps)
    colours = _colours([line for step in steps for line in step.phases])
    # A bar has all its steps, slow first ones as well, which the mean step leaves out.
    bars = [mean_phases([(step.duration_ns, step.phases) for step in part]) for part in _parts(steps)]
    longest_ns = max(sum(max(0, line.ns) for line in bar) for bar in bars) or 1  # a part without phases has no bar
    # Parts of a bar from the bottom up, in the order of the table.
    width, rects = WIDTH / len(bars), []
    for place, bar in enumerate(bars):
        below = 0.0
        for line in bar:
            height = HEIGHT * max(0, line.ns) / longest_ns
            below += height
            rects.append((line.name, round(place * width, 1), round(HEIGHT - below, 1), round(height, 1)))
    shares = "; ".join(f"{line.name}: {format_share(line.share)}" for line in lines)
    # One path for each colour, however many bars it is in.
    return {
        "section": section,
        "swatches": [colours[line.name] for line in lines if line.ns or line.flops],
        "by_colour": {
            colour: [(x, y, height) for name, x, y, height in rects if colours[name] == colour and height]
            for colour in dict.fromkeys(colours.values())
        },
        "width": round(width * (0.9 if len(bars) < _MOST_BARS else 1.0), 1),
        "box": (WIDTH, HEIGHT),
        "first": steps[0].step,
        "last": steps[-1].step,
        "longest": format_duration(longest_ns / 1e9),
        "is_mean": len(bars) < len(steps),
        "description": f"{len(bars)} bars over steps {steps[0].step} to {steps[-1].step}; of the mean step {shares}.",
    }


def _parts(steps: Sequence[StepWaterfall]) -> list[Sequence[StepWaterfall]]:
    count = min(len(steps), _MOST_BARS)
    return [steps[len(steps) * i // count : len(steps) * (i + 1) // count] for i in range(count)]


def _colours(lines: Sequence[PhaseLine]) -> dict[str, str]:
    names = dict.fromkeys(line.name for line in lines if line.name not in _COLOUR_OF)
    return {name: f"--c{_COLOURS[place % len(_COLOURS)]}" for place, name in enumerate(names)} | _COLOUR_OF
