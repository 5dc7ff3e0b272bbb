"""Charts as SVG: pure functions from numbers to text, the same bytes for the same numbers.

Colours are CSS variables of the page (`headway.report.page`), so that light and dark both work. No chart has a
script; the page's own shows the values under the pointer (`headway.report.hover`).
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from headway.report.format import format_share, printable

_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 12, 12, 40  # room for ticks and units
_CHARACTER = 7.5  # width of a digit at most
_BAR, _GAP = 22, 8
_VALUE = 90  # room of a bar's value
NUM_BUCKETS = 200  # of a long series: each keeps its smallest and its largest value
_MANY = 20  # times the smallest value, from which on a linear axis hides what small ones do
_SHADES = 20  # of a heat strip; cells side by side of one shade are drawn as one
_COLOURS = (0, 2, 3, 4, 5, 6, 7)  # --c0 to --c7 on the page; --c1 is the band's, too light for a line or bar
_FEW_POWERS = 3  # of ten, up to which an axis has room for ticks between them
_MOST_WHOLE = 1e15  # larger places are told to six digits

Format = Callable[[float], str]


class DrawnLine(NamedTuple):
    """Values over places that ascend.

    Attributes:
        name: whose values, a short word; "" where a chart has one line.
        steps: where each value stands, ascending.
        values: as many; None or one that is not finite leaves a gap.
    """

    name: str
    steps: "Sequence[float] | np.ndarray"
    values: "Sequence[float | None] | np.ndarray"


def line_chart(
    title: str,
    steps: Sequence[float],
    values: Sequence[float | None],
    *,
    form: Format,
    x_name: str = "step",
    marks: Sequence[float] = (),
) -> str:
    """Draw values over steps; of a long series, the 5th to 95th percentile of each bucket as a band.

    Args:
        title: what is drawn; escaped.
        steps: where each value stands, ascending.
        values: as many; None or one that is not finite leaves a gap.
        form: a value with its unit.
        x_name: unit of the steps.
        marks: where a dashed line stands, as at a restart; outside of the steps none.

    Raises:
        ValueError: no value is finite, or there are not as many steps as values.
    """
    return lines_chart(title, [DrawnLine("", steps, values)], form=form, x_name=x_name, marks=marks)


def lines_chart(
    title: str,
    lines: Sequence[DrawnLine],
    *,
    form: Format,
    x_name: str = "step",
    marks: Sequence[float] = (),
    by_ratio: bool = False,
) -> str:
    """Draw lines over one axis, each in its colour with its name; a line alone has the band of `line_chart`.

    Beside each line stand its points as text, for the script of `headway.report.hover`.

    Args:
        title: what is drawn; escaped.
        lines: at least one.
        form: a value with its unit.
        x_name: unit of the steps.
        marks: as for `line_chart`.
        by_ratio: whether values that are all above 0 and span more than a factor of 20 have a logarithmic axis.

    Raises:
        ValueError: a line has no finite value, or not as many steps as values.
    """
    series = [_numbers(line) for line in lines]
    low, high = min(float(_finite(ys).min()) for *_, ys in series), max(float(_finite(ys).max()) for *_, ys in series)
    ends = min(float(xs[0]) for _, xs, _ in series), max(float(xs[-1]) for _, xs, _ in series)
    y_of, y_axis = _ratio_axis(low, high, form) if by_ratio and 0 < low < high / _MANY else _y_axis(low, high, form)
    x_of, x_axis = _x_axis(*ends, x_name, leaves_room=len(series) > 1)
    drawn = [y_axis, x_axis, *(_mark(x_of(mark)) for mark in marks if ends[0] <= mark <= ends[1])]
    if len(series) == 1 and len(series[0][1]) > 2 * NUM_BUCKETS:
        drawn.append(_band(*series[0][1:], x_of, y_of))
    texts = []
    for number, (name, xs, ys) in enumerate(series):
        points, colour = reduced(xs, ys), f"var(--c{_COLOURS[number]})"
        drawn.append(_hovered(name, points, ends, x_name, form))
        drawn += _drawn_line([(x_of(x), y_of(y)) for x, y in points], colour, is_dashed=number > 0)
        drawn.append("</g>")
        if name:
            drawn.append(_named_line([line for line, *_ in series[number:]], colour))
        finite = _finite(ys)
        whose = f"{name}: " if name else ""
        least, most = form(float(finite.min())), form(float(finite.max()))
        texts.append(f"{whose}{len(finite)} values over {x_name} {xs[0]:g} to {xs[-1]:g}: from {least} to {most}.")
    return _svg(title, " ".join(texts), drawn, _HEIGHT)


def _numbers(line: DrawnLine) -> "tuple[str, np.ndarray, np.ndarray]":
    """Name, steps and values of a line, NaN where a value is missing."""
    xs = np.asarray(line.steps, float)
    ys = np.array([math.nan if value is None else value for value in line.values], float)
    if len(xs) != len(ys) or not np.isfinite(ys).any():
        raise ValueError(f"{len(xs)} steps and {np.isfinite(ys).sum()} finite values of {len(ys)} make no line.")
    return line.name, xs, ys


def _mark(x: float) -> str:
    """A dashed line from top to bottom."""
    ends = f'x1="{_fixed(x)}" x2="{_fixed(x)}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"'
    return f'<line {ends} stroke="var(--c2)" stroke-dasharray="4 3"/>'


def _drawn_line(places: Sequence[tuple[float, float]], colour: str, *, is_dashed: bool) -> list[str]:
    """A line through places, with gaps where one is not finite; a place between two gaps is a dot."""
    drawn = []
    dashed = ' stroke-dasharray="7 3"' if is_dashed else ""  # where two lines coincide, both are seen
    for piece in _pieces(places):
        if len(piece) == 1:
            x, y = piece[0]
            drawn.append(f'<circle cx="{_fixed(x)}" cy="{_fixed(y)}" r="2.5" fill="{colour}"/>')
        else:
            joined = " ".join(f"{_fixed(x)},{_fixed(y)}" for x, y in piece)
            drawn.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.3"{dashed}/>')
    return drawn


def _named_line(names: Sequence[str], colour: str) -> str:
    """The first of some names beside its colour, below the chart, with room for the others on its right."""
    x = _WIDTH - _RIGHT - sum(34 + 7 * len(name) for name in names)
    swatch = f'<rect x="{x}" y="{_HEIGHT - 12}" width="14" height="4" fill="{colour}"/>'
    return swatch + _text(x + 20, _HEIGHT - 6, names[0], "start")


def _hovered(
    name: str, points: Sequence[tuple[float, float]], ends: tuple[float, float], x_name: str, form: Format
) -> str:
    """The opening tag of a line's group, with its points as text: steps as differences, values with their unit."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    is_whole = all(x == round(x) for x, _ in finite) and ends[1] < _MOST_WHOLE
    unit = 1.0 if is_whole else 10.0 ** (math.floor(math.log10(max(map(abs, ends)) or 1.0)) - 5)
    places = [round(x / unit) for x, _ in finite]
    steps = " ".join(str(after - before) for before, after in pairwise([0, *places]))
    data = {
        "name": name, "of": x_name, "unit": f"{unit:g}", "x": steps, "v": "|".join(form(y) for _, y in finite),
        "from": f"{ends[0] / unit:.10g}", "to": f"{ends[1] / unit:.10g}", "left": _LEFT, "right": _WIDTH - _RIGHT,
    }  # fmt: skip
    return "<g " + " ".join(f'data-{key}="{_safe(str(value))}"' for key, value in data.items()) + ">"


