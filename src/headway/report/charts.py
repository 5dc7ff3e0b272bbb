"""Lines, bars, histograms and heat strips as SVG: pure functions from numbers to text, the same for the same numbers.

Colours are CSS variables of the page (`headway.report.page`), so that light and dark both work. A chart is whole
without a script; beside each line stand its numbers, which the page's own script reads to zoom and smooth.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import numpy as np

from headway.report.format import format_duration, format_rounded, format_share
from headway.report.svg import (
    AXES,
    COLOURS,
    NAMES,
    PLOT,
    WIDE,
    Scale,
    chart,
    fixed,
    name_room,
    percent,
    safe,
    shortened_label,
    stretched,
    text_element,
    x_axis,
    y_axis,
)

_VALUE = 88  # room of a bar's value, before its name [pixels]
_ROW, _BAR = 36, 12  # height of a bar with its words above, and of the bar alone [pixels]
_STRIP, _STRIP_GAP = 22, 2  # height of a row of a heat strip, and between two [pixels]
_SHADES = 20  # shades of a heat strip; neighbouring cells of one shade are drawn as one
_MOST_CELLS = 128  # most cells of a row; a cell of a longer row is the largest of its bucket

_Format = Callable[[float], str]


def bar_chart(
    title: str, bars: Sequence[tuple[str, float]], *, form: _Format, stacked: bool = False, kinds: Sequence[int] = ()
) -> str:
    """Draw named values as horizontal bars below their names; stacked ones begin where the one before ends.

    Args:
        title: what is drawn; escaped.
        bars: name and value of each, not below 0.
        form: a value with its unit.
        stacked: the bars are parts of their sum, as of a waterfall.
        kinds: which kind each bar is of, from 0, where they are of several; a kind has a colour.

    Raises:
        ValueError: there is no bar, or a value is below 0 or not finite.
    """
    if not bars or not all(math.isfinite(value) and value >= 0 for _, value in bars):
        raise ValueError(f"bars need finite values from 0 on: {[*bars]}.")
    total = (sum if stacked else max)(value for _, value in bars) or 1.0
    drawn, before = [], 0.0
    for row, (name, value) in enumerate(bars):
        y = row * _ROW
        # Value and name stand side by side above the bar, so that a narrow screen has room for all three.
        drawn.append(text_element(str(_VALUE - 8), y + 14, form(value), "end"))
        drawn.append(text_element(str(_VALUE), y + 14, shortened_label(name)))
        colour = COLOURS[row % len(COLOURS) if stacked else kinds[row] if kinds else 0]
        place = f'x="{percent(before / total)}" y="{y + 19}" width="{percent(value / total)}" height="{_BAR}"'
        drawn.append(f'<rect {place} fill="var(--c{colour})"/>')
        before += value if stacked else 0.0
    description = "; ".join(f"{name}: {form(value)}" for name, value in bars)
    return chart(title, description, drawn, len(bars) * _ROW)


def histogram(
    title: str,
    values: Sequence[float],
    *,
    form: _Format,
    num_bins: int = 30,
    shares: Sequence[float] | None = None,
) -> str:
    """Draw how often values come: bins of equal width from the smallest to the largest.

    Args:
        title: what is drawn; escaped.
        values: finite ones are counted.
        form: a value with its unit.
        num_bins: how many bins.
        shares: what each value counts for, a fraction; 1 each if None.

    Raises:
        ValueError: no value is finite.
    """
    numbers = np.asarray(values, float)
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        raise ValueError("a histogram needs a finite value.")
    weights = None if shares is None else np.asarray(shares, float)[np.isfinite(numbers)]
    counts, edges = np.histogram(finite, num_bins, weights=weights)
    y_of, left = y_axis(0.0, float(counts.max()), (lambda count: f"{count:g}") if shares is None else format_share)
    x_of, below = x_axis(float(edges[0]), float(edges[-1]), "", form)
    drawn = [left, below]
    for count, (start, end) in zip(counts, pairwise(edges), strict=True):
        x, y = x_of(float(start)), y_of(float(count))
        # A gap of a tenth between two bins, so that each is seen.
        place = f'x="{percent(x)}" y="{fixed(y)}" width="{percent(0.9 * (x_of(float(end)) - x))}"'
        drawn.append(f'<rect {place} height="{fixed(PLOT - y)}" fill="var(--c0)"/>')
    description = f"{len(finite)} values from {form(edges[0])} to {form(edges[-1])}."
    return chart(title, description, drawn, PLOT, AXES)


def heat_strip(title: str, rows: Sequence[tuple[str, Sequence[float | None]]], *, form: _Format) -> str:
    """Draw rows of cells, darker where the value is larger; of a long row, each cell is the largest of its bucket.

    Args:
        title: what is drawn; escaped.
        rows: name and values of each; None leaves a cell empty.
        form: a value with its unit.

    Raises:
        ValueError: no value is finite.
    """
    finite = [value for _, row in rows for value in row if value is not None and math.isfinite(value)]
    if not finite:
        raise ValueError("a heat strip needs a finite value.")
    low, high = min(finite), max(finite)
    names, drawn = [], []
    for line, (name, row) in enumerate(rows):
        y = line * (_STRIP + _STRIP_GAP)
        names.append(text_element("0", y + 15, shortened_label(name, 16), "end", dx=-8))
        cells = [[value for value in row[part.start : part.stop] if value is not None and math.isfinite(value)]
                 for part in buckets(len(row), _MOST_CELLS)]  # fmt: skip
        shades = [round(_SHADES * (max(cell) - low) / ((high - low) or 1.0)) if cell else None for cell in cells]
        # Cells of one shade are one path, and those side by side one stroke of it.
        place, width = 0, WIDE / max(1, len(cells))
        by_shade: dict[int, list[str]] = {}
        for shade, alike in groupby(shades):
            count = len([*alike])
            if shade is not None:
                stroke = f"M{fixed(width * place)} {_STRIP // 2}h{fixed(width * count)}"
                by_shade.setdefault(shade, []).append(stroke)
            place += count
        drawn.append(f'<g stroke="var(--c0)" stroke-width="{_STRIP}" transform="translate(0 {y})">')
        for shade, parts in sorted(by_shade.items()):
            opacity = fixed(0.12 + 0.88 * shade / _SHADES)
            drawn.append(f'<path d="{"".join(parts)}" stroke-opacity="{opacity}"/>')
        drawn.append("</g>")
    height = len(rows) * (_STRIP + _STRIP_GAP)
    description = f"{len(rows)} rows, from {form(low)} (light) to {form(high)} (full colour)."
    return chart(title, description, [*names, stretched(drawn, height)], height, NAMES)


def buckets(length: int, count: int) -> list[slice]:
    """Divide a series into so many parts, or into its values where it has fewer."""
    count = min(length, count)
    return [slice(length * i // count, length * (i + 1) // count) for i in range(count)]


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
    """Draw lines over one axis, each in its colour with its name; beside each its numbers, for the page's script.

    A long line alone has a band: the 5th to 95th percentile of each bucket.

    Args:
        title: what is drawn; escaped.
        lines: at least one.
        form: how a value reads, a name in `FORMS`.
        x_name: unit of the steps.
        marks: what happened; outside of the steps none is drawn.
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
