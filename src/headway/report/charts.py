"""Charts of lines as SVG: pure functions from numbers to text, the same bytes for the same numbers.

Colours are CSS variables of the page (`headway.report.page`), so that light and dark both work. A chart is whole
without a script; beside each line stand its numbers, which the page's own script reads to zoom and smooth.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from headway.report.bars import buckets
from headway.report.format import format_duration, format_rounded, format_share
from headway.report.svg import (
    AXES,
    COLOURS,
    PLOT,
    WIDE,
    Scale,
    chart,
    fixed,
    name_room,
    percent,
    safe,
    stretched,
    text_element,
    x_axis,
    y_axis,
)

NUM_BUCKETS = 200  # buckets of a long series; each keeps its smallest and its largest value
_MANY = 20  # times the smallest value, from which on a linear axis hides what small ones do
_MOST_WHOLE = 1e15  # larger places are told to six digits
_MOST_MARKS = 100  # most marks of a kind that are drawn
_MOST_NAMED = 8  # marks of a kind that are named in words
_GAP = "-"  # a value that is missing, as the script reads it
_MARK_WORDS = {
    "restart": ("Went on after step", "Restarts after steps"),
    "stage": ("A stage of the data begins with step", "Stages of the data begin with steps"),
    "evaluation": ("Evaluation after step", "Evaluations after steps"),
}


def _plain(value: float) -> str:
    return f"{value:.4g}"


Form = Literal["plain", "share", "count", "duration"]
"""Formats of the values of a line; the page's script has the same under these names."""

FORMS: Mapping[Form, Callable[[float], str]] = {
    "plain": _plain,
    "share": format_share,
    "count": format_rounded,
    "duration": format_duration,
}
"""A value with its unit."""


class DrawnLine(NamedTuple):
    """Values over places that ascend."""

    name: str  # name of the line, a short word; "" where a chart has one line
    steps: "Sequence[float] | np.ndarray"  # places of the values, ascending
    values: "Sequence[float | None] | np.ndarray"  # values at these places; None or one that is not finite leaves a gap


class ChartMark(NamedTuple):
    """Something that happened at a step of a run."""

    step: float  # step; between it and the next where it came after the step
    # a restart is a dashed line, a stage of the data a dotted one with its name, an evaluation a short one
    kind: Literal["restart", "stage", "evaluation"]
    name: str = ""  # name of a stage; "" else


def line_chart(
    title: str,
    steps: Sequence[float],
    values: Sequence[float | None],
    *,
    form: Form,
    x_name: str = "step",
    marks: Sequence[ChartMark] = (),
) -> str:
    """Draw values over steps; of a long series, the 5th to 95th percentile of each bucket as a band.

    Args:
        title: what is drawn; escaped.
        steps: where each value stands, ascending.
        values: as many; None or one that is not finite leaves a gap.
        form: how a value reads, a name in `FORMS`.
        x_name: unit of the steps.
        marks: what happened; outside of the steps none is drawn.

    Raises:
        ValueError: no value is finite, or there are not as many steps as values.
    """
    return lines_chart(title, [DrawnLine("", steps, values)], form=form, x_name=x_name, marks=marks)


