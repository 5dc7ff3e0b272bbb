"""Base class and types of the configuration's sections."""

import re
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from headway.report.quantity import parse_number

FREE_ON_RESUME = "free on resume"
"""Mark of a setting that may change between a run and its continuation: it does not touch the sequence of losses."""

_UNIT = re.compile(r" \[([^\]]+)\]$")
Positive = Annotated[int, Field(ge=1, le=10**12)]
Slots = Annotated[int, Field(ge=1, le=2**26)]
"""Tokens, patches or samples of a pack: what one device computes at a time, and the most that can be planned."""
Share = Annotated[float, Field(gt=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A part of the configuration; unknown keys are refused, and so are infinities, and true where a number belongs."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _null_stands_for_the_default(cls, raw: Any) -> Any:
        """Switch off what a file inherits with null, also where a setting has no null of its own."""
        if not isinstance(raw, dict):
            return raw
        fields = {name: info for key, info in cls.model_fields.items() for name in (key, info.alias)}
        return {
            key: value
            for key, value in raw.items()
            if value is not None
            or key not in fields
            or fields[key].is_required()
            or _takes_null(fields[key].annotation)
        }

    @field_validator("*", mode="before")
    @classmethod
    def _value_is_what_it_seems(cls, value: Any, info: ValidationInfo) -> Any:
        listed = value if isinstance(value, list | tuple) else (value,)
        inside = value.values() if isinstance(value, dict) else listed
        field = cls.model_fields[info.field_name or ""]
        annotation = field.annotation
        if any(type(item) is bool for item in inside) and _takes_numbers(annotation):
            raise ValueError("true and false are no numbers")
        if any(isinstance(item, str) and "\0" in item for item in listed):
            raise ValueError("no text of the configuration may hold the character NUL")
        return _as_meant(value, annotation, unit_of(field.description or "")[1])


def unit_of(description: str) -> tuple[str, str]:
    """Split a description into what it says and the unit in brackets at its end, "" for none."""
    match = _UNIT.search(description)
    return (description[: match.start()], match[1]) if match else (description, "")


def _as_meant(value: Any, annotation: Any, unit: str) -> Any:
    """A value in the form that its setting has: one of a list alone, a section's one setting, a number as text.

    Args:
        value: as YAML has it.
        annotation: of the setting.
        unit: of the setting, "" for none.
    """
    choices = [annotation, *get_args(annotation)] if _takes_null(annotation) else [annotation]
    scalar = isinstance(value, str | int | float) and type(value) is not bool
    for kind in choices:
        is_sequence = get_origin(kind) is tuple
        if is_sequence and isinstance(value, list | tuple):
            return [_as_meant(item, get_args(kind)[0], unit) for item in value]
        if is_sequence and scalar and get_args(kind)[-1] is Ellipsis:
            return [_as_meant(value, get_args(kind)[0], unit)]
        # A scalar sets the one required key of a section that may be absent: an adapter's rank, the first step of a
        # profile.
        if scalar and kind is not annotation and isinstance(kind, type) and issubclass(kind, Section):
            required = [name for name, info in kind.model_fields.items() if info.is_required()]
            return {required[0]: value} if len(required) == 1 else value
    if isinstance(value, str) and _takes_numbers(annotation) and not _takes(str, annotation):
        number = parse_number(value, unit, whole=not _takes(float, annotation))
        return value if number is None else number
    return value


def _takes(wanted: type, annotation: Any) -> bool:
    return annotation is wanted or any(_takes(wanted, kind) for kind in get_args(annotation))


def _takes_numbers(annotation: Any) -> bool:
    return _takes(int, annotation) or _takes(float, annotation)


def _takes_null(annotation: Any) -> bool:
    return annotation is type(None) or type(None) in get_args(annotation)


def settings_off_default(section: Section) -> set[str]:
    """The settings that are not at their defaults; a resolved configuration, which is read again, holds them all."""
    return {name for name, info in type(section).model_fields.items() if getattr(section, name) != info.default}
