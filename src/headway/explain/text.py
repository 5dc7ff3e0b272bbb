"""Waterfalls for people: on a terminal of 80 columns, and as Markdown for an issue or a pull request."""

import sys
from collections.abc import Sequence

from headway.explain.attribute import Phase
from headway.explain.breakdown import BreakdownRow, By, break_down
from headway.explain.waterfall import JobExplanation, StepWaterfall, WaterfallLine
from headway.report import Column, format_share, printable, render_lines, render_table
from headway.report.terminal import coloured, width_of

_BAR = 20  # columns
_MOST_ROWS = 20
_BESIDE_NAMES = 54  # columns that the numbers of a breakdown take
_LONGEST_NAME = 100  # where there is no terminal
_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTED)
_WITH_PARTS = {"matmul", "memory", "idle.sync", "aside"}
_NOT_A_LOSS = {"useful", "matmul"}


def as_text(explanation: JobExplanation, by: By | None = None, *, markdown: bool = False) -> str:
    """Render an explanation: all steps in a line each, and the step of median duration in full.

    Args:
        explanation: at least one step.
        by: add the time by component, module or kernel.
        markdown: tables as Markdown has them, without colour.
    """
    table = _markdown_table if markdown else _plain_table
    waterfalls = explanation.steps
    shown = sorted(waterfalls, key=lambda one: one.duration_ns)[(len(waterfalls) - 1) // 2]
    parts = []
    if len(waterfalls) > 1:
        parts.append(table(*_overview(waterfalls)))
    parts.append(_title(shown, len(waterfalls), markdown=markdown))
    drawn = table(*_waterfall(shown))
    parts.append(drawn if markdown else _with_colour(drawn, _dearest(shown)))
    details = _details(shown)
    if details:
        parts.append(_sentences(details, markdown=markdown))
    if by is not None:
        parts.append(table(*_breakdown(break_down(shown, by), by, shown)))
    if explanation.notes:
        parts.append(_sentences([f"Note: {note}" for note in explanation.notes], markdown=markdown))
    return "\n\n".join(parts)


def _plain_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], footer: Sequence[str] | None) -> str:
    return render_table(columns, rows, footer=footer)


