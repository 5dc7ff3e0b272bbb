"""Errors of the data, in the words of whoever asked: YAML's keys, or a command's options.

The rooms below name Python's arguments, since they know neither. Here their ways out are put into other words.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from headway.errors import HeadwayError

Speaker = Literal["yaml", "options"]

_WORDS: dict[str, dict[Speaker, str]] = {
    "open the dataset with allow_remote=True": {
        "yaml": "set allow_remote: true beside its path in the data section",
        "options": "give --allow-remote",
    },
    "open the dataset with another root": {
        "yaml": "set another root beside its path in the data section",
        "options": "give another --root",
    },
    "raise max_image_pixels": {"yaml": "raise data.max_image_pixels"},
    "raise max_characters": {"yaml": "raise data.max_characters", "options": "raise --max-characters"},
    "model.chat_template_kwargs": {"options": "model.chat_template_kwargs"},  # before the name that it begins with
    "model.chat_template": {"options": "--chat-template"},
    "load the state with verify='size'": {"yaml": "resume with --set data.verify=size"},
    'choose the schema "sharegpt"': {
        "yaml": "set schema: sharegpt beside the dataset's path",
        "options": "give --schema sharegpt",
    },
}


@contextmanager
def errors_in_words_of(speaker: Speaker) -> Iterator[None]:
    """Put the ways out that errors name into a user's own words.

    Args:
        speaker: whose: "yaml" for settings of a configuration, "options" for those of a command.

    Raises:
        HeadwayError: whatever was raised within, otherwise unchanged.
    """
    try:
        yield
    except HeadwayError as error:
        error.args = tuple(
            _in_words_of(speaker, argument) if isinstance(argument, str) else argument for argument in error.args
        )
        if isinstance(reason := getattr(error, "reason", None), str):  # of one row's error
            vars(error)["reason"] = _in_words_of(speaker, reason)
        raise


def _in_words_of(speaker: Speaker, text: str) -> str:
    for python, others in _WORDS.items():
        text = text.replace(python, others.get(speaker, python))
    return text
