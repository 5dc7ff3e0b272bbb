"""Pieces of Markdown that several generated pages are made of."""

import re
from collections.abc import Iterable, Sequence


def prose(text: str) -> str:
    r"""Escape what Markdown would take for markup in text that is written plainly, and put examples into blocks.

    Code between backticks, indented lines and examples (from `>>>` to the next empty line) stay as they are.

    >>> prose("`a*b` is 2*3*4 of <unk>")
    '`a*b` is 2\\*3\\*4 of \\<unk>'
    """
    blocks = re.split(r"(^>>> .*(?:\n.+)*)", text, flags=re.MULTILINE)
    return "".join(f"```pycon\n{one}\n```" if i % 2 else _escaped(one) for i, one in enumerate(blocks))


def _escaped(text: str) -> str:
    kept = re.split(r"(^    .*$|`+[^`]*`+)", text, flags=re.MULTILINE)
    return "".join(one if i % 2 else re.sub(r"(<|(?<=\S)\*(?=\S))", r"\\\1", one) for i, one in enumerate(kept))


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
