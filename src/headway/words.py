"""Arguments as messages name them: Python's, unless a command says them as options or a run as keys of its YAML.

A message names an argument by an `Argument`, which is put into words when the message is: `freeze='nope'` in Python,
`--freeze nope` on the command line, `model.freeze: nope` in a configuration.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Argument:
    """An argument of a call, alone or with a value; its text is in the words of whoever asked.

    Attributes:
        name: Python's name of it, or the dotted key of a run's setting.
        value: what it is, or should be; None to name the argument alone.
        example: what stands in place of a value that the reader is to choose, as "MODEL".

    >>> str(Argument("freeze", "nope"))
    "freeze='nope'"
    >>> with speaking(Options({"freeze": "--freeze"})):
    ...     f"{Argument('freeze', 'nope')} matches no parameter"
    '--freeze nope matches no parameter'
    """

    name: str
    value: object = None
    example: str = ""

    def __str__(self) -> str:
        for words in _WORDS.get():
            if (text := words.say(self)) is not None:
                return text
        if self.example or self.value is None:
            return f"{self.name}={self.example}" if self.example else self.name
        return f"{self.name}={_plain(self.value) if '.' in self.name else repr(self.value)}"


class Words(Protocol):
    """A way to name arguments."""

    def say(self, argument: Argument, /) -> str | None:
        """Name an argument; None for one that is not known here."""


@dataclass(frozen=True)
class Options:
    """A command's options.

    Attributes:
        names: the option, or the place of an argument without one, by Python's name; by name=example where an option
            of its own says that value.
        assigns: the option that sets a dotted key to an example; "" where there is none.

    >>> options = Options({"seq_len": "--seq-len", "whole": "--whole"}, assigns="--set")
    >>> options.say(Argument("seq_len", 0)), options.say(Argument("whole", True))
    ('--seq-len 0', '--whole')
    >>> options.say(Argument("run.folder", example="FOLDER"))
    '--set run.folder=FOLDER'
    """

    names: Mapping[str, str]
    assigns: str = ""

    def say(self, argument: Argument) -> str | None:
        """Name an argument as a user types it."""
        if own := self.names.get(f"{argument.name}={argument.example}"):
            return own
        name, value = self.names.get(argument.name), argument.example or argument.value
        if name is None:
            is_to_set = "." in argument.name and self.assigns and argument.example
            return f"{self.assigns} {argument.name}={argument.example}" if is_to_set else None
        if isinstance(value, Mapping):
            value = tuple(f"{key}={item}" for key, item in value.items())
        if isinstance(value, tuple):
            return " ".join(f"{name} {_plain(item)}" for item in value)
        return name if value is None or value is True else f"{name} {_plain(value)}"


@dataclass(frozen=True)
class Keys:
    """Keys of a configuration.

    Attributes:
        names: the key by Python's name of the argument.
        places: where a key stands, for those that the reader would look for elsewhere.

    >>> keys = Keys({"freeze": "model.freeze", "allow_remote": "allow_remote"}, {"allow_remote": "beside the path"})
    >>> keys.say(Argument("freeze", "nope"))
    'model.freeze: nope'
    >>> keys.say(Argument("allow_remote", True))
    'allow_remote: true beside the path'
    """

    names: Mapping[str, str]
    places: Mapping[str, str]

    def say(self, argument: Argument) -> str | None:
        """Name an argument as it is written in YAML."""
        name, value = self.names.get(argument.name), argument.example or argument.value
        if name is None:
            return None
        text = name if value is None else f"{name}: {_plain(value)}"
        place = self.places.get(argument.name)
        return text if place is None else f"{text} {place}"


_OF_A_SOURCE = ("allow_remote", "root", "schema")
RUN_KEYS = Keys(
    {
        "freeze": "model.freeze",
        "lr_of": "optim.lr_of",
        "targets": "model.lora.targets: target",
        "recompute": "speed.recompute",
        "max_image_pixels": "data.max_image_pixels",
        "max_characters": "data.max_characters",
        "verify": "data.verify",
        "overlong": "data.overlong, overlong of a source",
        "columns": "columns",
        **{name: name for name in _OF_A_SOURCE},
    },
    dict.fromkeys(_OF_A_SOURCE, "beside its path in the data section"),
)
"""Keys of a run that stand for arguments of the rooms below."""


def _plain(value: object) -> str:
    """A value as it is typed: true, 0.5, nope, {a: b}."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {item}' for key, item in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


_WORDS: ContextVar[tuple[Words, ...]] = ContextVar("words", default=())


def current_words() -> tuple[Words, ...]:
    """Give the words that messages are put into now, the first that know an argument; Python's where there are none."""
    return _WORDS.get()


def adopt(words: tuple[Words, ...]) -> None:
    """Put messages of this thread or process into words from now on: those of the one that it works for."""
    _WORDS.set(words)


@contextmanager
def speaking(*words: Words) -> Iterator[None]:
    """Put messages into words, those of the surroundings where these know nothing.

    Args:
        words: the first that know an argument name it.
    """
    token = _WORDS.set((*words, *_WORDS.get()))
    try:
        yield
    finally:
        _WORDS.reset(token)
