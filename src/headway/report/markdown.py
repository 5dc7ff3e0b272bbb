"""Text of anyone as Markdown that shows it: no tag, link, emphasis or control character comes out of it."""

import re
from collections.abc import Sequence

from headway.report.secrets import printable
from headway.report.table import Column

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
