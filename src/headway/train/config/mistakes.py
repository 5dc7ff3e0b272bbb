"""What is wrong with a configuration in words of its settings: where, what was given, what is allowed."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from headway.train.config.other_tools import translated
from headway.train.config.tree import walk

_NEAR = 0.75  # of 1, which is equal letter by letter; below it a guess misleads more often than it helps
_FAR = 0.85  # likewise, in another section, of names of at least
_LONG = 5  # letters


def describe(error: Mapping[str, Any], root: type[BaseModel]) -> str:
    """Render an error of pydantic as a clause.

    Args:
        error: one of `ValidationError.errors()`.
        root: the class of the whole configuration.
    """
    location = tuple(error["loc"])
    name = ".".join(str(part) for part in location)
    if error["type"] == "extra_forbidden":
        allowed = _keys_at(location[:-1], root)
        hint = hint_for(name, allowed, root) or "allowed here: " + ", ".join(allowed)
        return f"unknown key {name!r}, {hint}".rstrip(".")
    if error["type"] == "missing":
        return f"{name!r} is required" + _meaning(location, root)
    message = error["msg"].removeprefix("Value error, ")
    if isinstance(error.get("input"), dict | list):
        return f"{name}: {message}" if name else message
    return f"{name} = {error.get('input')!r}: {message[:1].lower()}{message[1:]}" + _meaning(location, root)


def hint_for(name: str, allowed: Iterable[str], root: type[BaseModel]) -> str | None:
    """Say which setting an unknown name means: of its own section, of another one, or in another tool's words.

    Args:
        name: dotted.
        allowed: the keys of its own section.
        root: the class of the whole configuration.

    Returns:
        The end of a sentence; None where nothing is near enough.
    """
    key = name.rpartition(".")[2]
    if answer := translated(name):
        return answer
    allowed = list(allowed)
    everywhere: dict[str, list[str]] = {}
    for setting in walk(root):
        everywhere.setdefault(setting.name.rpartition(".")[2], []).append(setting.name)
    # Of equal names those that lie highest: data.seed and run.seed, but not that of each dataset.
    highest = {
        last: [each for each in names if each.count(".") == min(other.count(".") for other in names)]
        for last, names in everywhere.items()
    }
    # From the surest guess to the least sure: words of a name, an equal name elsewhere, equal letters.
    words = set(key.split("_"))
    if longer := [each for each in allowed if words < set(each.split("_"))]:
        return _did_you_mean(longer[:3])
    if key in highest:
        return _did_you_mean(highest[key])
    if close := difflib.get_close_matches(key, allowed, n=1, cutoff=_NEAR):
        return _did_you_mean(close)
    if len(key) >= _LONG and (close := difflib.get_close_matches(key, highest, n=1, cutoff=_FAR)):
        return _did_you_mean(highest[close[0]])
    return None


def _did_you_mean(names: list[str]) -> str:
    return f"did you mean {' or '.join(map(repr, names))}?"


def _field(location: tuple[int | str, ...], root: type[BaseModel]) -> Any:
    """Annotation and field found at a location of the configuration; list items by index."""
    annotation: Any = root
    info = None
    for part in location:
        if isinstance(part, int):
            annotation = annotation.__args__[0]
            continue
        section = _section(annotation)
        if section is None or part not in (fields := _fields(section)):
            break
        info = fields[part]
        annotation = info.annotation
    return annotation, info


def _section(annotation: Any) -> Any:
    choices = (annotation, *getattr(annotation, "__args__", ()))
    return next((kind for kind in choices if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _fields(section: type[BaseModel]) -> dict[str, Any]:
    return {info.alias or name: info for name, info in section.model_fields.items()}


def _keys_at(location: tuple[int | str, ...], root: type[BaseModel]) -> list[str]:
    annotation, _ = _field(location, root)
    section = _section(annotation)
    return [] if section is None else list(_fields(section))


def _meaning(location: tuple[int | str, ...], root: type[BaseModel]) -> str:
    _, info = _field(location, root)
    return f" ({info.description})" if info is not None and info.description else ""
