"""Lines and histograms as SVG: pure functions from numbers to text, the same for the same numbers.

Colours are CSS variables of the page (`headway.report.page`), so that light and dark both work. A chart is whole
without a script; beside each line stand its values in words, which the page's own script shows under the pointer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, pairwise
from typing import Literal, NamedTuple

import numpy as np

from headway.report.format import format_compact, format_duration, format_rounded, format_share
from headway.report.svg import (
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
    ticks,
    x_axis,
    y_axis,
)

_Format = Callable[[float], str]


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
    y_of, left = y_axis(0.0, float(counts.max()), (lambda count: f"{count:.0f}") if shares is None else format_share)
    x_of, below = x_axis(float(edges[0]), float(edges[-1]), form)
    drawn = [left, below]
    for count, (start, end) in zip(counts, pairwise(edges), strict=True):
        x, y = x_of(float(start)), y_of(float(count))
        # A gap of a tenth between two bins, so that each is seen.
        place = f'x="{percent(x)}" y="{fixed(y)}" width="{percent(0.9 * (x_of(float(end)) - x))}"'
        drawn.append(f'<rect {place} height="{fixed(PLOT - y)}" fill="var(--a)"/>')
    description = f"{len(finite)} values from {form(edges[0])} to {form(edges[-1])}."
    return chart(title, description, drawn)


def buckets(length: int, count: int) -> list[slice]:
    """Divide a series into so many parts, or into its values where it has fewer."""
    count = min(length, count)
    return [slice(length * i // count, length * (i + 1) // count) for i in range(count)]


NUM_BUCKETS = 150  # buckets of a long series; each keeps its smallest and its largest value
_NUM_READ = 80  # buckets whose mean is told under the pointer
_FEWEST = 40  # values of a line that is smoothed
_PARTS = 40  # a smoothed value is the mean of so manieth part of the line around it
_MANY = 20  # times the smallest value, from which on a linear axis hides what small ones do
_USUAL = (1, 99)  # percentiles of single values between which an axis shows them all
_MOST_MARKS = 100  # most marks that are drawn
_MOST_NAMED = 8  # marks that are named in words
_NEAR = 0.05  # part of an axis, within which it begins at zero
_LETTER = 6.5  # width of a letter [pixels]
_UP = 10  # units of a curve's height in a pixel
_COLOURS = ("--a", "--b", "--p2", "--p4", "--p3", "--soft")  # lines' colours; from the seventh on they come again


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _duration_tick(seconds: float, high: float) -> str:
    """A duration in the unit that suits the highest of its axis."""
    unit, scale = next(
        (unit, scale) for least, unit, scale in (
            (10800.0, "h", 3600.0), (180.0, "min", 60.0), (1.0, "s", 1.0), (1e-3, "ms", 1e-3), (0.0, "us", 1e-6)
        ) if high >= least
    )  # fmt: skip
    return f"{seconds / scale:.3g} {unit}"


Form = Literal["plain", "share", "count", "duration"]
"""Formats of the values of a line."""

FORMS: Mapping[Form, _Format] = {
    "plain": _plain,
    "share": format_share,
    "count": format_rounded,
    "duration": format_duration,
}
"""A value with its unit."""
_TICKS: Mapping[Form, Callable[[float, float], str]] = {
    "plain": lambda value, _: _plain(value),
    "share": lambda share, _: f"{100 * share:.3g} %",
    "count": lambda count, _: format_compact(count),
    "duration": _duration_tick,
}


class DrawnLine(NamedTuple):
    """Values over places that ascend."""

    name: str  # name of the line, a short word; "" where a chart has one line
    steps: "Sequence[float] | np.ndarray"  # places of the values, ascending
    values: "Sequence[float | None] | np.ndarray"  # values at these places; None or one that is not finite leaves a gap


class ChartMark(NamedTuple):
    """A restart of a run, or the beginning of another stage: a thin rule with its name."""

    step: float  # step; between it and the next where it came after the step
    name: str = ""  # name at the rule's upper end; "" for none


def lines_chart(
    title: str,
    lines: Sequence[DrawnLine],
    *,
    form: Form,
    x_name: str = "step",
    marks: Sequence[ChartMark] = (),
    dots: Sequence[DrawnLine] = (),
    by_ratio: bool = False,
    is_noisy: bool = False,
) -> str:
    """Draw lines over one axis, each in its colour, and dots that belong to them.

    Args:
        title: what is drawn; escaped.
        lines: at least one.
        form: how a value reads, a name in `FORMS`; values that are no plain numbers begin at zero.
        x_name: unit of the steps.
        marks: what happened; outside of the steps none is drawn.
        dots: further values over the steps, such as evaluations, of each line in turn.
        by_ratio: whether values that are all above 0 and span more than a factor of 20 have a logarithmic axis.
        is_noisy: whether a line of many values is drawn smoothed, over its values in a faint line.

    Raises:
        ValueError: a line has no finite value, or not as many steps as values.
    """
    series, points = [_numbers(line) for line in lines], [_numbers(line) for line in dots]
    means = [_smoothed(ys) if is_noisy and len(ys) >= _FEWEST else ys for _, _, ys in series]
    begin, end = min(float(xs[0]) for _, xs, _ in series), max(float(xs[-1]) for _, xs, _ in series)
    ends = (0.0 if 0 < begin < _NEAR * end else begin), end
    y_of, left = _values_axis([*means, *(ys for *_, ys in points)], [ys for *_, ys in series], form, by_ratio=by_ratio)
    x_of, below = x_axis(*ends)
    inside = [mark for mark in marks if ends[0] <= mark.step <= ends[1]]
    # Faint values lie below all lines, and dots above them.
    faint, curves, above, texts = list[str](), list[str](), list[str](), list[str]()
    for colour, (name, xs, ys), mean in zip(cycle(_COLOURS), series, means, strict=False):
        stroke = f'stroke="var({colour})"' + (' stroke-dasharray="6 4"' if curves else "")
        if mean is not ys:
            faint.append(f'<path class="faint" stroke="var({colour})" d="{_path(reduced(xs, ys), x_of, y_of)}"/>')
        picked = np.unique(np.linspace(0, len(xs) - 1, 2 * NUM_BUCKETS).round().astype(int))
        path = _path(reduced(xs, ys) if mean is ys else [*zip(xs[picked], mean[picked], strict=True)], x_of, y_of)
        data = f'data-name="{safe(name)}" {_readings(xs, ys, x_of, FORMS[form])}'
        curves.append(f'<path class="line" {stroke} d="{path}" {data}/>')
        texts.append(_in_words(name, xs, ys, x_name, FORMS[form]))
    for colour, (name, xs, ys) in zip(cycle(_COLOURS) if len(series) > 1 else ["--warn"], points, strict=False):
        path = "".join(_path([point], x_of, y_of) for point in zip(xs, ys, strict=True))
        above.append(f'<path class="ring" stroke="var({colour})" d="{path}"/><path class="hole" d="{path}"/>')
        texts.append(_in_words(name, xs, ys, x_name, FORMS[form]))
    texts += [f"Marked: {_marks_in_words(inside)}."] if inside else []
    parts = [left, below, *_drawn_marks(inside, x_of), stretched([*faint, *curves], PLOT, _UP)]
    parts += [stretched(above, PLOT, _UP, "curves dots")] if above else []
    parts += _line_names([name for name, *_ in series]) if len(series) > 1 else []
    return chart(title, " ".join(texts), parts, f' data-of="{safe(x_name)}"')


def _line_names(names: Sequence[str]) -> list[str]:
    """Names of lines behind their colours, above the plot on its right."""
    drawn, room = [], 0.0
    for name, colour in [*zip(names, cycle(_COLOURS), strict=False)][::-1]:
        room += 26 + _LETTER * len(name)
        swatch = f'<rect x="100%" y="-10" width="12" height="4" fill="var({colour})"/>'
        drawn.append(f'<g transform="translate({-room:.0f} 0)">{swatch}{text_element("100%", -5, name, dx=16)}</g>')
    return drawn


def _numbers(line: DrawnLine) -> "tuple[str, np.ndarray, np.ndarray]":
    xs = np.asarray(line.steps, float)
    ys = np.array([math.nan if value is None else value for value in line.values], float)
    if len(xs) != len(ys) or not np.isfinite(ys).any():
        raise ValueError(f"{len(xs)} steps and {np.isfinite(ys).sum()} finite values of {len(ys)} make no line.")
    return line.name, xs, ys


def _smoothed(values: "np.ndarray", passes: int = 2) -> "np.ndarray":
    """The mean of the finite values around each, taken twice so that a single value leaves no step; NaN without any."""
    half = max(1, len(values) // (4 * _PARTS))
    finite = np.isfinite(values)
    sums, counts = (np.concatenate([[0.0], np.cumsum(np.where(finite, part, 0.0))]) for part in (values, 1.0))
    places = np.arange(len(values))
    begin, end = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    count = counts[end] - counts[begin]
    means = np.where(count > 0, (sums[end] - sums[begin]) / np.maximum(count, 1.0), math.nan)
    return means if passes == 1 else _smoothed(means, passes - 1)


def _values_axis(
    lines: "Sequence[np.ndarray]", singles: "Sequence[np.ndarray]", form: Form, *, by_ratio: bool
) -> tuple[Scale, str]:
    """The axis of values that shows all of some lines, and of single values all but the rarest."""
    ends = [np.percentile(_finite(ys), _USUAL) for ys in singles]
    shown = np.concatenate([*map(_finite, lines), *ends])
    low, high = float(shown.min()), float(shown.max())

    def write(value: float) -> str:
        return _TICKS[form](value, high)

    if by_ratio and 0 < low < high / _MANY:
        return y_axis(low, high, write, by_ratio=True)
    low, high = (low if form == "plain" else min(low, 0.0)), max(high, low)
    if high > low:  # a round number at either end
        marks = ticks(low, high, 4)
        step = marks[1] - marks[0] if len(marks) > 1 else high - low
        low, high = step * math.floor(low / step + 1e-6), step * math.ceil(high / step - 1e-6)
    return y_axis(low, high, write)


def _path(points: "Sequence[tuple[float, float]]", x_of: Scale, y_of: Scale) -> str:
    """The path through points, with gaps where one is not finite; a point between two gaps is a dot."""
    drawn: list[str] = []
    before = None
    for x, y in points:
        up = y_of(y) if math.isfinite(y) else math.nan
        if not math.isfinite(up):
            before = None
            continue
        place = round(WIDE * x_of(x)), round(_UP * up)
        drawn.append(f"M{place[0]} {place[1]}h0" if before is None
                     else f"l{place[0] - before[0]} {place[1] - before[1]}")  # fmt: skip
        before = place
    return "".join(drawn)


def _readings(xs: "np.ndarray", ys: "np.ndarray", x_of: Scale, write: _Format) -> str:
    """Values that the page's script shows under the pointer: places [1/1000 of the plot], steps and values in words."""
    parts = [part for part in buckets(len(xs), _NUM_READ) if np.isfinite(ys[part]).any()]
    places = " ".join(f"{1000 * x_of(float(xs[part].mean())):.0f}" for part in parts)
    steps = (f"{xs[part][0]:,.10g}" + (f" to {xs[part][-1]:,.10g}" if len(xs[part]) > 1 else "") for part in parts)
    values = (write(float(_finite(ys[part]).mean())) for part in parts)
    return f'data-at="{places}" data-steps="{"|".join(steps)}" data-values="{"|".join(values)}"'


