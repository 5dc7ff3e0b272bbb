"""Base class and types of the configuration's sections."""

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

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
        """What a file inherits is switched off with null, also where a setting has no null of its own."""
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
        annotation = cls.model_fields[info.field_name or ""].annotation
        if any(type(each) is bool for each in inside) and _takes_numbers(annotation):
            raise ValueError("true and false are no numbers")
        if any(isinstance(each, str) and "\0" in each for each in listed):
            raise ValueError("no text of the configuration may hold the character NUL")
        return value


def _takes_numbers(annotation: Any) -> bool:
    return annotation in (int, float) or any(_takes_numbers(kind) for kind in get_args(annotation))


def _takes_null(annotation: Any) -> bool:
    return annotation is type(None) or type(None) in get_args(annotation)


def changed(section: Section) -> set[str]:
    """The settings that are not at their defaults; a resolved configuration, which is read again, holds them all."""
    return {name for name, info in type(section).model_fields.items() if getattr(section, name) != info.default}
