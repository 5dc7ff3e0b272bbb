"""A section of a report: a title, a sentence, a table and a chart, which pages and Markdown both show."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from headway.report.markdown import markdown_table, markdown_text
from headway.report.table import Column

_NARROW = 3  # columns of a table that stands beside others
_LONG = 40  # of a cell, from which on three columns need the page's width [characters]
_NUMBER = re.compile(r"[-+]?\d[\d,.]*(e[-+]?\d+)?( \S{1,8})?( \d+ \w{1,3})?")  # perhaps with its unit


@dataclass(frozen=True, slots=True)
class ReportSection:
    """Section of a report on one thing, in plain text of anyone.

    Attributes:
        title: its heading.
        headings: of the table's columns.
        rows: of the table; a section without rows is left out.
        says: a sentence before it.
        chart: SVG of `headway.report.charts`; Markdown has the table alone.
        image: a PNG in base64 in place of a chart.
        pictures: a small JPEG in base64 for each row, "" for none; on a page alone.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    says: str = ""
    chart: str = ""
    image: str = ""
    pictures: Sequence[str] = ()

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

    def as_markdown(self) -> str:
        """Render it for an issue."""
        columns = [Column(name, "right" if place else "left") for place, name in enumerate(self.headings)]
        parts = [f"## {markdown_text(self.title)}", *([markdown_text(self.says)] if self.says else [])]
        return "\n\n".join([*parts, markdown_table(columns, self.rows, None)])
