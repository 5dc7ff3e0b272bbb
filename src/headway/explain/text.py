"""Waterfalls for people: on a terminal of 80 columns, and as Markdown for an issue or a pull request."""

import sys
from collections.abc import Sequence
from statistics import median
from typing import Literal

from headway.explain.attribution import Phase
from headway.explain.breakdown import (
    NO_ATTENTION,
    NO_KERNEL,
    BreakdownRow,
    By,
    GemmRow,
    attributed_share,
    break_down,
    gemms_of,
    kind_of_module,
)
from headway.explain.explanation import (
    UNSEPARATED,
    Finding,
    JobExplanation,
    MeanWaterfall,
    OperandTraffic,
    StepWaterfall,
    WaterfallLine,
    mean_of,
)
from headway.explain.kernels import readable_name
from headway.explain.phases import phase_section, phase_sentences
from headway.report import (
    format_flops,
    format_ms,
    format_rate,
    format_share,
    format_traffic,
    printable,
    render_lines,
)
from headway.report.section import ReportSection, markdown_text
from headway.report.table import width_of
from headway.words import Argument

_MOST_STEPS = 20  # steps that are shown each
_MOST_SLOW = 5
_PLACES = (("fastest", 0.0), ("10 %", 0.1), ("median", 0.5), ("90 %", 0.9), ("slowest", 1.0))
_BAR = 20  # columns
_MOST_ROWS = 20
_BESIDE_NAMES = {"attention": 46}  # columns that the numbers of a breakdown take
_BESIDE_OTHERS = 54
_LONGEST_NAME = 100  # columns, if there is no terminal
_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTED)
_WITH_PARTS = {"matmul", "memory", "idle.sync", "idle.other", "aside"}
_LEAST_OTHER = 0.01  # part of a step from which idle time between kernels is shown by length
_NEARLY_ALL = 0.98
_SAME_LENGTH = 0.02  # part of a step on the host; a smaller difference is not shown
_LEAST_WAIT = 0.01  # part of a step from which a wait is shown
_NOT_A_LOSS = {"useful", "matmul"}


