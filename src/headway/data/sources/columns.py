"""Columns by other names: which column of a dataset is the question, which the answer, which the picture."""

import difflib
from collections.abc import Mapping
from typing import Any

from headway.data.sources.json_rows import shortened
from headway.errors import ConfigError, DataError

COLUMNS = (
    "messages", "conversations", "system", "tools", "prompt", "completion", "instruction", "input", "output", "history",
    "question", "answer", "text", "input_ids", "image", "images", "video", "videos", "audio", "audios",
)  # fmt: skip
"""Names of columns that the schemas read."""


def check_columns(columns: Mapping[str, str]) -> None:
    """Make sure that columns are mapped to names that a schema reads.

    Args:
        columns: for each name of `COLUMNS` the name that the dataset has for it.

    Raises:
        ConfigError: a name that no schema reads.
    """
    for name in columns:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            turned = f"The other way round it would be {columns[name]}: {name}. " if columns[name] in COLUMNS else ""
            raise ConfigError(
                f"columns maps {name!r}, which no schema reads. {hint}{turned}It says for each name of Headway's the "
                f"column that the dataset has, such as question: Frage; names are {', '.join(COLUMNS)}."
            )


def renamed(fields: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A row's columns under the names that schemas read.

    Args:
        fields: the row's columns by the dataset's own names.
        columns: as `check_columns` takes them; a name with dots, such as "answers.text.0", leads into a column.

    Raises:
        DataError: the row lacks a column that is mapped.

    >>> renamed({"Frage": "1 + 1?", "a": {"text": ["2"]}}, {"question": "Frage", "answer": "a.text.0"})
    {'question': '1 + 1?', 'answer': '2'}
    """
    taken = {column if column in fields else column.partition(".")[0] for column in columns.values()}
    rest = {name: value for name, value in fields.items() if name not in taken and name not in columns}
    return rest | {name: _value(fields, name, column) for name, column in columns.items()}


def _value(fields: Mapping[str, Any], name: str, column: str) -> Any:
    if column in fields:
        return fields[column]
    value: Any = fields
    for key in column.split("."):
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, Mapping) and key in value:
            value = value[key]
        else:
            raise DataError(
                f"the row has no column {column!r}, which columns names for {name}; it has {', '.join(fields)}, and "
                f"reads {shortened(dict(fields))}."
            )
    return value
