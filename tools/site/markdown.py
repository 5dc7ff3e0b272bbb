"""Pieces of Markdown that several generated pages are made of."""

import re
from collections.abc import Iterable, Sequence


def prose(text: str) -> str:
    r"""Escape what Markdown would take for markup in text that is written plainly; code between backticks stays.

    >>> prose("`a*b` is 2*3*4 of <unk>")
    '`a*b` is 2\\*3\\*4 of \\<unk>'
    """
    parts = re.split(r"(`+[^`]*`+)", text)
    return "".join(part if i % 2 else re.sub(r"(<|(?<=\S)\*(?=\S))", r"\\\1", part) for i, part in enumerate(parts))


def cell(text: str) -> str:
    r"""Put text on one line, for a cell of a table.

    >>> cell("one of\n`a|b`")
    'one of `a\\|b`'
    """
    return " ".join(prose(text).split()).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table; its cells are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
