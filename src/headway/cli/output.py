"""What commands print alike: JSON objects on stdout, warnings on stderr, a missing library as one sentence."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headway.errors import HeadwayError
from headway.log.working import working
from headway.report import presentable
from headway.report.terminal import coloured, width_of, wrapped

SCHEMA_VERSION = 1  # of every object that --json prints


def print_json(record: Mapping[str, Any]) -> None:
    """Print a result as one JSON object; its keys are a contract, which `schema_version` names."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **record}))


def say(text: str, *, on_stderr: bool = False, flush: bool = False) -> None:
    """Print a line that may name what is other people's: files, models, addresses."""
    print(presentable(text), file=sys.stderr if on_stderr else sys.stdout, flush=flush)


def warn(text: str) -> None:
    """Print a warning to stderr, wrapped where that is a terminal."""
    width = width_of(sys.stderr)
    said = presentable(f"Warning: {text}")
    said = said if width is None else "\n".join(wrapped(said, width))
    print(said.replace("Warning:", coloured("Warning:", "yellow", sys.stderr), 1), file=sys.stderr)


def warn_of_unknown(names: Iterable[str]) -> None:
    """Warn of each module that the cost model does not count."""
    for name in names:
        warn(f"{name} is not counted: its FLOPs are missing from every number.")


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
            f"{purpose} needs {error.name}, which is not installed. Install the extra: pip install 'headway[{extra}]'."
        ) from error
