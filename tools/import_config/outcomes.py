"""Outcomes of a key of a foreign configuration, and rules that several keys share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Fate = Literal["translated", "not needed", "by hand", "refused"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one key: translated, not needed, by hand or refused."""

    fate: Fate  # see `read`
    reason: str = ""  # why, or what to do
    settings: Mapping[str, Any] = field(default_factory=dict)  # dotted settings of the recipe and their values


@dataclass(frozen=True)
class Context:
    """The rest of the configuration, for rules that depend on other keys."""

    sections: Mapping[str, Mapping[str, Any]]  # the whole configuration, defaults filled in, by section
    folder: Path  # folder of the configuration, where relative paths may start

    def get(self, key: str) -> Any:
        """A value by its dotted key; None where it is not given and has no default."""
        section, _, name = key.rpartition(".")
        return self.sections[section].get(name)


Rule = Callable[[Any, Context], Outcome]


def sets(setting: str, reason: str = "") -> Rule:
    """The key is a setting under another name."""
    return lambda value, _: Outcome("translated", reason, {setting: value})


def switch(setting: str, on: Any) -> Rule:
    """The key switches a setting to the value `on`."""
    return lambda value, _: Outcome("translated", settings={setting: on}) if value else Outcome("not needed", "off")


def unneeded(reason: str) -> Rule:
    """The key has no effect to keep, whatever its value."""
    return lambda _value, _context: Outcome("not needed", reason)


def by_hand(what: str, *off: Any) -> Rule:
    """The key is said elsewhere here; with one of the values `off` it asks for nothing."""
    return lambda value, _: Outcome("not needed", "off") if is_off(value, off) else Outcome("by hand", what)


def only_off(reason: str, *off: Any) -> Rule:
    """Only the values `off`, or nothing, can be had."""
    return lambda value, _: Outcome("not needed", "off") if is_off(value, off) else Outcome("refused", reason)


def is_off(value: Any, off: tuple[Any, ...]) -> bool:
    """Whether a value asks for nothing, or is one of `off`."""
    return value is None or value is False or value in ([], {}, "") or value in off


def degree(setting: str) -> Rule:
    """The key is a number of processes; one asks for nothing."""
    return lambda value, _: Outcome(
        *(("translated", "", {setting: value}) if (value or 1) > 1 else ("not needed", "1"))
    )


def one_of(names: tuple[str, ...], reason: str) -> Rule:
    """The key has no effect to keep with one of the values `names`; others are not known."""

    def rule(value: Any, _: Context) -> Outcome:
        if value in names:
            return Outcome("not needed", reason)
        return Outcome("refused", f"{reason}; known are {', '.join(names)}")

    return rule
