"""Standard streams as a command needs them: open, and failing in one way.

A shell may close a stream (`>&-`), and what a stream leads to may be full or gone (`| head`). Results that cannot be
printed are an error of their own, whichever command prints them; a lost stderr, which only observes, ends nothing.
"""

import io
import os
import sys
from typing import Any, TextIO

from headway.errors import HeadwayError, UsageError

_BROKEN_PIPE = 141  # exit code of a program that SIGPIPE ends, as shells give it


class OutputLostError(HeadwayError):
    """Standard output takes no more: its disk is full."""


class ReaderGoneError(OutputLostError):
    """Nobody reads standard output any more, as behind `| head`, which is no mistake to be told."""

    exit_code = _BROKEN_PIPE


class _Stream(io.FileIO):
    """A file descriptor of a standard stream; once it takes no more, what is written goes nowhere."""

    def __init__(self, number: int, *, observes: bool) -> None:
        super().__init__(number, "wb", closefd=False)
        self._observes, self._is_lost = observes, False

    def write(self, content: Any, /) -> int:
        """Write as a file does.

        Raises:
            OutputLostError: it cannot be written, for the first time, and is not only looked at.
        """
        size = memoryview(content).nbytes
        if self._is_lost:
            return size
        try:
            return super().write(content)
        except OSError as error:
            self._is_lost = True
            if self._observes:
                return size
            kind = ReaderGoneError if isinstance(error, BrokenPipeError) else OutputLostError
            raise kind(
                f"The result cannot be written to standard output: {error.strerror or error}. Send it elsewhere: "
                "> FILE."
            ) from error


def open_streams() -> None:
    """Make standard streams that every command can use of those that this process was given.

    Letters that the locale does not have are printed by their numbers. Streams that somebody has put in place of
    Python's own stay.

    Raises:
        UsageError: standard output is closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, so no file of ours is a stream
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _opened(2, sys.stderr, observes=True)
    if sys.stdout is None:
        raise UsageError("Standard output is closed (>&-), and results go there. Use > FILE, or > /dev/null for none.")
    if sys.stdout is sys.__stdout__:
        sys.stdout = _opened(1, sys.stdout, observes=False)


def _opened(number: int, before: TextIO | None, *, observes: bool) -> TextIO:
    """The same stream, line by line where it was so, on a descriptor that fails as said above."""
    buffer = io.BufferedWriter(_Stream(number, observes=observes))
    return io.TextIOWrapper(
        buffer,
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=observes or getattr(before, "line_buffering", False),
        write_through=getattr(before, "write_through", False),
    )