def _in_words(name: str, xs: "np.ndarray", ys: "np.ndarray", x_name: str, write: _Format) -> str:
    finite = _finite(ys)
    least, most = write(float(finite.min())), write(float(finite.max()))
    whose = f"{name}: " if name else ""
    return f"{whose}{len(finite):,} values over {x_name} {xs[0]:,.10g} to {xs[-1]:,.10g}, from {least} to {most}."


def _drawn_marks(marks: Sequence[ChartMark], x_of: Scale) -> list[str]:
    drawn, named_until = [], -math.inf
    for mark in sorted(marks)[:: max(1, math.ceil(len(marks) / _MOST_MARKS))]:
        x = percent(x_of(mark.step))
        drawn.append(f'<line class="mark" x1="{x}" x2="{x}" y2="{PLOT}"/>')
        # A name that would run into the one before it, or over the edge, on a narrow screen is not drawn.
        begin, end, anchor = name_room(x_of(mark.step), mark.name)
        if mark.name and begin > named_until:
            drawn.append(text_element(x, -5, mark.name, anchor))
            named_until = end
    return drawn


def _marks_in_words(marks: Sequence[ChartMark]) -> str:
    words = [f"{mark.name or 'a mark'} at {mark.step:,.10g}" for mark in marks[:_MOST_NAMED]]
    return ", ".join(words) + (f" and {len(marks) - _MOST_NAMED} more" if len(marks) > _MOST_NAMED else "")


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