def _finite(values: "np.ndarray") -> "np.ndarray":
    return np.asarray(values[np.isfinite(values)])


def bar_chart(
    title: str, bars: Sequence[tuple[str, float]], *, form: Format, stacked: bool = False, kinds: Sequence[int] = ()
) -> str:
    """Draw named values as horizontal bars; stacked ones each begin where the one before ends (a waterfall).

    Args:
        title: what is drawn; escaped.
        bars: name and value of each, not below 0.
        form: a value with its unit.
        stacked: the bars are parts of their sum.
        kinds: which kind each bar is of, from 0, where they are of several; a kind has a colour.

    Raises:
        ValueError: there is no bar, or a value is below 0 or not finite.
    """
    if not bars or not all(math.isfinite(value) and value >= 0 for _, value in bars):
        raise ValueError(f"bars need finite values from 0 on: {[*bars]}.")
    # The waterfall's longest name is whole, and values stand beside the names, where a narrow window begins.
    left, room = 228 + _VALUE, _WIDTH - 228 - _VALUE - _RIGHT
    total = (sum if stacked else max)(value for _, value in bars) or 1.0
    drawn, before = [], 0.0
    for place, (name, value) in enumerate(bars):
        y, x, width = _TOP + place * (_BAR + _GAP), left + room * before / total, room * value / total
        colour = _COLOURS[place % len(_COLOURS) if stacked else kinds[place] if kinds else 0]
        drawn.append(f'<rect x="{_fixed(x)}" y="{y}" width="{_fixed(width)}" height="{_BAR}" fill="var(--c{colour})"/>')
        drawn.append(_text(left - _VALUE - 8, y + 15, _cut(name), "end"))
        drawn.append(_text(left - 8, y + 15, form(value), "end"))
        before += value if stacked else 0.0
    description = "; ".join(f"{name}: {form(value)}" for name, value in bars)
    return _svg(title, description, drawn, 2 * _TOP + len(bars) * (_BAR + _GAP))


