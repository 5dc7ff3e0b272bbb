"""The tree of settings, read off the sections' own classes: every setting with its type, unit, default and meaning."""

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headway.config.sections import FREE_ON_RESUME, unit_of

ITEM = "N"
"""Stands for the number of a list's item in the name of a setting."""

_WORDS: dict[Any, str] = {int: "whole number", float: "number", str: "text", Path: "path", dict: "mapping"}
_SANITY = 10**9  # limits from here on are there to catch slips of the hand
_BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: dotted, as `--set` takes it; N for the number of a list's item.
        values: which values are allowed, in words.
        unit: of a number, such as "tokens"; empty for none.
        default: as YAML would have it; None where the setting is required, or a section.
        meaning: what it does.
        section: the class of what lies below it, if it is a section or a list of sections.
        is_list: whether it is a list of sections.
        is_free: whether it may change between a run and its continuation.
    """

    name: str
    values: str
    unit: str
    default: str | None
    meaning: str
    section: type[BaseModel] | None
    is_list: bool
    is_free: bool


def settings_of(section: type[BaseModel], prefix: str = "") -> list[Setting]:
    """The settings of a section, not those of the sections in it.

    Args:
        section: its class.
        prefix: its dotted name, with a dot at the end.
    """
    settings = []
    for key, info in section.model_fields.items():
        below = _section(info.annotation)
        described = info.description or " ".join((below.__doc__ or "" if below else "").split())
        meaning, unit = unit_of(described)
        settings.append(
            Setting(
                name=prefix + (info.alias or key),
                values=allowed_values(info.annotation, bounds_of(info.metadata)),
                unit=unit,
                default=None if info.is_required() or isinstance(info.default, BaseModel) else _plain(info.default),
                meaning=meaning,
                section=below,
                is_list=below is not None and _is_list(info.annotation),
                is_free=FREE_ON_RESUME in info.metadata,
            )
        )
    return settings


def walk(section: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """All settings of a section and of those below it, each before what it holds."""
    for setting in settings_of(section, prefix):
        yield setting
        if setting.section is not None:
            yield from walk(setting.section, inner_prefix(setting))


def inner_prefix(setting: Setting) -> str:
    """Prefix of the names of the settings in a section."""
    return f"{setting.name}.{ITEM}." if setting.is_list else f"{setting.name}."


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((section for kind in get_args(annotation) if (section := _section(kind))), None)


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is tuple or any(_is_list(kind) for kind in get_args(annotation))


def bounds_of(metadata: Any) -> str:
    """The limits of a number in words; none that are there only to catch slips of the hand."""
    words = []
    for bound in metadata:
        if isinstance(bound, FieldInfo):
            words += [bounds_of(bound.metadata)] if bound.metadata else []
        for name, text in _BOUNDS.items():
            limit = getattr(bound, name, None)
            if limit is not None and limit < _SANITY:
                words.append(text.format(f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"))
    return ", ".join(word for word in words if word)


def allowed_values(annotation: Any, bounds: str = "") -> str:  # noqa: PLR0911 - a line for each kind of annotation
    """The values that an annotation allows, in words; `bounds` are those of its numbers."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = ", ".join(word for word in (bounds_of(arguments[1:]), bounds) if word)
        return allowed_values(arguments[0], inner)
    if origin is Literal:
        return " | ".join(_plain(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(allowed_values(kind, bounds) for kind in arguments))
    if origin is tuple:
        if _section(annotation):
            return "list"
        size = "" if arguments[-1] is Ellipsis else f"{len(arguments)}, each "
        return f"list of {size}{allowed_values(arguments[0])}"
    if annotation is types.NoneType:
        return "null"
    if annotation is bool:
        return "true | false"
    if _section(annotation):
        return "section"
    word = _WORDS.get(origin or annotation, "any")
    return f"{word} {bounds}" if bounds and word.endswith("number") else word


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
