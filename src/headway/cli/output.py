"""Output of all commands: JSON objects on stdout, warnings on stderr, a missing library as one sentence."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from headway.errors import HeadwayError, UsageError
from headway.log.working import working
from headway.report import presentable
from headway.report.table import coloured, width_of, wrapped
from headway.version import install_command

SCHEMA_VERSION = 1  # version of every object that --json prints


def print_result(record: Callable[[], Mapping[str, Any]], text: Callable[[], str], *, as_json: bool) -> None:
    """Print a command's result: its record as one JSON object, or its text. Only the one that is printed is computed.

    The keys of a record are a contract, which `schema_version` names.
    """
    print(json.dumps({"schema_version": SCHEMA_VERSION, **record()}) if as_json else text())


def say(text: str, *, on_stderr: bool = False, flush: bool = False) -> None:
    """Print a line that may hold other people's names: files, models, addresses."""
    print(presentable(text), file=sys.stderr if on_stderr else sys.stdout, flush=flush)


def warn(text: str) -> None:
    """Print a warning to stderr, wrapped where that is a terminal."""
    width = width_of(sys.stderr)
    paragraph = presentable(f"Warning: {text}")
    paragraph = paragraph if width is None else "\n".join(wrapped(paragraph, width))
    print(coloured("Warning:", "yellow", sys.stderr) + paragraph[len("Warning:") :], file=sys.stderr)


def warn_of_unknown(names: Iterable[str]) -> None:
    """Warn of each module that the cost model does not count."""
    for name in names:
        warn(f"{name} is not counted, so its FLOPs are missing from every number.")


@contextmanager
def needs_extra(purpose: str, extra: str = "train") -> Iterator[None]:
    """Load the libraries of an extra, which may take seconds, and turn a missing one into a word on how to install it.

    Args:
        purpose: what needs it, as the beginning of the sentence: "training".
        extra: the extra that brings it.

    Raises:
        HeadwayError: a library of the extra is not installed.
    """
    with missing_library_told(purpose, extra), working("loading libraries"):
        yield


@contextmanager
def missing_library_told(purpose: str, extra: str = "train") -> Iterator[None]:
    """Turn a library that is not installed into a word on how to install it; arguments and errors of `needs_extra`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("headway"):
            raise
        raise HeadwayError(
            f"{purpose} needs {error.name}, which is not installed. Install the extra: {install_command(extra)}."
        ) from error


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
