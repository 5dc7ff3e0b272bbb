"""Parts of charts: text, ticks and axes as SVG that fits any width from 340 pixels on, at one size of letters.

A chart takes the width that it is given. Places along it are percentages of its plot, which stands between fixed
margins; curves are drawn 1,000 wide and stretched. The style sheet of `colours.css.jinja` goes with it.
"""

import math
import re
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from headway.report.secrets import printable


class Margins(NamedTuple):
    """Room around a plot for ticks, names and units [pixels]."""

    top: int
    right: int
    bottom: int
    left: int


AXES = Margins(16, 10, 22, 58)
PLOT = 150  # height of a plot [pixels]
_HEIGHT = PLOT + AXES.top + AXES.bottom
WIDE = 1000  # width of a drawing that is stretched
NARROWEST = 315 - AXES.left - AXES.right  # a plot on a screen of 375 pixels, less the margins of page and card [pixels]
_CHARACTER = 6.8  # width of a digit at most [pixels]
_APART = 10  # between two labels [pixels]
_MOST_TICKS = 5
_FAR = 0.7  # share of a plot, from where on a name stands on the left of its place
_FEW_POWERS = 2  # powers of ten, up to which an axis has room for ticks between them
Scale = Callable[[float], float]
"""Where a value stands: on an axis of x as a fraction of the plot, on one of y as pixels from its top."""


def chart(title: str, description: str, drawn: Sequence[str], attributes: str = "") -> str:
    """Put what is drawn into a chart that says in words what it shows.

    Args:
        title: what is drawn; escaped.
        description: the same in a sentence for readers who do not see it; escaped.
        drawn: its parts; percentages are of the plot between the margins.
        attributes: more of the opening tag.
    """
    padding = " ".join(f"{room}px" for room in AXES)
    opening = f'class="chart" width="100%" height="{_HEIGHT}" style="padding:{padding}"{attributes}'
    inside = f'<title>{safe(title)}</title><desc>{safe(description)}</desc><g class="plot">{"".join(drawn)}</g>'
    return f'<svg role="img" {opening} xmlns="http://www.w3.org/2000/svg">{inside}</svg>'


_OPENING = re.compile(r'<svg role="img" class="chart" width="100%" height="\d+" style="[^"]*"')


def within(drawn: str, y: float, width: float) -> tuple[str, int]:
    """Place a chart within a larger picture, where no style sheet gives it its margins.

    Args:
        drawn: a chart.
        y: its upper edge [pixels].
        width: of all [pixels].

    Returns:
        The chart, and its height [pixels].
    """
    opening = _OPENING.match(drawn)
    assert opening is not None, "a chart begins with its size"
    size = f'width="{width - AXES.left - AXES.right:g}" height="{PLOT}" overflow="visible"'
    return f'<svg role="img" x="{AXES.left}" y="{y + AXES.top:g}" {size}{drawn[opening.end() :]}', _HEIGHT


def stretched(drawn: Sequence[str], height: int, up: int = 1, kind: str = "curves") -> str:
    """Put curves that are drawn `WIDE` wide, and so many units to a pixel high, over all of a plot."""
    box = f'viewBox="0 0 {WIDE} {up * height}" preserveAspectRatio="none" width="100%" height="{height}"'
    return f'<svg class="{kind}" {box}>{"".join(drawn)}</svg>'


def text_element(x: str, y: float, text: str, anchor: str = "start", dx: float = 0) -> str:
    """Write a text.

    Args:
        x: where, pixels or a percentage.
        y: of its base line [pixels].
        text: anyone's; escaped.
        anchor: "start", "middle" or "end".
        dx: moved to the right [pixels].
    """
    moved = f' dx="{fixed(dx)}"' if dx else ""
    return f'<text x="{x}" y="{fixed(y)}"{moved} text-anchor="{anchor}">{safe(text)}</text>'


def safe(text: str) -> str:
    """Text of anyone that stays text."""
    return escape(printable(text))


def fixed(value: float) -> str:
    """A place with the digits that are seen."""
    text = f"{value:.1f}" if abs(value) >= 2 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".") if float(text) else "0"


def percent(fraction: float) -> str:
    """A place along a plot."""
    return f"{fixed(100 * fraction)}%"


def ticks(low: float, high: float, count: int = _MOST_TICKS) -> list[float]:
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