def histogram(
    title: str,
    values: Sequence[float],
    *,
    form: Format,
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
    y_of, y_axis = _y_axis(0.0, float(counts.max()), (lambda count: f"{count:g}") if shares is None else format_share)
    x_of, x_axis = _x_axis(float(edges[0]), float(edges[-1]), "", form)
    drawn = [y_axis, x_axis]
    for count, (start, end) in zip(counts, pairwise(edges), strict=True):
        x, y, base = x_of(float(start)), y_of(float(count)), y_of(0.0)
        width = max(x_of(float(end)) - x - 1, 0.5)
        drawn.append(
            f'<rect x="{_fixed(x)}" y="{_fixed(y)}" width="{_fixed(width)}" height="{_fixed(base - y)}" '
            'fill="var(--c0)"/>'
        )
    return _svg(title, f"{len(finite)} values from {form(edges[0])} to {form(edges[-1])}.", drawn, _HEIGHT)


def heat_strip(title: str, rows: Sequence[tuple[str, Sequence[float | None]]], *, form: Format) -> str:
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
    left, room = 120, _WIDTH - 120 - _RIGHT
    drawn = []
    for line, (name, row) in enumerate(rows):
        y = _TOP + line * (_BAR + 2)
        drawn.append(_text(left - 8, y + 15, _cut(name, 16), "end"))
        cells = [[value for value in row[part.start : part.stop] if value is not None and math.isfinite(value)]
                 for part in _buckets(len(row), 128)]  # fmt: skip
        shades = [round(_SHADES * (max(cell) - low) / ((high - low) or 1.0)) if cell else None for cell in cells]
        place, width = 0, room / max(1, len(cells))
        by_shade: dict[int, list[str]] = {}
        for shade, alike in groupby(shades):
            count = len([*alike])
            if shade is not None:
                drawn_cell = f"M{_fixed(left + width * place)} {_BAR // 2}h{_fixed(width * count)}"
                by_shade.setdefault(shade, []).append(drawn_cell)
            place += count
        drawn.append(f'<g stroke="var(--c0)" stroke-width="{_BAR}" transform="translate(0 {y})">')
        for shade, parts in sorted(by_shade.items()):
            opacity = _fixed(0.12 + 0.88 * shade / _SHADES)
            drawn.append(f'<path d="{"".join(parts)}" stroke-opacity="{opacity}"/>')
        drawn.append("</g>")
    description = f"{len(rows)} rows, from {form(low)} (light) to {form(high)} (full colour)."
    return _svg(title, description, drawn, 2 * _TOP + len(rows) * (_BAR + 2))


def reduced(steps: "np.ndarray", values: "np.ndarray") -> list[tuple[float, float]]:
    """The points of a series, in order: all of a short one, else the smallest and the largest of each bucket.

    A bucket without a finite value keeps one that is not, so that the gap is seen.
    """
    if len(steps) <= 2 * NUM_BUCKETS:
        return [(float(x), float(y)) for x, y in zip(steps, values, strict=True)]
    points = []
    for part in _buckets(len(steps), NUM_BUCKETS):
        ys = values[part]
        finite = np.flatnonzero(np.isfinite(ys))
        places = sorted({int(finite[ys[finite].argmin()]), int(finite[ys[finite].argmax()])}) if len(finite) else [0]
        points += [(float(steps[part][place]), float(ys[place])) for place in places]
    return points


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within a range: multiples of 1, 2 or 5 times a power of ten, at most `count` + 1 or so.

    >>> ticks(0, 1)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(number * step, digits) + 0.0 for number in range(first, last + 1)]