def lines_chart(
    title: str,
    lines: Sequence[DrawnLine],
    *,
    form: Form,
    x_name: str = "step",
    marks: Sequence[ChartMark] = (),
    by_ratio: bool = False,
    detail: int = NUM_BUCKETS,
) -> str:
    """Draw lines over one axis, each in its colour with its name; a line alone has the band of `line_chart`.

    Beside each line stand its numbers, for the page's script.

    Args:
        title: what is drawn; escaped.
        lines: at least one.
        form: how a value reads, a name in `FORMS`.
        x_name: unit of the steps.
        marks: as for `line_chart`.
        by_ratio: whether values that are all above 0 and span more than a factor of 20 have a logarithmic axis.
        detail: buckets of a long series whose numbers the page holds, for the script to zoom into.

    Raises:
        ValueError: a line has no finite value, or not as many steps as values.
    """
    series = [_numbers(line) for line in lines]
    write = FORMS[form]
    low, high = min(float(_finite(ys).min()) for *_, ys in series), max(float(_finite(ys).max()) for *_, ys in series)
    ends = min(float(xs[0]) for _, xs, _ in series), max(float(xs[-1]) for _, xs, _ in series)
    y_of, left = y_axis(low, high, write, by_ratio=by_ratio and 0 < low < high / _MANY)
    x_of, below = x_axis(*ends, x_name, leaves_room=len(series) > 1)
    inside = [mark for mark in marks if ends[0] <= mark.step <= ends[1]]
    # Curves in the order in which they cover each other: the band, then the lines.
    curves, names, texts = [], [], []
    if len(series) == 1 and len(series[0][1]) > 2 * NUM_BUCKETS:
        curves.append(_band(*series[0][1:], x_of, y_of))
    for number, (name, xs, ys) in enumerate(series):
        colour = f"var(--c{COLOURS[number]})"
        curves.append(_line_tag(name, colour, xs, ys, detail))
        curves += _drawn_line([(x_of(x), y_of(y)) for x, y in reduced(xs, ys)], is_dashed=number > 0)
        curves.append("</g>")
        if name:
            names.append(_named_line([line for line, *_ in series[number:]], colour))
        finite = _finite(ys)
        whose = f"{name}: " if name else ""
        least, most = write(float(finite.min())), write(float(finite.max()))
        texts.append(f"{whose}{len(finite)} values over {x_name} {xs[0]:g} to {xs[-1]:g}: from {least} to {most}.")
    described = " ".join([*texts, *_marks_in_words(inside)])
    drawn = [left, below, *_drawn_marks(inside, x_of), stretched(curves, PLOT), *names]
    # Facts of the chart that the script needs beside its lines.
    facts = {"of": x_name, "form": form, "ratio": int(by_ratio), "marks": _marks_as_text(inside)}
    attributes = "".join(f' data-{key}="{safe(str(value))}"' for key, value in facts.items())
    return chart(title, described, drawn, PLOT, AXES, attributes)


def _numbers(line: DrawnLine) -> "tuple[str, np.ndarray, np.ndarray]":
    """Name, steps and values of a line, NaN where a value is missing."""
    xs = np.asarray(line.steps, float)
    ys = np.array([math.nan if value is None else value for value in line.values], float)
    if len(xs) != len(ys) or not np.isfinite(ys).any():
        raise ValueError(f"{len(xs)} steps and {np.isfinite(ys).sum()} finite values of {len(ys)} make no line.")
    return line.name, xs, ys


def _drawn_marks(marks: Sequence[ChartMark], x_of: Scale) -> list[str]:
    """Lines of marks; of a kind that has many, a part evenly chosen."""
    drawn, named_until = [], -math.inf
    for kind in _MARK_WORDS:
        of_kind = [mark for mark in marks if mark.kind == kind]
        for mark in of_kind[:: max(1, math.ceil(len(of_kind) / _MOST_MARKS))]:
            x = percent(x_of(mark.step))
            drawn.append(f'<line class="{kind}" x1="{x}" x2="{x}" y2="{7 if kind == "evaluation" else PLOT}"/>')
            # A name that would run into the one before it, or over the edge, on a narrow screen is not drawn.
            begin, end, anchor = name_room(x_of(mark.step), mark.name)
            if mark.name and begin > named_until:
                drawn.append(text_element(x, -5, mark.name, anchor))
                named_until = end
    return drawn


def _marks_in_words(marks: Sequence[ChartMark]) -> list[str]:
    sentences = []
    for kind, (single, several) in _MARK_WORDS.items():
        of_kind = [f"{mark.step:g}" + (f" ({mark.name})" if mark.name else "") for mark in marks if mark.kind == kind]
        if of_kind:
            more = f" and {len(of_kind) - _MOST_NAMED} more" if len(of_kind) > _MOST_NAMED else ""
            which = ", ".join(of_kind[:_MOST_NAMED])
            sentences.append(f"{single if len(of_kind) == 1 else several} {which}{more}.")
    return sentences


def _marks_as_text(marks: Sequence[ChartMark]) -> str:
    """Marks for the script: step, kind and name of each."""
    return "|".join(f"{mark.step:g} {mark.kind} {mark.name.replace('|', ' ')}" for mark in marks)


