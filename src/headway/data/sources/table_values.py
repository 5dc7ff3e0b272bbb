"""Values of a table's row as JSON would have them: without the nulls of other rows' keys, JSON and classes read."""

import json
from typing import Any

import pyarrow as pa

from headway.data.sources.json_rows import shortened
from headway.errors import DataError

_JSON_EXTENSION = "arrow.json"


def row_values(batch: pa.RecordBatch) -> dict[str, Any]:
    """The only row of a batch.

    Every row of a struct has the keys of all, so a null within one is taken as a key that the row does not have.
    Columns of JSON (`datasets`' `Json`) are read, with their own nulls; classes (`ClassLabel`) become their names.

    Raises:
        DataError: a value that is not JSON, or a class without a name.

    Source: datasets 5.2, features.py, `Json` (Arrow's canonical extension arrow.json) and `ClassLabel`.

    >>> row_values(pa.RecordBatch.from_pylist([{"a": {"b": None, "c": [1]}, "d": None}]))
    {'a': {'c': [1]}, 'd': None}
    """
    fields: dict[str, Any] = batch.to_pylist()[0]
    for field in batch.schema:
        if _is_nested(field.type):
            fields[field.name] = _value(fields[field.name], field.type, field.name)
    for name, classes in _classes(batch.schema).items():
        if type(number := fields.get(name)) is int:
            fields[name] = _class(name, number, classes)
    return fields


def _is_nested(kind: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind)) or _is_json(kind)


def _is_json(kind: pa.DataType) -> bool:
    return getattr(kind, "extension_name", None) == _JSON_EXTENSION


def _value(value: Any, kind: pa.DataType, column: str) -> Any:
    if value is None:
        return None
    if _is_json(kind):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:  # ValueError: no JSON, or a number of too many digits
            raise DataError(f"{column} holds what is not JSON ({error}): {shortened(value)}.") from error
    if pa.types.is_struct(kind):
        inner = {part.name: _value(value[part.name], part.type, column) for part in kind}
        return {name: item for name, item in inner.items() if item is not None}
    if isinstance(value, list) and not pa.types.is_map(kind) and _is_nested(kind.value_type):
        return [_value(item, kind.value_type, column) for item in value]
    return value


def _classes(schema: pa.Schema) -> dict[str, list[str]]:
    """Names of classes by the columns that hold their numbers, as `datasets` writes them beside a schema."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            name: list(map(str, feature["names"]))
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}  # nobody wrote any, or in another form


def _class(name: str, number: int, classes: list[str]) -> str | None:
    if number == -1:  # `datasets`' mark of a row without a class
        return None
    if not 0 <= number < len(classes):
        raise DataError(f'"{name}" is the class {number}, but the table names {len(classes)} classes, from 0 on.')
    return classes[number]
