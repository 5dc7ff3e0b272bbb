"""A section of a report: a title and a table, perhaps with a chart and a sentence, as HTML or Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from headway.report import Column
from headway.report.markdown import markdown_table, markdown_text
from headway.report.page import chart_figure, html_table, safe, with_code

_NARROW = 3  # columns of a table that stands beside others


@dataclass(frozen=True, slots=True)
class ReportSection:
    """What a report says of one thing, in plain text of anyone.

    Attributes:
        title: its heading.
        headings: of the table's columns.
        rows: of the table; a section without rows is left out.
        says: a sentence before it.
        chart: SVG of `headway.report.charts`; Markdown has the table alone.
        pictures: a small JPEG in base64 for each row, "" for none; on a page alone.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    says: str = ""
    chart: str = ""
    pictures: Sequence[str] = ()

    def as_html(self) -> str:
        """Render it for a page; the table of a chart opens below it, and one of many columns has the page's width."""
        says = f'<p class="note">{with_code(self.says)}</p>' if self.says else ""
        if self.chart:
            return chart_figure(self.title, self.chart, self.headings, self.rows, says)
        table = html_table(self.headings, self.rows, self.pictures)
        width = ' class="whole"' if len(self.headings) > _NARROW else ""
        return f"<section{width}><h3>{safe(self.title)}</h3>{says}{table}</section>"

    def as_markdown(self) -> str:
        """Render it for an issue."""
        columns = [Column(name, "right" if place else "left") for place, name in enumerate(self.headings)]
        parts = [f"## {markdown_text(self.title)}", *([markdown_text(self.says)] if self.says else [])]
        return "\n\n".join([*parts, markdown_table(columns, self.rows, None)])


def side_by_side(sections: Sequence[ReportSection]) -> str:
    """Sections as HTML, in two columns where the window is wide."""
    return '<div class="charts">' + "\n".join(section.as_html() for section in sections) + "</div>"