def ratio_ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: 1, 2 and 5 times powers of ten; the powers alone where these are many."""
    lowest, highest = math.log10(low), math.log10(high)
    factors = (1, 2, 5) if highest - lowest <= _FEW_POWERS else (1,)
    powers = range(math.floor(lowest), math.ceil(highest) + 1)
    marks = (float(f"{factor}e{power}") for power in powers for factor in factors)
    return [tick for tick in marks if low <= tick <= high]


def distinct_ticks(low: float, high: float, form: Callable[[float], str], *, by_ratio: bool = False) -> list[float]:
    """Ticks of an axis of values that read differently: fewer where units of little detail would repeat themselves.

    >>> distinct_ticks(0, 0.00115, lambda share: f"{100 * share:.1f} %")
    [0.0, 0.001]
    """
    tried = [ratio_ticks(low, high)] if by_ratio else [ticks(low, high, count) for count in range(_MOST_TICKS, 0, -1)]
    marks = next((some for some in tried if some and len({*map(form, some)}) == len(some)), tried[0])
    return list({form(tick): tick for tick in reversed(marks)}.values())[::-1]


def y_axis(low: float, high: float, form: Callable[[float], str], *, by_ratio: bool = False) -> tuple[Scale, str]:
    """Make the axis of values, with a line across the plot at each tick.

    Args:
        low: smallest value; above 0 where `by_ratio`.
        high: largest.
        form: a value with its unit.
        by_ratio: whether equal ratios have equal room.
    """
    if not high > low:
        low, high = min(low, 0.0), max(high, 0.0) or 1.0
    bottom, top = (math.log10(low), math.log10(high)) if by_ratio else (low, high)

    def y_of(value: float) -> float:
        if by_ratio and value <= 0:
            return math.nan
        return PLOT - PLOT * ((math.log10(value) if by_ratio else value) - bottom) / (top - bottom)

    drawn = []
    for tick in distinct_ticks(low, high, form, by_ratio=by_ratio):
        y = y_of(tick)
        drawn.append(f'<line x2="100%" y1="{fixed(y)}" y2="{fixed(y)}" stroke="var(--grid)"/>')
        drawn.append(text_element("0", y + 4, form(tick), "end", dx=-8))
    return y_of, "".join(drawn)


def x_axis(low: float, high: float, form: Callable[[float], str] | None = None) -> tuple[Scale, str]:
    """Make the axis below the plot, with as many ticks as a narrow screen has room for.

    Args:
        low: at the left end.
        high: at the right end.
        form: a place with its unit; digits if None.
    """
    span = high - low if high > low else 1.0

    def x_of(value: float) -> float:
        return (value - low) / span

    drawn = []
    for place, label in labels(low, high, form or (lambda tick: f"{tick:,.10g}")):
        if _is_cut(place, label):
            drawn.append(text_element("100%", PLOT + 17, label, "end", dx=AXES.right))
        else:
            drawn.append(text_element(percent(place), PLOT + 17, label, "middle"))
    return x_of, "".join(drawn)


def labels(low: float, high: float, form: Callable[[float], str]) -> list[tuple[float, str]]:
    """Places of ticks, as fractions of the plot, and their labels: as many as fit beside each other.

    >>> labels(0, 1_000_000, lambda step: f"{step:,.0f}")
    [(0.0, '0'), (0.5, '500,000'), (1.0, '1,000,000')]
    """
    span = high - low if high > low else 1.0
    fitting: list[tuple[float, str]] = []
    for count in range(1, _MOST_TICKS + 1):
        placed = [((tick - low) / span, form(tick)) for tick in ticks(low, high, count)]
        rooms = [label_extent(place, label, NARROWEST) for place, label in placed]
        if placed and all(before[1] + _APART <= after[0] for before, after in pairwise(rooms)):
            fitting = placed
    return fitting


def label_extent(place: float, label: str, width: float) -> tuple[float, float]:
    """Left and right end of a tick's label in a plot of some width [pixels]."""
    half = _CHARACTER / 2 * len(label)
    right = width + AXES.right if _is_cut(place, label) else place * width + half
    return right - 2 * half, right


def name_room(place: float, name: str, width: float = NARROWEST) -> tuple[float, float, str]:
    """Left and right end of a name above a plot [pixels], and how it is anchored: inwards, far on the right."""
    room = _CHARACTER * len(name)
    if place > _FAR:
        return place * width - room, place * width + _APART, "end"
    return place * width, place * width + room + _APART, "start"


def _is_cut(place: float, label: str) -> bool:
    """Tell whether a label would stand out on the right in the narrowest plot, so that it ends at the chart's edge."""
    return place * NARROWEST + _CHARACTER / 2 * len(label) > NARROWEST + AXES.right
