"""Differences of two runs: their steps, how sure that is, losses at equal cost, and the settings that differ."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import yaml

from headway.explain.comparison import Comparison, compare, differences
from headway.log.run_files import CONFIG
from headway.pages.folder import names_of_runs
from headway.pages.run import ReportedRun
from headway.pages.steps import change, flops_by_component
from headway.plugins import objectives
from headway.report import format_flops, format_rate, format_rounded
from headway.report.charts import DrawnLine, lines_chart
from headway.report.quantity import number
from headway.report.section import ReportSection

_SAME_PEAK = 0.005  # a measured one is never twice the same
_SAME_WORK = 0.005  # smaller differences are not named
_FEW = 5  # steps
_MOST_NAMED = 3  # settings that differ, in a sentence
# sections that change what is computed
_DECISIVE = ("model", "optim", "data", "objective", "parallel", "speed", *(plugin.section for plugin in objectives()))
_BLOCK, _RESAMPLES = 10, 2000  # steps that follow each other are alike, so ten of them are drawn together
OF_INTERVAL = (
    "the interval knows how steps vary within each run; of what changed between the two, such as other work on the "
    "machine, it knows nothing."
)
_PARTS = (0.25, 0.5, 0.75, 1.0)  # parts of the shorter run
_MOST_SETTINGS = 5000
_SMOOTHED = 50  # a loss is the mean of so manieth part of the run before it


def compared(a: ReportedRun, b: ReportedRun) -> tuple[ReportedRun, ReportedRun, Comparison]:
    """Compare two runs under names that distinguish them."""
    names = names_of_runs([a.path, b.path])
    lines = compare((names[0], a.explanation), (names[1], b.explanation))
    notes = (*lines.notes, OF_INTERVAL)
    return replace(a, name=names[0]), replace(b, name=names[1]), replace(lines, notes=notes)


def difference_points(a: ReportedRun, b: ReportedRun, compared: Comparison) -> list[str]:
    """Say how the steps differ and how sure that is, then by what, and which settings differ."""
    first, *others = differences(compared)
    exact = [*_waste_differs(a, b), *_peaks_differ(a, b)]  # differences that no scatter of times can change
    settings = _settings_in_words(a, b)
    interval = step_interval(a, b)
    if interval is None:
        unsure = f"Fewer than {_FEW} steps have no interval, so the difference may be chance."
        return [first, unsure, *others, *exact, *settings]
    low, high = interval
    sure = f"95 % interval, from how the steps of each run vary: {100 * low:+.1f} to {100 * high:+.1f} % of A's step"
    if low <= 0 <= high:
        return [first, f"{sure}. No difference is shown.", *_beyond_scatter(a, b, compared), *exact, *settings]
    return [first, f"{sure}.", *others, *exact, *settings]


def _settings_in_words(a: ReportedRun, b: ReportedRun) -> list[str]:
    changed = [row for row in settings_that_differ(a, b).rows if row[0] != "run.folder"]
    if not changed:
        return []
    shown = ", ".join(f"{name} ({of_a} in A, {of_b} in B)" for name, of_a, of_b in changed[:_MOST_NAMED])
    more = f" and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
    return [f"Settings that differ: {shown}{more}."]


def _waste_differs(a: ReportedRun, b: ReportedRun) -> list[str]:
    ratios = _computed_of_useful(a), _computed_of_useful(b)
    if math.isclose(*ratios, rel_tol=_SAME_WORK):
        return []
    return [f"Because of padding and recomputation, B computes {change(*ratios)} FLOPs for each useful one."]


def _peaks_differ(a: ReportedRun, b: ReportedRun) -> list[str]:
    peaks = [number(run.records[-1].get("peak_flops_per_s")) for run in (a, b)]
    if None in peaks or math.isclose(*(peak or 0.0 for peak in peaks), rel_tol=_SAME_PEAK):
        return []
    rates = " and ".join(format_rate(peak or 0.0) for peak in peaks)
    return [f"The runs were measured against other peaks, {rates}, so MFU differs for the same work."]


def _steps_s(run: ReportedRun) -> "np.ndarray":
    """Time of each step that the mean step counts [s]."""
    steps = run.explanation.steps[len(run.mean.left_out) :]
    return np.array([step.duration_ns / 1e9 for step in steps])


def step_interval(a: ReportedRun, b: ReportedRun) -> tuple[float, float] | None:
    """Bounds of mean(B) / mean(A) - 1, at 95 %; None of few steps."""
    a_s, b_s = _steps_s(a), _steps_s(b)
    return None if min(len(a_s), len(b_s)) < _FEW else _interval(a_s, b_s)


def _interval(a_s: "np.ndarray", b_s: "np.ndarray") -> tuple[float, float]:
    return _bounds(_means(b_s, "B") / _means(a_s, "A") - 1)


def _means(values: "np.ndarray", run: str) -> "np.ndarray":
    """Means over the steps as they could have come out, by drawing blocks of steps again; the same draws each time.

    Source: the moving block bootstrap, Kuensch 1989, "The jackknife and the bootstrap for general stationary
    observations", Annals of Statistics 17.
    """
    size = min(_BLOCK, max(1, len(values) // 4))
    blocks = np.convolve(values, np.ones(size) / size, mode="valid")  # the mean of each row of so many steps
    drawn = max(1, len(values) // size)
    most = min(drawn, 1000)  # more say nothing new; the spread shrinks with the root of their number
    means = blocks[np.random.default_rng(ord(run)).integers(len(blocks), size=(_RESAMPLES, most))].mean(axis=1)
    return np.asarray(values.mean() + (means - means.mean()) * np.sqrt(most / drawn))


def _bounds(values: "np.ndarray") -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _line_intervals(a: ReportedRun, b: ReportedRun, compared: Comparison) -> dict[str, tuple[float, float]]:
    """Bounds of B - A of each line [ms]; none of runs of few steps."""
    if min(len(_steps_s(a)), len(_steps_s(b))) < _FEW:
        return {}

    def means(run: ReportedRun, name: str, key: str) -> "np.ndarray":
        steps = run.explanation.steps[len(run.mean.left_out) :]
        return _means(np.array([sum(line.ns for line in step.lines if line.key == key) / 1e6 for step in steps]), name)

    timed = (line for line in compared.lines if line.a_ns or line.b_ns)
    return {line.key: _bounds(means(b, "B", line.key) - means(a, "A", line.key)) for line in timed}


def _beyond_scatter(a: ReportedRun, b: ReportedRun, compared: Comparison) -> list[str]:
    """Lines that differ for sure, where all of the step together does not."""
    intervals, sure = _line_intervals(a, b, compared), []
    for line in sorted(compared.lines, key=lambda line: -abs(line.ns)):
        low, high = intervals.get(line.key, (0.0, 0.0))
        if not low <= 0 <= high and abs(line.ns) > _SAME_WORK * compared.a.mean.duration_ns:
            sure.append(f"{line.name} ({line.ns / 1e6:+,.2f} ms, 95 % interval {low:+,.2f} to {high:+,.2f})")
    return [f"These lines differ by more than the steps vary: {', '.join(sure)}."] if sure else []


def difference_sections(a: ReportedRun, b: ReportedRun) -> dict[str, list[ReportSection]]:
    """Tables of what differs, by the heading of the page that they stand under."""
    return {
        "Learning": [_losses("tokens", a, b), _losses("FLOPs", a, b)],
        "Speed and memory": [_work(a, b), _components(a, b)],
        "The run": [settings_that_differ(a, b)],
    }


def _work(a: ReportedRun, b: ReportedRun) -> ReportSection:
    """A step's time is its work over the rate at which it is done."""
    flops = [_per_step(run, "flops", "total") for run in (a, b)]
    if not all(flops):
        return ReportSection("", [], [])
    seconds = [float(_steps_s(run).mean()) for run in (a, b)]
    computed = [value * _computed_of_useful(run) for value, run in zip(flops, (a, b), strict=True)]
    rates, useful_rates = ([value / s for value, s in zip(work, seconds, strict=True)] for work in (computed, flops))
    tokens = [_per_step(run, "tokens") for run in (a, b)]
    rows = [
        ["useful FLOPs of a step", *map(format_flops, flops), change(*flops)],
        ["FLOPs with padding and recomputation", *map(format_flops, computed), change(*computed)],
        ["FLOP/s with these, all devices", *map(format_rate, rates), change(*rates)],
        ["useful FLOP/s, all devices", *map(format_rate, useful_rates), change(*useful_rates)],
        ["tokens of a step", *map(format_rounded, tokens), change(*tokens)],
        ["time of a step", *(f"{1e3 * value:,.1f} ms" for value in seconds), change(*seconds)],
    ]
    says = (
        f"Time is work over rate: {change(*seconds)} of time = {change(*computed)} of work, padding and "
        f"recomputation in it, at {change(*rates)} of rate. Useful work: {change(*flops)}."
    )
    return ReportSection("Work and rate", ["", "A", "B", "B against A"], rows, says)