def as_text(explanation: JobExplanation, by: By | Literal["gemm"] | None = None, *, markdown: bool = False) -> str:
    """Render an explanation: what to do first, all steps in a line each, and their mean in full beside the median step.

    Args:
        explanation: at least one step.
        by: add the time by component, module or kernel, attention by pack and layer, or matrix products by size.
        markdown: tables as Markdown has them, without colour.
    """
    waterfalls = explanation.steps
    # The faster of two steps in the middle is shown, so that the median is a step that there is.
    shown = sorted(waterfalls, key=lambda waterfall: waterfall.duration_ns)[(len(waterfalls) - 1) // 2]
    mean = mean_of(waterfalls)
    # From the whole to its parts: all steps, the mean one, what it is made of, what to know.
    # Steps of which neither time nor work is known have nothing to show but their losses.
    differ = len({waterfall.duration_ns for waterfall in waterfalls}) > 1
    is_known = mean.is_timed or differ or any(line.key != UNSEPARATED for line in mean.lines)
    sections = [_overview(waterfalls)] if len(waterfalls) > 1 and is_known else []
    title = _title(shown, mean, len({waterfall.rank for waterfall in waterfalls}))
    sections += [_waterfall(title, mean, shown)] if is_known else []
    sections += [phase_section(mean.phases, mean.duration_ns)] if mean.phases else []
    sections.append(
        ReportSection(points=[*phase_sentences(mean.phases), *_details(mean), *_of_ranks(explanation, shown)])
    )
    if by is not None and mean.num_steps > 1:
        sections.append(ReportSection(points=[f"By {by}, of step {shown.step}, the median:"]))
    if by == "gemm":
        sections.append(_gemms(gemms_of(shown), shown))
    elif by is not None:
        sections.append(_breakdown(break_down(shown, by), by, shown))
    sections.append(ReportSection(points=[f"Note: {note}" for note in explanation.notes]))
    printed = [section.as_markdown() if markdown else section.as_terminal() for section in sections]
    learning = _sentence(explanation.learning) if explanation.learning else ""
    first = [markdown_text(learning) if markdown else learning]
    first += [_findings(explanation.findings, markdown=markdown)] if explanation.findings else []
    return "\n\n".join(text for text in [*first, *printed] if text)


def _title(shown: StepWaterfall, mean: MeanWaterfall, num_ranks: int) -> str:
    """Title of a step that is alone, or of the mean of several with the median step behind it."""
    is_whole = shown.measured is not None and shown.step == 0 and not shown.measured[0].trace.steps
    title = "the whole trace" if is_whole else f"step {shown.step}"
    if mean.num_steps > 1:
        title = f"the mean of {mean.num_steps:,} steps"
    title += f" of {num_ranks} ranks" if num_ranks > 1 and mean.num_steps > 1 else f" of rank {shown.rank}"
    title += f" on {shown.device_name}"
    if mean.is_timed:
        title += f": {format_ms(mean.duration_ns)} ms{_on_host(shown) if mean.num_steps == 1 else ''}"
    if mean.mfu is not None:
        title += f", MFU {format_share(mean.mfu)}"
    if mean.num_steps > 1:
        of_rank = f" of rank {shown.rank}" if num_ranks > 1 else ""
        took = f", {format_ms(shown.duration_ns)} ms" if mean.is_timed else ""
        title += f"; the median is step {shown.step}{of_rank}{took}"
        title += f" ({Argument('step')} and {Argument('rank')} show another)"
    if mean.left_out:
        title += f"; slow first steps are not in the mean: {', '.join(map(str, mean.left_out))}"
    return _sentence(title)


def _on_host(shown: StepWaterfall) -> str:
    """Duration of the step on the host, where its window is less sure and of another length."""
    host_ns = shown.measured[1].window.host_ns if shown.measured is not None and shown.is_edge else None
    if host_ns is None or abs(shown.duration_ns - host_ns) <= _SAME_LENGTH * host_ns:
        return ""
    return f" ({format_ms(host_ns)} ms on the host)"


def _overview(waterfalls: Sequence[StepWaterfall]) -> ReportSection:
    has_mfu = any(waterfall.mfu is not None for waterfall in waterfalls)
    chosen = _overview_steps(waterfalls)
    has_places = any(place for place, _ in chosen)
    headings = [f"of {len(waterfalls):,} steps"] if has_places else []
    # Without times the steps stand beside each other by their rates.
    is_timed = all(waterfall.is_timed for waterfall in waterfalls)
    usual_ns = median(waterfall.duration_ns for waterfall in waterfalls)
    headings += ["step", "rank", "ms" if is_timed else "rate", *(["MFU"] if has_mfu else []), "largest loss", "share"]
    rows = []
    for place, waterfall in chosen:
        dearest = _dearest(waterfall)
        mfu = [] if not has_mfu else ["-" if waterfall.mfu is None else format_share(waterfall.mfu)]
        loss = ["-", "-"] if dearest is None else [dearest.name, format_share(dearest.share)]
        placed = [place] if has_places else []
        duration_ns = waterfall.duration_ns
        took = format_ms(duration_ns) if is_timed else f"{format_share(usual_ns / duration_ns)} of the median"
        rows.append([*placed, str(waterfall.step), str(waterfall.rank), took, *mfu, *loss])
    return ReportSection("", headings, rows, left=(*((0,) if has_places else ()), len(headings) - 2))


def _overview_steps(waterfalls: Sequence[StepWaterfall]) -> list[tuple[str, StepWaterfall]]:
    """Choose the steps of an overview.

    Returns:
        All of them with empty places, up to 20; of more, those at some places by duration, then up to five that took
        more than twice the median, in their order.
    """
    if len(waterfalls) <= _MOST_STEPS:
        return [("", waterfall) for waterfall in waterfalls]
    by_duration = sorted(waterfalls, key=lambda waterfall: waterfall.duration_ns)
    last = len(by_duration) - 1
    chosen = [(name, by_duration[int(place * last)]) for name, place in _PLACES]
    usual_ns = median(waterfall.duration_ns for waterfall in waterfalls)
    slow = [waterfall for waterfall in waterfalls if waterfall.duration_ns > 2 * usual_ns]
    dearest = sorted(slow, key=lambda waterfall: -waterfall.duration_ns)[:_MOST_SLOW]
    in_order = sorted(dearest, key=lambda waterfall: (waterfall.step, waterfall.rank))
    return [*chosen, *((f"1 of {len(slow)} slow", waterfall) for waterfall in in_order)]


def _dearest(waterfall: StepWaterfall | MeanWaterfall) -> WaterfallLine | None:
    losses = [line for line in waterfall.lines if line.ns > 0 and line.key not in _NOT_A_LOSS]
    return max(losses, key=lambda line: line.ns, default=None)


def _waterfall(title: str, mean: MeanWaterfall, median_step: StepWaterfall) -> ReportSection:
    """Lines of the mean; for several steps with the lines of the median step beside them."""
    has_mfu, has_median = mean.mfu is not None, mean.num_steps > 1
    has_median = has_median and mean.is_timed
    headings = ["where the time went", *(["ms"] if mean.is_timed else []), "share"]
    headings += [*(["MFU without"] if has_mfu else []), *(["median ms"] if has_median else []), ""]
    median_ns = {line.key: line.ns for line in median_step.lines}
    width = _BAR // 2 if has_median else _BAR
    rows = []
    before_ns = 0
    for line in mean.lines:
        after_ns = before_ns + line.ns
        if line.ns or median_ns.get(line.key):
            mfu = [] if not has_mfu else ["" if line.mfu_to is None else format_share(line.mfu_to)]
            of_median = [format_ms(median_ns.get(line.key, 0))] if has_median else []
            bar = _bar(before_ns, after_ns, mean.duration_ns, width)
            took = [format_ms(line.ns)] if mean.is_timed else []
            rows.append([line.name, *took, format_share(line.share), *mfu, *of_median, bar])
        before_ns = after_ns
    of_median = [format_ms(median_step.duration_ns)] if has_median else []
    took = [format_ms(mean.duration_ns)] if mean.is_timed else []
    total = ["the step", *took, format_share(1.0), *([""] if has_mfu else []), *of_median, ""]
    dearest = _dearest(mean)
    return ReportSection(
        title,
        headings,
        rows,
        footer=total,
        left=(0, len(headings) - 1),
        is_sentence=True,
        marked="" if dearest is None else dearest.name,
    )


def _bar(before_ns: int, after_ns: int, duration_ns: int, width: int) -> str:
    """A bar that begins where that of the line before ended; below zero it goes back."""
    begin, end = (min(width, max(0, round(width * at / duration_ns))) for at in (before_ns, after_ns))
    if end < begin:
        return " " * end + "<" * (begin - end)
    if end == begin:
        return " " * min(begin, width - 1) + "|"
    return " " * begin + "#" * (end - begin)


def _details(mean: MeanWaterfall) -> list[str]:
    details = []
    for line in mean.lines:
        if (
            line.key in _WITH_PARTS
            and line.ns
            and line.parts
            and (line.key != "idle.other" or line.share >= _LEAST_OTHER)
        ):
            parts = ", ".join(f"{name} {format_ms(ns)} ms" for name, ns in [*line.parts.items()][:4])
            more = f"; {_of_traffic(mean.traffic)}" if line.key == "memory" and mean.traffic is not None else ""
            details.append(f"{line.name}: {parts}{more}.")
    return details


def _of_traffic(traffic: OperandTraffic) -> str:
    """Bytes beside the time that they take: "their operands are 3.1 GB, 0.58 ms at 5.3 TB/s"."""
    text = (
        f"their operands are {format_traffic(traffic.num_bytes)}"
        if traffic.known_ns
        else "how much they moved is not known"
    )
    if traffic.known_ns and traffic.at_bandwidth_ns is not None and traffic.bytes_per_s is not None:
        text += f", {format_ms(traffic.at_bandwidth_ns)} ms at {traffic.bytes_per_s / 1e12:,.3g} TB/s"
    if 0 < traffic.known_ns < _NEARLY_ALL * traffic.all_ns:
        text += f" (the operands of {format_ms(traffic.known_ns)} ms are known)"
    if traffic.implausible_ns > (1 - _NEARLY_ALL) * traffic.all_ns:
        text += f"; in {format_ms(traffic.implausible_ns)} ms operators read an unknown part of their operands"
    return text


def _of_ranks(explanation: JobExplanation, shown: StepWaterfall) -> list[str]:
    return [
        f"{wait.sentence()}."
        for wait in explanation.waited_for
        if wait.step == shown.step and wait.wait_ns >= _LEAST_WAIT * shown.duration_ns
    ]


def _findings(findings: Sequence[Finding], *, markdown: bool) -> str:
    """List what to do first, the largest first: what each costs, what was seen, the likely cause, what to try."""
    lines = ["**What to do first**", ""] if markdown else ["What to do first"]
    for number, finding in enumerate(findings, start=1):
        title = f"{finding.id}: {finding.extent}"
        if finding.mfu_from is not None and finding.mfu_to is not None:
            before, after = format_share(finding.mfu_from), format_share(finding.mfu_to)
            title += f", MFU {before} -> {after}" if before != after else ""
        texts = [_sentence(finding.seen), f"Likely cause: {finding.cause}", f"Try: {finding.next}"]
        if markdown:
            lines.append(f"{number}. **{markdown_text(title)}.** {markdown_text(' '.join(texts))}")
        else:
            lines += ["", f"{number}. {title}", *map(printable, texts)]
    return "\n".join(lines) if markdown else render_lines(lines)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _breakdown(rows: Sequence[BreakdownRow], by: By, shown: StepWaterfall) -> ReportSection:
    *running, idle = rows
    headings = [by, "ms", "share"]
    if by == "attention":
        headings += ["FLOPs", "GFLOP/s"]
    else:
        headings += [*(phase.value for phase in _PHASES), "GFLOP/s" if by == "component" else "other"]
    groups = _layers_of_one_kind(running) if by == "module" else [(row.name, [row]) for row in running]
    cells = [_row(_shortened(name, by), layers, by, shown) for name, layers in groups[:_MOST_ROWS]]
    if groups[_MOST_ROWS:]:
        more = [row for _, layers in groups[_MOST_ROWS:] for row in layers]
        cells.append(_row(f"{len(more)} more ({Argument('to_dict')} has all)", more, by, shown))
    nothing = [""] * (len(headings) - 3)
    cells.append([idle.name, format_ms(idle.ns), format_share(idle.ns / shown.duration_ns), *nothing])
    footer = ["the step", format_ms(shown.duration_ns), format_share(1.0), *nothing]
    return ReportSection("", headings, cells, footer=footer, points=_about(rows, by))


def _layers_of_one_kind(rows: Sequence[BreakdownRow]) -> list[tuple[str, list[BreakdownRow]]]:
    """Join modules that differ in their numbers alone, where there are too many to show each; the dearest first."""
    if len(rows) <= _MOST_ROWS:
        return [(row.name, [row]) for row in rows]
    kinds: dict[str, list[BreakdownRow]] = {}
    for row in rows:
        kinds.setdefault(kind_of_module(row.name), []).append(row)
    by_time = sorted(kinds.items(), key=lambda kind: -sum(row.ns for row in kind[1]))
    return [(f"{name} ({len(layers)})" if len(layers) > 1 else layers[0].name, layers) for name, layers in by_time]


def _gemms(rows: Sequence[GemmRow], shown: StepWaterfall) -> ReportSection:
    headings = ["product, MxNxK", "dtype", "calls", "ms", "share", "work", "rate", "of ceiling"]
    sized = [row for row in rows if row.product is not None]
    cells = [_gemm(row, shown) for row in sized[:_MOST_ROWS]]
    left_out = sum(row.ns for row in sized[_MOST_ROWS:])
    if left_out:
        name = f"{len(sized) - _MOST_ROWS} more ({Argument('to_dict')} has all)"
        cells.append([name, "", "", format_ms(left_out), format_share(left_out / shown.duration_ns), "", "", ""])
    cells += [_gemm(row, shown) for row in rows if row.product is None]
    ns = sum(row.ns for row in rows)
    footer = ["all products", "", "", format_ms(ns), format_share(ns / shown.duration_ns), "", "", ""]
    return ReportSection("", headings, cells, footer=footer, left=(0, 1))


def _gemm(row: GemmRow, shown: StepWaterfall) -> list[str]:
    time = [format_ms(row.ns), format_share(row.ns / shown.duration_ns)]
    if row.product is None or row.flops_per_s is None:
        return [row.name, "", "", *time, "", "", ""]
    work = [format_flops(row.product.flops * row.calls), format_rate(row.flops_per_s)]
    share = "-" if row.of_ceiling is None else format_share(row.of_ceiling)
    return [row.name, row.product.dtype, f"{row.calls:,}", *time, *work, share]


def _row(name: str, rows: Sequence[BreakdownRow], by: By, shown: StepWaterfall) -> list[str]:
    ns = sum(row.ns for row in rows)
    cells = [name, format_ms(ns), format_share(ns / shown.duration_ns)]
    if by == "attention":
        return [*cells, *_flops(rows)]
    phases = [sum(row.by_phase.get(phase, 0) for row in rows) for phase in _PHASES]
    return [*cells, *map(format_ms, phases), _flops(rows)[1] if by == "component" else format_ms(ns - sum(phases))]


def _flops(rows: Sequence[BreakdownRow]) -> tuple[str, str]:
    """FLOPs of rows, and their rate while matmul-class kernels ran; "" if some are unknown."""
    flops, matmul_ns = sum(row.flops or 0 for row in rows), sum(row.matmul_ns for row in rows)
    if not flops or any(row.matmul_ns and row.flops is None for row in rows):
        return "", ""
    return format_flops(flops), f"{flops / matmul_ns:,.1f}" if matmul_ns else ""


def _about(rows: Sequence[BreakdownRow], by: By) -> list[str]:
    if by == "component":
        return [
            f"attributed: {100 * attributed_share(rows):.2f} % of the time in which something ran, to components and "
            "to named activities, which stand in brackets."
        ]
    if by == "attention":
        layers = [row for row in rows if row.name not in (NO_ATTENTION, NO_KERNEL)]
        flops, rate = _flops(layers)
        work = f" for {flops} by the cost model ({rate} GFLOP/s)" if rate else ""
        return [
            f"attention of packs in layers: {len(layers)} took {format_ms(sum(row.ns for row in layers))} ms{work}."
        ]
    return []


def _shortened(name: str, by: By) -> str:
    """A name that leaves room for the numbers: the end of a module's path, the beginning of a kernel's name."""
    screen = width_of(sys.stdout)
    longest = _LONGEST_NAME if screen is None else max(screen - _BESIDE_NAMES.get(by, _BESIDE_OTHERS), 18)
    name = readable_name(name) if by == "kernel" else name
    if len(name) <= longest:
        return name
    return f"{name[: longest - 3]}..." if by == "kernel" else f"...{name[3 - longest :]}"
