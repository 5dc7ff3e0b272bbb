"""Errors that a user can act on.

Each message says what was wrong, the value got, what is allowed and what to do next. It names arguments by
`headway.words.Argument`, so that a Python call, a command and a configuration each read their own words. The command
line prints the message as one paragraph and exits with `exit_code`: 2 for a wrong use, 1 for everything else.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from headway.report.secrets import presentable
from headway.words import Argument, Words, speaking

Kind = TypeVar("Kind", bound="HeadwayError")


class HeadwayError(Exception):
    """Base of every error that Headway raises on purpose; its text is safe to show, whatever it names.

    Args:
        pieces: texts of the message and the arguments that it names, in their order.
        value: what was wrong, where no argument among the pieces carries it.
        choices: what there is in place of something that there is not: names of parameters, steps, conventions.

    >>> error = UsageError(Argument("freeze", "nope"), " matches no parameter.", choices=["vision"])
    >>> str(error), error.parameter, error.value, error.choices
    ("freeze='nope' matches no parameter.", 'freeze', 'nope', ('vision',))
    """

    exit_code = 1

    def __init__(self, *pieces: object, value: object = None, choices: Collection[str] = ()) -> None:
        super().__init__(*pieces)
        self.choices = tuple(choices)
        argument = next((piece for piece in pieces if isinstance(piece, Argument)), None)
        self.parameter = None if argument is None else argument.name
        """Python's name of the argument that is wrong, or that mends it; None where there is none."""
        self.value = value if argument is None or argument.value is None else argument.value
        """The value that is wrong; None where there is none."""

    @property
    def pieces(self) -> tuple[object, ...]:
        """Texts of the message and the arguments that it names: what another error takes to say the same."""
        return self.args

    @property
    def text(self) -> str:
        """The message in the words of whoever asks now."""
        return "".join(map(str, self.pieces))

    def as_kind(self, kind: "type[Kind]", *more: object) -> "Kind":
        """Make an error of another class that says the same.

        Args:
            kind: the class.
            more: pieces that the message goes on with.
        """
        return kind(*self.pieces, *more, value=self.value, choices=self.choices)

    def settle(self) -> None:
        """Keep the message as it reads now, whoever asks later."""
        self.args = (self.text,)

    def __str__(self) -> str:
        return presentable(self.text)


@contextmanager
def errors_in(*words: Words) -> Iterator[None]:
    """Put messages into words as `headway.words.speaking` does, messages of errors that leave included.

    Raises:
        HeadwayError: whatever was raised within, the same object.
    """
    with speaking(*words):
        try:
            yield
        except HeadwayError as error:
            error.settle()
            raise


_OURS = (HeadwayError, ImportError, KeyboardInterrupt, SystemExit, GeneratorExit)
_MOST_CHARACTERS = 500  # most characters of another library's message


@contextmanager
def foreign(refusal: Callable[[str], HeadwayError]) -> Iterator[None]:
    """Run a library on what a stranger wrote or sends: the one boundary to it, by kind of error and not by a list.

    Args:
        refusal: makes the error of what went wrong, in the library's words.

    Raises:
        HeadwayError: the refusal, whatever the library raised.
    """
    try:
        yield
    except BaseException as error:
        reraise_own(error)
        raise refusal(f"{first_line(error)}.") from error


def reraise_own(error: BaseException) -> None:
    """Raise what is no mistake of a stranger's file: Headway's own errors, a missing library, Ctrl-C, an exit."""
    if isinstance(error, _OURS):
        raise error


class UsageError(HeadwayError):
    """An option or argument cannot be understood, or two contradict each other."""

    exit_code = 2


class WorkloadError(UsageError):
    """Segment lengths, grids or slots do not describe a step."""


class ConfigError(UsageError):
    """A training configuration holds an unknown key or a value that cannot take effect."""


class RunCompleteError(ConfigError):
    """A run has taken all of its steps, so nothing is left to go on with.

    Attributes:
        model: the export of the run, where it was missing and was made instead; None where nothing was made.
    """

    model: Path | None = None


class UnknownModelError(UsageError):
    """A model name is neither shipped, nor a local folder or config, nor reachable on the Hub."""


class UnknownConventionError(UsageError):
    """A counting convention has no such name."""


class NotExpressibleError(UsageError):
    """A convention has no number for a model; the text gives the reason, and the tool's output then."""


class UnknownDeviceError(UsageError):
    """A device's peak is not known; no MFU is better than a guessed one."""


class PlanError(UsageError):
    """The quantities of a plan are too few, contradict each other, or are not positive."""


class PluginError(HeadwayError):
    """A distribution that brings a family of models cannot be imported."""


class LogError(HeadwayError):
    """A log holds no line that is recognised, or numbers that no convention explains."""


class TraceError(HeadwayError):
    """A model holds an operation that the ledger cannot explain."""


class CostModelError(HeadwayError):
    """A cost model's file is not one, or is of another version."""


class DataError(HeadwayError):
    """A sample, image or dataset file cannot be used; the message names file and line.

    Args:
        pieces: as `HeadwayError` takes them.
        where: place of the sample, which the message begins with.
        choices: as `HeadwayError` takes them.
    """

    def __init__(self, *pieces: object, where: str = "", choices: Collection[str] = ()) -> None:
        super().__init__(*pieces, choices=choices)
        self.where = where

    def __str__(self) -> str:
        return presentable(f"{self.where}: {self.text}" if self.where else self.text)


class CheckpointError(HeadwayError):
    """A checkpoint is incomplete, damaged or of another run."""


class StoreError(HeadwayError):
    """A store behind a URL refuses to read or write, or does not answer."""


class HubError(HeadwayError):
    """The Hugging Face Hub cannot be reached, or refuses what is sent to it."""


class TrainingError(HeadwayError):
    """Training cannot go on: a loss that is not finite, a missing device."""


class NotFiniteError(TrainingError):
    """A loss or gradient is not finite, and the weights are lost with it."""


def first_line(error: BaseException) -> str:
    r"""The first line of an error's text, as much as fits a sentence; its class where it has no text.

    >>> first_line(ValueError("no room\nin line 3")), first_line(KeyError()), first_line(ValueError("Errors:\n cut."))
    ('no room', 'KeyError', 'Errors: cut')
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return line[:_MOST_CHARACTERS].rstrip(".")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that no memory was left: Python's, PyTorch's, or that of an allocator below it.

    Args:
        error: of any library.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch is not imported for it
        return True
    # the last are oneDNN's words where a kernel found no memory
    signs = ("can't allocate memory", "bad_alloc", "Cannot allocate memory", "could not create a primitive")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


class OutOfMemoryError(TrainingError):
    """There was no memory left, on the device or the host; the message says what held it."""


class RankLostError(HeadwayError):
    """A rank did not answer in time when numbers were added up."""
