"""Bars, histograms and heat strips as SVG: pure functions from numbers to text, the same bytes for the same numbers."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

import numpy as np

from headway.report.format import format_share
from headway.report.svg import (
    AXES,
    COLOURS,
    NAMES,
    PLOT,
    WIDE,
    chart,
    fixed,
    percent,
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
