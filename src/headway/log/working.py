"""Notes on stderr of work that can take over two seconds, until it is done: a line, or a bar where rows are counted."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headway.report import format_duration, presentable

if TYPE_CHECKING:
    from rich.console import Console

Tell = Callable[[str], None]
"""A function that replaces the text on show, such as by "tracing the model"."""
RowsReport = Callable[[int, int, int], None]
"""Told rows that are measured, all rows, and rows that cannot be used."""

LINE_S = 30.0
"""Time from one line to the next where there is no terminal [s]."""


class _Line:
    """The one line that is on show; who works within other work changes its text."""

    on_show: "_Line | None" = None

    def __init__(self, text: str, show: Tell) -> None:
        self.text, self._show = text, show

    def tell(self, text: str) -> None:
        self.text = text
        self._show(text)


@contextmanager
def working(doing: str, *, every_s: float = LINE_S) -> Iterator[Tell]:
    """Show on stderr the work in progress, until it is done; of several processes of one run, the first one speaks.

    Args:
        doing: such as "searching choices".
        every_s: from one line to the next where there is no terminal [s]; a terminal shows the time that has gone.

    Yields:
        A function that says what is done now.
    """
    doing = presentable(doing)
    outer = _Line.on_show
    if os.environ.get("RANK", "0") != "0":
        yield lambda _: None
    elif outer is not None:
        before = outer.text
        outer.tell(doing)
        try:
            yield outer.tell
        finally:
            outer.tell(before)
    else:
        with _on_terminal(doing) if sys.stderr.isatty() else _in_log(doing, every_s) as line:
            _Line.on_show = line
            try:
                yield line.tell
            finally:
                _Line.on_show = None


@contextmanager
def measuring_rows(name: str) -> Iterator[RowsReport]:
    """Say on stderr how far the rows of a dataset are measured: a bar on a terminal, elsewhere a line now and then.

    Args:
        name: of the dataset, of anyone.
    """
    from headway.log.live import TimeLeft

    shown, left, last_s = presentable(name), TimeLeft(None), time.monotonic()
    outer = _Line.on_show

    # time left is counted from the first rows, so that opening the file is not in it
    def progress(measured: int, rows: int, bad: int) -> str:
        nonlocal left
        if measured == 0:
            left = TimeLeft(rows)
        more = "".join(f", {value} {word}" for word, value in left.after(measured))
        return f"indexing {shown}: {measured:,} of {rows:,} rows, {bad:,} bad{more}"

    def to_log(measured: int, rows: int, bad: int) -> None:
        nonlocal last_s
        line = progress(measured, rows, bad)
        if line.endswith(" left") and time.monotonic() - last_s >= LINE_S:
            last_s = time.monotonic()
            _print(line)

    # on the line of the note around it, or as lines of a log now and then, or as a bar
    if outer is not None:
        with working(f"indexing {shown}") as report:
            yield lambda measured, rows, bad: report(progress(measured, rows, bad))
    elif not sys.stderr.isatty():
        yield to_log
    else:
        with _bar(shown) as show:
            yield show


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _console() -> "Console":
    from rich.console import Console  # takes a while to load

    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _on_terminal(doing: str) -> Iterator[_Line]:
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=_console(), transient=True) as shown:
        task = shown.add_task(doing, total=None)
        yield _Line(doing, lambda text: shown.update(task, description=text))


@contextmanager
def _in_log(doing: str, every_s: float) -> Iterator[_Line]:
    is_done, begun_s = threading.Event(), time.monotonic()
    line = _Line(doing, lambda _: None)

    def tell() -> None:
        while not is_done.wait(every_s):
            gone = format_duration(time.monotonic() - begun_s)
            _print(f"{line.text}: {gone} so far")

    teller = threading.Thread(target=tell, name=doing, daemon=True)
    teller.start()
    try:
        yield line
    finally:
        is_done.set()
        teller.join()


@contextmanager
def _bar(name: str) -> Iterator[RowsReport]:
    """A bar, which appears with the first rows."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rows, {task.fields[bad]:,} bad"), TimeElapsedColumn())
    title = TextColumn("indexing {task.description}", markup=False)
    with Progress(title, *columns, TimeRemainingColumn(), console=_console(), transient=True) as bar:
        task = bar.add_task(name, total=None, bad=0)
        yield lambda measured, rows, bad: bar.update(task, completed=measured, total=rows, bad=bad)
