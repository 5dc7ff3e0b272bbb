"""Mistakes of a configuration in words of its settings: where, what was given, what is allowed."""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from headway.config.sections import unit_of
from headway.config.tree import allowed_values, bounds_of, walk
from headway.report.quantity import doubt, examples

_ROWS = tomllib.loads(Path(__file__).with_name("other_tools.toml").read_text("utf-8"))["row"]
SAME = {word: row["here"] for row in _ROWS if "here" in row for word in row["words"].split()}
"""Settings of other tools, and the setting here."""
ABSENT = {word: row["nearest"] for row in _ROWS if "nearest" in row for word in row["words"].split()}
"""Settings of other tools that Headway lacks, and Headway's nearest setting."""
BOUNDS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}
"""Pydantic's names of limits, in words."""
_NOUNS = ("whole number", "number", "text", "path", "list", "mapping")
_UP_TO_ONE = re.compile(r"(at most|below) 1(?![\d,.e])")
_NEAR = 0.75  # least likeness of a guess; 1 is the same letters, and a guess below this bound misleads
_FAR = 0.85  # least likeness of a guess in another section
_LONG = 5  # shortest name with a guess in another section [letters]


def mistake_clause(error: Mapping[str, Any], root: type[BaseModel]) -> str:
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
    if error["type"] == "missing" and isinstance(location[-1], int):
        location = location[:-1]  # a list that is too short
    place, annotation, info = _field(location, root)
    name = ".".join(str(part) for part in place)
    meaning = f" ({info.description})" if info is not None and info.description else ""
    if error["type"] == "missing" and place == error["loc"]:
        section = _section(annotation)
        example = "" if section is None else f", such as {name}: {{{_first_key(section)}: ...}}"
        return f"{name!r} is required" + (example or meaning)
    value = error.get("input")
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])  # message of the check itself
        if isinstance(value, dict | list):
            return f"{name}: {message}" if name else message
        return f"{name} = {value!r}: {message[:1].lower()}{message[1:]}{meaning}"
    if error["type"] in BOUNDS:
        return f"{name} = {value!r}: must be {BOUNDS[error['type']]} {next(iter(error['ctx'].values())):,}{meaning}"
    unit = unit_of(info.description or "")[1] if info is not None else ""
    values = allowed_values(annotation, bounds_of(info.metadata) if info is not None else "")
    doubtful = (
        doubt(value, unit, whole="whole number" in values) if isinstance(value, str) and "number" in values else ""
    )
    give = f"{doubtful}. Give" if doubtful else "give"
    return f"{name} = {value!r}: {give} {_values(annotation, info)}{meaning}"


def describe_all(errors: Iterable[Mapping[str, Any]], root: type[BaseModel]) -> list[str]:
    """Render the errors of a configuration as clauses; of the kinds that one setting may have, the first is enough.

    Unknown keys of one section that nothing is near to are one clause, so that what is allowed is listed once. So are
    sections that are missing.
    """
    errors = list(errors)
    clauses: dict[Any, str] = {}
    for error in errors:
        if (together := _together(error, errors, root)) is not None:
            clauses.setdefault(together, together)
            continue
        place, _, _ = _field(tuple(error["loc"]), root)
        own = error["loc"] if error["type"] in ("extra_forbidden", "missing", "value_error") else ()
        clauses.setdefault((place, own, error["msg"] if own else ""), mistake_clause(error, root))
    return list(dict.fromkeys(clauses.values()))


def _together(error: Mapping[str, Any], errors: Iterable[Mapping[str, Any]], root: type[BaseModel]) -> str | None:
    """Render an error with others of its kind in the same section as one clause; None where it is alone of its kind."""
    above = tuple(error["loc"])[:-1]
    alike = [
        tuple(other["loc"]) for other in errors if other["type"] == error["type"] and tuple(other["loc"])[:-1] == above
    ]
    if error["type"] == "extra_forbidden":
        allowed = _keys_at(above, root)
        alike = [place for place in alike if hint_for(_dotted(place), allowed, root) is None]
        if len(alike) < 2 or tuple(error["loc"]) not in alike:
            return None
        return f"unknown keys {_listed(alike)}, allowed here: {', '.join(allowed)}"
    if error["type"] == "missing" and not above and len(alike) > 1:
        return f"{_listed(alike)} are required (`headway init` writes them)"
    return None