def _markdown_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], footer: Sequence[str] | None) -> str:
    lines = [[column.heading for column in columns], ["---" if c.align == "left" else "---:" for c in columns]]
    lines += [[_markdown_cell(cell) for cell in row] for row in [*rows, *([footer] if footer else [])]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_cell(cell: str) -> str:
    cell = printable(cell).replace("|", "\\|")
    return f"`{cell}`" if cell.startswith((" ", "#", "<", "\\|")) else cell  # a bar keeps its spaces as code


def _sentences(lines: Sequence[str], *, markdown: bool) -> str:
    if markdown:
        return "\n".join(f"* {printable(line)}" for line in lines)
    return render_lines([printable(line) for line in lines])


def _title(shown: StepWaterfall, count: int, *, markdown: bool) -> str:
    trace = shown.measured[0].trace
    said = f"step {shown.step}" if trace.steps else "the whole trace"
    said += f" of rank {shown.rank} on {trace.device_name}: {_ms(shown.duration_ns)} ms"
    if shown.mfu is not None:
        said += f", MFU {format_share(shown.mfu)}"
    if count > 1:
        said += f" (the median of {count}; --step and --rank show another)"
    said = printable(said[0].upper() + said[1:])
    return f"**{said}**" if markdown else render_lines([said])


def _overview(waterfalls: Sequence[StepWaterfall]) -> tuple[list[Column], list[list[str]], None]:
    has_mfu = any(one.mfu is not None for one in waterfalls)
    columns = [Column("step"), Column("rank"), Column("ms"), *([Column("MFU")] if has_mfu else [])]
    columns += [Column("largest loss", "left"), Column("share")]
    rows = []
    for one in waterfalls:
        dearest = _dearest(one)
        mfu = [] if not has_mfu else ["-" if one.mfu is None else format_share(one.mfu)]
        loss = ["-", "-"] if dearest is None else [dearest.name, format_share(dearest.share)]
        rows.append([str(one.step), str(one.rank), _ms(one.duration_ns), *mfu, *loss])
    return columns, rows, None


def _dearest(waterfall: StepWaterfall) -> WaterfallLine | None:
    losses = [line for line in waterfall.lines if line.ns > 0 and line.key not in _NOT_A_LOSS]
    return max(losses, key=lambda line: line.ns, default=None)


def _waterfall(shown: StepWaterfall) -> tuple[list[Column], list[list[str]], list[str]]:
    has_mfu = shown.mfu is not None
    columns = [Column("where the time went", "left"), Column("ms"), Column("share")]
    columns += [*([Column("MFU without")] if has_mfu else []), Column("", "left")]
    rows = []
    before_ns = 0
    for line in shown.lines:
        after_ns = before_ns + line.ns
        if line.ns:
            mfu = [] if not has_mfu else ["" if line.mfu_to is None else format_share(line.mfu_to)]
            bar = _bar(before_ns, after_ns, shown.duration_ns)
            rows.append([line.name, _ms(line.ns), format_share(line.share), *mfu, bar])
        before_ns = after_ns
    return columns, rows, ["the step", _ms(shown.duration_ns), format_share(1.0), *([""] if has_mfu else []), ""]


def _bar(before_ns: int, after_ns: int, duration_ns: int) -> str:
    """A bar that begins where that of the line before ended; below zero it goes back."""
    begin, end = (min(_BAR, max(0, round(_BAR * at / duration_ns))) for at in (before_ns, after_ns))
    if end < begin:
        return " " * end + "<" * (begin - end)
    if end == begin:
        return " " * min(begin, _BAR - 1) + "|"
    return " " * begin + "#" * (end - begin)


def _details(shown: StepWaterfall) -> list[str]:
    said = []
    for line in shown.lines:
        if line.key in _WITH_PARTS and line.ns and line.parts:
            parts = ", ".join(f"{name} {_ms(ns)} ms" for name, ns in [*line.parts.items()][:4])
            said.append(f"{line.name}: {parts}.")
    return said


def _breakdown(
    shares: Sequence[BreakdownRow], by: By, shown: StepWaterfall
) -> tuple[list[Column], list[list[str]], list[str]]:
    *running, idle = shares
    columns = [Column(by, "left"), Column("ms"), Column("share")]
    columns += [*(Column(phase.value) for phase in _PHASES), Column("other")]
    rows = [_row(_shortened(share.name, by), [share], shown) for share in running[:_MOST_ROWS]]
    if running[_MOST_ROWS:]:
        rows.append(_row(f"{len(running) - _MOST_ROWS} more (--json has all)", running[_MOST_ROWS:], shown))
    rows.append([idle.name, _ms(idle.ns), format_share(idle.ns / shown.duration_ns), "", "", "", ""])
    return columns, rows, ["the step", _ms(shown.duration_ns), format_share(1.0), "", "", "", ""]


def _row(name: str, shares: Sequence[BreakdownRow], shown: StepWaterfall) -> list[str]:
    ns = sum(share.ns for share in shares)
    phases = [sum(share.by_phase.get(phase, 0) for share in shares) for phase in _PHASES]
    return [name, _ms(ns), format_share(ns / shown.duration_ns), *map(_ms, phases), _ms(ns - sum(phases))]


def _shortened(name: str, by: By) -> str:
    """A name that leaves room for the numbers: the end of a module's path, the beginning of a kernel's name."""
    screen = width_of(sys.stdout)
    longest = _LONGEST_NAME if screen is None else max(screen - _BESIDE_NAMES, 18)
    name = name.removeprefix("void ")
    if len(name) <= longest:
        return name
    return f"{name[: longest - 3]}..." if by == "kernel" else f"...{name[3 - longest :]}"


def _with_colour(drawn: str, dearest: WaterfallLine | None) -> str:
    if dearest is None:
        return drawn
    return "\n".join(
        coloured(line, "yellow", sys.stdout) if line.startswith(f"{dearest.name} ") else line
        for line in drawn.split("\n")
    )


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.2f}"
