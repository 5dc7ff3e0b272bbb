"""Plain-text tables: aligned columns that read the same on a terminal, in a pipe and in a log."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headway.report.format import printable

_GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading and the side its cells stand on; numbers stand right."""

    heading: str
    align: Literal["left", "right"] = "right"


def render_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, footer: Sequence[str] | None = None
) -> str:
    """Render rows under headings, with an optional last row below a rule.

    Args:
        columns: headings and alignment, one per cell of a row.
        rows: cells, already formatted.
        footer: one more row, such as totals, set apart by a rule.

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
    headings = [column.heading for column in columns]
    rows = [[printable(cell) for cell in row] for row in rows]
    body = rows + ([list(footer)] if footer is not None else [])
    for row in body:
        assert len(row) == len(columns), f"a row has {len(row)} cells for {len(columns)} columns: {row}"
    widths = [max(len(cells[i]) for cells in [headings, *body]) for i in range(len(columns))]
    rule = _GAP.join("-" * width for width in widths)
    lines = [_line(headings, columns, widths), rule]
    lines += [_line(row, columns, widths) for row in rows]
    if footer is not None:
        lines += [rule, _line(footer, columns, widths)]
    return "\n".join(lines)


def render_pairs(pairs: Sequence[tuple[str, str]]) -> str:
    """Render names and values, one pair a line, values aligned.

    >>> print(render_pairs([("MFU", "47.1 %"), ("tokens", "12,800")]))
    MFU     47.1 %
    tokens  12,800
    """
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name:<{width}}{_GAP}{printable(value)}".rstrip() for name, value in pairs)


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded = [
        f"{cell:<{width}}" if column.align == "left" else f"{cell:>{width}}"
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ]
    return _GAP.join(padded).rstrip()