def _dotted(place: tuple[int | str, ...]) -> str:
    return ".".join(map(str, place))


def _listed(places: list[tuple[int | str, ...]]) -> str:
    *others, last = (repr(_dotted(place)) for place in places)
    return f"{', '.join(others)} and {last}"


def _values(annotation: Any, info: Any) -> str:
    """Name the values that a setting takes, with an example where it is easily written in another way."""
    section = _section(annotation)
    if section is not None:
        return f"its settings, such as {{{_first_key(section)}: ...}}; it has {', '.join(_fields(section))}"
    values = allowed_values(annotation, bounds_of(info.metadata) if info is not None else "")
    *others, last = values.split(" | ")
    listed = f"{', '.join(others)} or {last}" if others else last
    listed = f"a {listed}" if listed.startswith(_NOUNS) else listed
    if "number" not in values:
        return listed
    unit = unit_of(info.description or "")[1] if info is not None else ""
    written = examples(unit, whole="whole number" in values)
    return f"{listed}, such as {'0.5 or 40%' if _UP_TO_ONE.search(values) else written}"


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
    # The highest of settings with equal names: data.seed and run.seed, but not the seed of each dataset.
    highest = {
        last: [
            setting_name
            for setting_name in names
            if setting_name.count(".") == min(other.count(".") for other in names)
        ]
        for last, names in everywhere.items()
    }
    # From the surest guess to the least sure: words of a name, an equal name elsewhere, equal letters.
    words = set(key.split("_"))
    if longer := [other for other in allowed if words < set(other.split("_"))]:
        return _did_you_mean(longer[:3])
    if key in highest:
        return _did_you_mean(highest[key])
    if close := difflib.get_close_matches(key, allowed, n=1, cutoff=_NEAR):
        return _did_you_mean(close)
    if len(key) >= _LONG and (close := difflib.get_close_matches(key, highest, n=1, cutoff=_FAR)):
        return _did_you_mean(highest[close[0]])
    return None


def translated(name: str) -> str | None:
    """Translate another tool's setting into the one here, as the end of a sentence; None for a name of no other tool.

    Args:
        name: dotted; its last part counts, or its last two where they are one tool's name.

    >>> translated("training.learning_rate")
    'in Headway it is `optim.lr`'
    """
    parts = name.lower().replace("-", "_").split(".")
    for word in (".".join(parts[-2:]), parts[-1]):
        if word in SAME:
            return f"in Headway it is {SAME[word]}"
        if word in ABSENT:
            return f"there is none in Headway: {ABSENT[word]}"
    return None


def _did_you_mean(names: list[str]) -> str:
    return f"did you mean {' or '.join(map(repr, names))}?"


def _field(location: tuple[int | str, ...], root: type[BaseModel]) -> tuple[tuple[int | str, ...], Any, Any]:
    """The setting at a location, or the nearest above it: its place, annotation and field.

    Pydantic puts the kinds that it tried of several behind the name of the setting; they are left out.
    """
    annotation: Any = root
    info = None
    for depth, part in enumerate(location):
        kinds = [kind for kind in (annotation, *get_args(annotation)) if get_args(kind)]
        section = _section(annotation)
        if isinstance(part, int) and (lists := [kind for kind in kinds if get_origin(kind) is tuple]):
            annotation, info = get_args(lists[0])[0], None
        elif section is not None and part in (fields := _fields(section)):
            info = fields[part]
            annotation = info.annotation
        elif mappings := [kind for kind in kinds if get_origin(kind) is dict]:
            annotation, info = get_args(mappings[0])[1], None
        else:
            return location[:depth], annotation, info
    return location, annotation, info


def _section(annotation: Any) -> Any:
    choices = (annotation, *get_args(annotation))
    return next((kind for kind in choices if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _fields(section: type[BaseModel]) -> dict[str, Any]:
    return {info.alias or name: info for name, info in section.model_fields.items()}


def _first_key(section: type[BaseModel]) -> str:
    """The first setting of a section that must be there, or else its first."""
    fields = _fields(section)
    return next((key for key, field in fields.items() if field.is_required()), next(iter(fields)))


def _keys_at(location: tuple[int | str, ...], root: type[BaseModel]) -> list[str]:
    _, annotation, _ = _field(location, root)
    section = _section(annotation)
    return [] if section is None else list(_fields(section))
