"""The phases of a run's steps on its page: stacked bars over the steps, and a table of the mean step."""

from collections.abc import Sequence
from typing import Any

from headway.explain.explanation import StepWaterfall, mean_of
from headway.explain.phases import ASIDE, PhaseLine, mean_phases, phase_sentences, phase_table
from headway.meter.step_phases import REST
from headway.report import format_duration, format_share
from headway.report.section import ReportSection

WIDTH, HEIGHT = 1000, 160  # of the drawing, which is stretched to its room
_MOST_BARS = 100  # of more steps, each bar is the mean of several
_COLOURS = (0, 2, 3, 4, 5, 7)  # --c0 to --c7 of the page, of phases that the loop names
_COLOUR_OF = {REST: "--c6", ASIDE: "--grid"}
_TITLE = "Phases of a step"


def mean_phase_lines(steps: Sequence[StepWaterfall]) -> tuple[PhaseLine, ...]:
    """Phases of the mean step; none of a loop that names none."""
    return mean_of(steps).phases if any(step.phases for step in steps) else ()


def phase_section(steps: Sequence[StepWaterfall]) -> ReportSection | None:
    """Table of the phases of the mean step, and what each that generates takes at least; None without phases."""
    if not (lines := mean_phase_lines(steps)):
        return None
    columns, rows, total = phase_table(lines, sum(line.ns for line in lines))
    headings = ["phase", "time [ms]", *(column.heading for column in columns[2:])]
    return ReportSection(_TITLE, headings, [*rows, total], " ".join(phase_sentences(lines)))


def phase_chart(steps: Sequence[StepWaterfall]) -> dict[str, Any] | None:
    """Values of the template `phases.html.jinja`: the section's table, and bars over the steps; None without phases."""
    section = phase_section(steps)
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
