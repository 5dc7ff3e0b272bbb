"""The terminal: how wide it is, and whether it shows colour. Pipes and files are of any width, and without colour."""

import os
import shutil
import textwrap
from typing import TextIO

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
