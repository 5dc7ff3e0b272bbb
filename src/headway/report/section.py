"""A section of a report as data: a title, sentences, a table and a chart, which terminal, Markdown and pages print."""

import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headway.report.secrets import printable
from headway.report.table import Column, coloured, render_lines, render_table

_CODE = re.compile(r"(`[^`<]+`)")
_BAR = re.compile(r"[ #<|]+")
# Marks that mean something wherever they stand; an underscore between letters is none.
_MARKS = re.compile(r"[\\`*\[\]~]|(?<!\w)_|_(?!\w)")
_ENTITY = re.compile(r"&(?=#?\w+;)")


def markdown_text(text: str) -> str:
    r"""Markdown of anyone's text on one line; words between single backticks are code.

    >>> print(markdown_text("see `headway goodput`: <img src=x> [a](javascript:b) *c* d_e"))
    see `headway goodput`: &lt;img src=x> \[a\](javascript:b) \*c\* d_e
    """
    plain = printable(" ".join(text.splitlines()))
    pieces = [plain] if "``" in plain else _CODE.split(plain)
    return "".join(piece if _CODE.fullmatch(piece) and "``" not in plain else _escaped(piece) for piece in pieces)


def markdown_code(text: str) -> str:
    """A name of anyone as code on one line."""
    return f"`{printable(' '.join(text.splitlines())).replace('`', chr(39))}`"


def markdown_cell(text: str) -> str:
    """Text of anyone as a cell of a table; a bar of a chart keeps its spaces as code."""
    if text and _BAR.fullmatch(text):
        return f"`{text}`".replace("|", "\\|")
    return markdown_text(text).replace("|", "\\|")


def markdown_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], footer: Sequence[str] | None) -> str:
    """Render a table as Markdown has it."""
    lines = [
        [markdown_cell(column.heading) for column in columns],
        ["---" if c.align == "left" else "---:" for c in columns],
    ]
    lines += [[markdown_cell(cell) for cell in row] for row in [*rows, *([footer] if footer else [])]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    escaped = _MARKS.sub(lambda mark: f"\\{mark.group()}", _ENTITY.sub("&amp;", text)).replace("<", "&lt;")
    return re.sub(r"^>", "&gt;", escaped)


_NARROW = 3  # columns of a table that stands beside others
_LONG = 40  # width of a cell, from which on three columns need the page's width [characters]
_NUMBER = re.compile(r"[-+]?\d[\d,.]*(e[-+]?\d+)?( \S{1,8})?( \d+ \w{1,3})?")  # perhaps with its unit


@dataclass(frozen=True, slots=True)
class ReportSection:
    """Section of a report on one thing, in plain text of anyone."""

    title: str = ""  # heading; "" for none
    headings: Sequence[str] = ()  # columns of the table; none without a table
    rows: Sequence[Sequence[str]] = ()  # rows of the table; a page leaves out a section without any, chart or points
    says: str = ""  # a sentence before it
    chart: str = ""  # SVG of `headway.report.charts`; Markdown has the table alone
    remark: str = ""  # a few words on the chart, on its right
    bars: Sequence[float] = ()  # part of the largest row that each row is, from 0 to 1; on a page alone
    image: str = ""  # a PNG in base64 in place of a chart
    pictures: Sequence[str] = ()  # a small JPEG in base64 for each row, "" for none; on a page alone
    footer: Sequence[str] = ()  # last row of the table, such as totals, set apart in text
    left: Collection[int] = (0,)  # columns whose cells stand on the left in text
    points: Sequence[str] = ()  # sentences behind it, each on a line or a point of its own, in text
    is_sentence: bool = False  # whether its title is a sentence, which Markdown shows in bold
    marked: str = ""  # name of the row that a terminal shows in colour

    @property
    def is_wide(self) -> bool:
        """True if its table needs the page's width."""
        count = len(self.headings)
        return count > _NARROW or (count == _NARROW and any(len(cell) > _LONG for row in self.rows for cell in row))

    @staticmethod
    def is_number(cell: str) -> bool:
        """Tell whether a cell is a number with its unit, which stays on one line."""
        return _NUMBER.fullmatch(cell) is not None

    @property
    def columns_of_words(self) -> frozenset[int]:
        """Columns behind the first that hold sentences and no number: they stand on the left."""
        columns = [(place, [row[place] for row in self.rows]) for place in range(len(self.headings))]
        return frozenset(
            place
            for place, cells in columns
            if (place or self.pictures) and any(" " in cell for cell in cells)
            if not any(map(self.is_number, cells))
        )

    @property
    def _full_title(self) -> str:
        """The title in text; that of sentences with their remark, such as their size."""
        return f"{self.title} ({self.remark})" if self.remark and self.points else self.title

    @property
    def _columns(self) -> list[Column]:
        return [Column(name, "left" if place in self.left else "right") for place, name in enumerate(self.headings)]

    def as_markdown(self, level: int = 2) -> str:
        """Render it for an issue, its title as a heading of a level."""
        title = markdown_text(self._full_title)
        parts = [] if not title else [f"**{title}**" if self.is_sentence else f"{'#' * level} {title}"]
        parts += [markdown_text(self.says)] if self.says else []
        parts += [markdown_table(self._columns, self.rows, self.footer or None)] if self.headings else []
        parts += ["\n".join(f"* {markdown_text(point)}" for point in self.points)] if self.points else []
        return "\n\n".join(parts)

    def as_terminal(self) -> str:
        """Render it for a terminal, a pipe or a log."""
        parts = [render_lines([printable(text)]) for text in (self._full_title, self.says) if text]
        if self.headings:
            drawn = render_table(self._columns, self.rows, footer=self.footer or None)
            lines = [
                coloured(line, "yellow", sys.stdout) if self.marked and line.startswith(f"{self.marked} ") else line
                for line in drawn.split("\n")
            ]
            parts.append("\n".join(lines))
        parts += [render_lines([printable(point) for point in self.points])] if self.points else []
        return "\n\n".join(parts)