def _computed_of_useful(run: ReportedRun) -> float:
    """FLOPs of the mean step with padding and recomputation / useful ones.

    Language layers other than attention spend as much on a padding slot as on a token; records tell no more.
    """
    by_component = _by_component(run)
    on_slots = sum(
        flops for name, flops in by_component.items() if name.startswith("language.") and name != "language.attention"
    )
    tokens, slots = _per_step(run, "tokens"), _per_step(run, "slots")
    padding = on_slots * max(0.0, slots - tokens) / tokens if tokens else 0.0
    useful = sum(by_component.values()) or _per_step(run, "flops", "total")
    return 1 + (padding + _per_step(run, "flops", "recompute")) / max(1.0, useful)


def _components(a: ReportedRun, b: ReportedRun) -> ReportSection:
    sums = [_by_component(run) for run in (a, b)]
    names = dict.fromkeys([*sums[0], *sums[1]])
    rows = [
        [name, *(format_flops(run.get(name, 0.0)) for run in sums), change(*(run.get(name, 0.0) for run in sums))]
        for name in names
    ]
    return ReportSection("FLOPs of a step by component", ["component", "A", "B", "B against A"], rows)


def _by_component(run: ReportedRun) -> dict[str, float]:
    return {name: _per_step(run, "flops_by_component", name) for name in flops_by_component(run.records)}