def _drawn_line(places: Sequence[tuple[float, float]], *, is_dashed: bool) -> list[str]:
    """A line through places, with gaps where one is not finite; a place between two gaps is a dot."""
    dashed = ' stroke-dasharray="7 3"' if is_dashed else ""  # dashes let two lines that coincide both be seen
    drawn = []
    for piece in _pieces(places):
        if len(piece) == 1:
            x, y = piece[0]
            drawn.append(f'<path class="dot" d="M{fixed(WIDE * x)} {fixed(y)}h0"/>')
        else:
            joined = " ".join(f"{WIDE * x:.0f},{fixed(y)}" for x, y in piece)
            drawn.append(f'<polyline points="{joined}"{dashed}/>')
    return drawn


def _named_line(names: Sequence[str], colour: str) -> str:
    """The first of some names beside its colour, below the chart, with room for more names on its right."""
    room = sum(30 + 7 * len(name) for name in names)
    swatch = f'<rect x="100%" y="{PLOT + 28}" width="14" height="4" fill="{colour}"/>'
    return f'<g transform="translate({10 - room} 0)">{swatch}{text_element("100%", PLOT + 34, names[0], dx=18)}</g>'


def _line_tag(name: str, colour: str, xs: "np.ndarray", ys: "np.ndarray", detail: int) -> str:
    """The opening tag of a line's group, with its numbers as text: steps as differences of whole units, and values.

    Of a long series these are the smallest and the largest value of each bucket, and the mean of each as well.
    """
    points = reduced(xs, ys, detail)
    most = max(abs(x) for x, _ in points) or 1.0
    is_whole = all(x == round(x) for x, _ in points) and most < _MOST_WHOLE
    unit = 1.0 if is_whole else 10.0 ** (math.floor(math.log10(most)) - 5)
    data = {"name": name, "unit": f"{unit:g}", **_as_text(points, unit)}
    if len(xs) > 2 * detail:
        parts = [part for part in buckets(len(xs), detail) if np.isfinite(ys[part]).any()]
        means = [(float(xs[part].mean()), float(np.nanmean(_finite(ys[part])))) for part in parts]
        data |= {f"mean-{key}": text for key, text in _as_text(means, unit).items()}
    return f'<g stroke="{colour}" ' + " ".join(f'data-{key}="{safe(value)}"' for key, value in data.items()) + ">"


def _as_text(points: Sequence[tuple[float, float]], unit: float) -> dict[str, str]:
    places = [round(x / unit) for x, _ in points]
    steps = " ".join(str(after - before) for before, after in pairwise([0, *places]))
    return {"x": steps, "y": " ".join(f"{y:.6g}" if math.isfinite(y) else _GAP for _, y in points)}


def _finite(values: "np.ndarray") -> "np.ndarray":
    return np.asarray(values[np.isfinite(values)])


def reduced(steps: "np.ndarray", values: "np.ndarray", count: int = NUM_BUCKETS) -> list[tuple[float, float]]:
    """The points of a series, in order: all of a short one, else the smallest and the largest of each bucket.

    A bucket without a finite value keeps one that is not, so that the gap is seen.
    """
    if len(steps) <= 2 * count:
        return [(float(x), float(y)) for x, y in zip(steps, values, strict=True)]
    points = []
    for part in buckets(len(steps), count):
        ys = values[part]
        finite = np.flatnonzero(np.isfinite(ys))
        places = sorted({int(finite[ys[finite].argmin()]), int(finite[ys[finite].argmax()])}) if len(finite) else [0]
        points += [(float(steps[part][place]), float(ys[place])) for place in places]
    return points


def _band(xs: "np.ndarray", ys: "np.ndarray", x_of: Scale, y_of: Scale) -> str:
    upper, lower = [], []
    for part in buckets(len(xs), NUM_BUCKETS // 2):  # a band needs fewer than the line's peaks
        finite = ys[part][np.isfinite(ys[part])]
        if len(finite):
            low, high = np.percentile(finite, [5, 95])
            x = f"{WIDE * x_of(float(xs[part].mean())):.0f}"
            upper.append(f"{x},{fixed(y_of(float(high)))}")
            lower.append(f"{x},{fixed(y_of(float(low)))}")
    return f'<polygon points="{" ".join(upper + lower[::-1])}"/>'


def _pieces(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            pieces[-1].append((x, y))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]
