"""What every section of the configuration is made of."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A part of the configuration; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True)


def changed(section: Section) -> set[str]:
    """The settings that are not at their defaults; a resolved configuration, which is read again, holds them all."""
    return {name for name, info in type(section).model_fields.items() if getattr(section, name) != info.default}


def as_written(section: Section) -> dict[str, Any]:
    """A section as plain YAML and JSON types, under the names of the file."""
    return section.model_dump(mode="json", by_alias=True)