def _buckets(length: int, count: int) -> list[slice]:
    count = min(length, count)
    return [slice(length * i // count, length * (i + 1) // count) for i in range(count)]


def _band(xs: "np.ndarray", ys: "np.ndarray", x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    upper, lower = [], []
    for part in _buckets(len(xs), NUM_BUCKETS // 2):  # a band needs fewer than the line's peaks
        finite = ys[part][np.isfinite(ys[part])]
        if len(finite):
            low, high = np.percentile(finite, [5, 95])
            x = _fixed(x_of(float(xs[part].mean())))
            upper.append(f"{x},{_fixed(y_of(float(high)))}")
            lower.append(f"{x},{_fixed(y_of(float(low)))}")
    return f'<polygon points="{" ".join(upper + lower[::-1])}" fill="var(--c1)" fill-opacity="0.45"/>'


def _pieces(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            pieces[-1].append((x, y))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _y_axis(low: float, high: float, form: Format) -> tuple[Callable[[float], float], str]:
    if not high > low:
        low, high = min(low, 0.0), max(high, 0.0) or 1.0
    bottom, room = _HEIGHT - _BOTTOM, _HEIGHT - _BOTTOM - _TOP

    def y_of(value: float) -> float:
        return bottom - room * (value - low) / (high - low)

    drawn = []
    for tick in ticks(low, high):
        y = _fixed(y_of(tick))
        drawn.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="var(--grid)"/>')
        drawn.append(_text(_LEFT - 6, y_of(tick) + 4, form(tick), "end"))
    return y_of, "".join(drawn)


def _ratio_axis(low: float, high: float, form: Format) -> tuple[Callable[[float], float], str]:
    """A logarithmic axis, with ticks at 1, 2 and 5 times powers of ten; at the powers alone where these are many."""
    lowest, highest = math.log10(low), math.log10(high)
    bottom, room = _HEIGHT - _BOTTOM, _HEIGHT - _BOTTOM - _TOP

    def y_of(value: float) -> float:
        return bottom - room * (math.log10(value) - lowest) / (highest - lowest) if value > 0 else math.nan

    powers = range(math.floor(lowest), math.ceil(highest) + 1)
    factors = (1, 2, 5) if highest - lowest <= _FEW_POWERS else (1,)
    drawn = []
    for tick in (float(f"{factor}e{power}") for power in powers for factor in factors):
        if low <= tick <= high:
            y = _fixed(y_of(tick))
            drawn.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="var(--grid)"/>')
            drawn.append(_text(_LEFT - 6, y_of(tick) + 4, form(tick), "end"))
    drawn.append(_text(_WIDTH - _RIGHT, _TOP - 2, "logarithmic", "end"))
    return y_of, "".join(drawn)


def _x_axis(
    low: float, high: float, name: str, form: Format | None = None, *, leaves_room: bool = False
) -> tuple[Callable[[float], float], str]:
    room, span = _WIDTH - _LEFT - _RIGHT, high - low if high > low else 1.0

    def x_of(value: float) -> float:
        return _LEFT + room * (value - low) / span

    bottom = _HEIGHT - _BOTTOM
    drawn = [f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}" stroke="var(--ink)"/>']
    for tick in ticks(low, high):
        label = form(tick) if form else f"{tick:,.10g}"
        drawn.append(_text(min(x_of(tick), _WIDTH - _CHARACTER / 2 * len(label)), bottom + 16, label, "middle"))
    if name and leaves_room:  # for the names of lines
        drawn.append(_text(_LEFT, _HEIGHT - 6, name, "start"))
    elif name:
        drawn.append(_text(_LEFT + room / 2, _HEIGHT - 6, name, "middle"))
    return x_of, "".join(drawn)


def _svg(title: str, description: str, drawn: Sequence[str], height: int) -> str:
    inside = "".join(drawn)
    return (
        f'<svg role="img" viewBox="0 0 {_WIDTH} {height}" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{_safe(title)}</title><desc>{_safe(description)}</desc>{inside}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{_fixed(x)}" y="{_fixed(y)}" text-anchor="{anchor}">{_safe(text)}</text>'


def _safe(text: str) -> str:
    return escape(printable(text))


def _cut(name: str, length: int = 34) -> str:
    return name if len(name) <= length else name[: length - 3] + "..."


def _fixed(value: float) -> str:
    text = f"{value:.1f}" if abs(value) >= 2 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".") if float(text) else "0"