def _losses(by: str, a: ReportedRun, b: ReportedRun) -> ReportSection:
    """Losses where both runs have spent as much, which steps of different size do not say."""
    curves = [_curve(run, *(("tokens",) if by == "tokens" else ("flops", "total"))) for run in (a, b)]
    if not all(len(cost) for cost, _ in curves):
        return ReportSection("", [], [])
    most = min(float(cost[-1]) for cost, _ in curves)
    least = max(float(cost[0]) for cost, _ in curves)
    rows = []
    for at in (part * most for part in _PARTS):
        if at >= least:
            losses = [float(np.interp(at, *curve)) for curve in curves]
            cost_text = f"{at:,.0f}" if by == "tokens" else format_flops(at)
            rows.append([cost_text, *(f"{loss:.4f}" for loss in losses), f"{losses[1] - losses[0]:+.4f}"])
    says = "Each loss is a mean over the last fiftieth of the run before that point."
    title = f"Loss at equal {by}"
    # Costs in the unit that suits the larger run.
    scale = 1000.0 ** (math.floor(math.log10(max(float(cost[-1]) for cost, _ in curves) or 1.0)) // 3)
    unit = f"{format_flops(scale).split()[1].removesuffix('FLOP')}{by.removesuffix('s')}s"
    lines = [DrawnLine(name, cost / scale, losses) for name, (cost, losses) in zip("AB", curves, strict=True)]
    chart = lines_chart(title, lines, form="plain", x_name=unit, by_ratio=True)
    return ReportSection(title, [by, "A", "B", "B - A"], rows, says, chart, f"over {unit}")


def _curve(run: ReportedRun, *keys: str) -> "tuple[np.ndarray, np.ndarray]":
    """Amount that was spent up to each step, and the mean of the losses before it."""
    points = [
        (spent, loss)
        for record in run.records
        if (loss := number(record.get("loss"))) is not None and (spent := number(_at(record, *keys))) is not None
    ]
    if not points:
        return np.empty(0), np.empty(0)
    spent, losses = np.array(points, dtype=float).T
    width = max(1, len(losses) // _SMOOTHED)
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(0, ends - width)
    return np.cumsum(spent), (sums[ends] - sums[starts]) / (ends - starts)


def settings_that_differ(a: ReportedRun, b: ReportedRun) -> ReportSection:
    """Settings of config.yaml that differ; both are without secrets already."""
    both = [_flat(run.files.get(CONFIG, "")) for run in (a, b)]
    below = [Counter(section for name in settings for section in _sections_of(name)) for settings in both]
    rows: dict[str, list[str]] = {}
    for name in dict.fromkeys([*both[0], *both[1]]):
        if both[0].get(name) != both[1].get(name):
            # one row for the whole of a section that only one run has
            row = next((part for part in _sections_of(name) if not all(counts[part] for counts in below)), name)
            rows[row] = [
                settings.get(row, f"a section of {counts[row]}" if counts[row] else "-")
                for settings, counts in zip(both, below, strict=True)
            ]
    ordered = sorted(rows.items(), key=lambda row: _rank_of(row[0]))
    return ReportSection("Settings that differ", ["setting", "A", "B"], [[name, *row] for name, row in ordered])


def _sections_of(name: str) -> list[str]:
    return [name[: dot.start()] for dot in re.finditer(r"\.", name)]


def _rank_of(name: str) -> int:
    """Order of settings by their influence on the numbers: settings of learning first, places of files last."""
    section = "eval" if name.startswith("data.eval") else name.partition(".")[0]
    return _DECISIVE.index(section) if section in _DECISIVE else len(_DECISIVE)


def _flat(text: str) -> dict[str, str]:
    try:
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    nodes = islice(_nodes(raw), _MOST_SETTINGS)  # anchors of YAML may make a few lines endless
    return {path: str(node) for path, node in nodes if path and not isinstance(node, Mapping | list)}


def _nodes(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, node
    children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, child in children:
        yield from _nodes(child, f"{path}.{name}" if path else str(name))


def _at(record: Mapping[str, Any], *keys: str) -> Any:
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _per_step(run: ReportedRun, *keys: str) -> float:
    """Value of a step that the mean step counts, by the keys that lead to the number."""
    counted = {step.step for step in run.explanation.steps[len(run.mean.left_out) :]}
    records = [record for record in run.records if record.get("step") in counted]
    num_steps = round(sum(number(record.get("num_steps")) or 1.0 for record in records))
    return sum(number(_at(record, *keys)) or 0.0 for record in records) / max(1, num_steps)
