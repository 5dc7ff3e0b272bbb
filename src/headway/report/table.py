"""Plain-text tables: aligned columns that read the same on a terminal, in a pipe and in a log.

On a terminal they keep to its width: words wrap within their column, and columns that still find no room stand in a
second table below, the first column repeated. In a pipe or a file every row is one line.
"""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, TextIO

from headway.report.secrets import printable

NARROWEST, WIDEST = 40, 200
_COLOURS = {"red": "31", "yellow": "33"}


def width_of(stream: TextIO) -> int | None:
    """Columns of the terminal behind a stream, 40 to 200; None where there is none. $COLUMNS goes before."""
    setting = os.environ.get("COLUMNS", "")
    if setting.isdecimal() and int(setting):
        columns = int(setting)
    elif stream.isatty():
        columns = shutil.get_terminal_size((80, 24)).columns
    else:
        return None
    return min(max(columns, NARROWEST), WIDEST)


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """Text in bold and a colour where the stream is a terminal that shows it, unless $NO_COLOR is set.

    Args:
        text: what to show.
        colour: "red" or "yellow".
        stream: where it will be printed.

    Source: no-color.org.
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return text
    return f"\x1b[1;{_COLOURS[colour]}m{text}\x1b[0m"


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most so many columns, cut between words; a longer word keeps a line of its own."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


_GAP = "  "
_NARROWEST_WORDS = 18  # a column of words is not made narrower


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading and the side its cells stand on; numbers stand right."""

    heading: str
    align: Literal["left", "right"] = "right"


def render_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    footer: Sequence[str] | None = None,
    width: int | None = None,
) -> str:
    """Render rows under headings, with an optional last row below a rule.

    Args:
        columns: headings and alignment, one per cell of a row.
        rows: cells, already formatted.
        footer: one more row, such as totals, set apart by a rule.
        width: columns of the screen that it keeps to; those of the terminal at stdout if None, and any where there is
            none.

    Returns:
        Lines joined by newlines, without trailing spaces or a final newline.

    >>> columns = [Column("part", "left"), Column("FLOPs")]
    >>> print(render_table(columns, [["mlp", "12"], ["head", "7"]], footer=["all", "19"]))
    part  FLOPs
    ----  -----
    mlp      12
    head      7
    ----  -----
    all      19
    """
    body = [[printable(cell) for cell in row] for row in [*rows, *([footer] if footer is not None else [])]]
    for row in body:
        assert len(row) == len(columns), f"a row has {len(row)} cells for {len(columns)} columns: {row}"
    screen = width if width is not None else width_of(sys.stdout)
    widths = _widths(columns, body, screen)
    tables = []
    for part in _side_by_side(widths, screen):
        tables.append(_render([columns[i] for i in part], [[row[i] for i in part] for row in body],
                              [widths[i] for i in part], has_footer=footer is not None))  # fmt: skip
    return "\n\n".join(tables)


def _widths(columns: Sequence[Column], body: Sequence[Sequence[str]], screen: int | None) -> list[int]:
    """Width of each column: of its longest cell, less where words must wrap to keep to the screen."""
    widths = [max(len(cells[i]) for cells in [[c.heading for c in columns], *body]) for i in range(len(columns))]
    if screen is None:
        return widths
    excess = sum(widths) + len(_GAP) * (len(columns) - 1) - screen
    for i in sorted(range(len(columns)), key=lambda i: -widths[i]):
        has_words = columns[i].align == "left" and any(" " in row[i] for row in body)
        if excess > 0 and has_words and widths[i] > _NARROWEST_WORDS:
            narrower = max(_NARROWEST_WORDS, widths[i] - excess)
            excess -= widths[i] - narrower
            widths[i] = narrower
    return widths


def _side_by_side(widths: Sequence[int], screen: int | None) -> list[list[int]]:
    """Numbers of the columns of each table: as many as fit beside each other, the first in all of them."""
    tables = [[0]] if widths else [[]]
    for i in range(1, len(widths)):
        width = sum(widths[j] + len(_GAP) for j in tables[-1]) + widths[i]
        if screen is not None and width > screen and len(tables[-1]) > 1:
            tables.append([0])
        tables[-1].append(i)
    return tables


def _render(
    columns: Sequence[Column], body: Sequence[Sequence[str]], widths: Sequence[int], *, has_footer: bool
) -> str:
    rule = _GAP.join("-" * width for width in widths)
    lines = [_line([column.heading for column in columns], columns, widths), rule]
    for number, row in enumerate(body):
        if has_footer and number == len(body) - 1:
            lines.append(rule)
        cells = [
            wrapped(cell, width) if column.align == "left" and len(cell) > width else [cell]
            for cell, column, width in zip(row, columns, widths, strict=True)
        ]
        lines += [_line(line, columns, widths) for line in zip_longest(*cells, fillvalue="")]
    return "\n".join(lines)


def render_pairs(pairs: Sequence[tuple[str, str]], *, width: int | None = None) -> str:
    """Render names and values, one pair a line, values aligned; on a terminal values wrap beside their names.

    >>> print(render_pairs([("MFU", "47.1 %"), ("tokens", "12,800")]))
    MFU     47.1 %
    tokens  12,800
    """
    screen = width if width is not None else width_of(sys.stdout)
    pairs = [(printable(name), printable(value)) for name, value in pairs]
    name_width = max((len(name) for name, _ in pairs), default=0)
    lines = []
    for name, value in pairs:
        line = f"{name:<{name_width}}{_GAP}{value}".rstrip()
        if screen is not None and len(line) > screen:
            room = max(screen - name_width - len(_GAP), _NARROWEST_WORDS)
            first, *others = wrapped(value, room)
            indent = " " * name_width + _GAP
            line = "\n".join([f"{name:<{name_width}}{_GAP}{first}", *(indent + words for words in others)])
        lines.append(line)
    return "\n".join(lines)


def render_lines(lines: Sequence[str]) -> str:
    """Render sentences, each on a line of its own; on a terminal they wrap.

    >>> print(render_lines(["One.", "Two."]))
    One.
    Two.
    """
    screen, lines = width_of(sys.stdout), [printable(line) for line in lines]
    return "\n".join(line if screen is None else "\n".join(wrapped(line, screen)) for line in lines)


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded = [
        f"{cell:<{width}}" if column.align == "left" else f"{cell:>{width}}"
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ]
    return _GAP.join(padded).rstrip()
