"""Datasets by their paths: which files, in which format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.data.sources.files import COMPRESSIONS, File, find_files
from headway.data.sources.json_rows import JsonArray, JsonLines
from headway.data.sources.reader import Reader
from headway.data.sources.references import MediaRules
from headway.data.sources.schemas import Normaliser
from headway.data.sources.source import Shard, Source
from headway.errors import ConfigError, DataError

FORMATS: dict[str, type[Reader]] = {"jsonl": JsonLines, "json": JsonArray}
"""Readers by the names of their formats."""

EXTENSIONS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"}
"""Formats by extension; .gz and .zst may follow."""


def open_source(
    path: str | Path,
    *,
    name: str | None = None,
    format: str = "auto",  # noqa: A002 - the word that everyone uses
    schema: str = "auto",
    text_column: str = "text",
    root: str | Path | None = None,
    allow_remote: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Source:
    """Open a dataset.

    Args:
        path: a file, folder or glob, here or behind any URL that fsspec opens. Files are taken in the order of their
            names.
        name: how the run calls the dataset; by default its path without folders and extensions.
        format: one of `FORMATS`; "auto" tells it from each file's extension.
        schema: form of the rows, one of `schemas.SCHEMAS`; "auto" tells it from each row's columns.
        text_column: the column that holds the words of documents and captions.
        root: the folder or URL that rows' media paths start from and stay below; by default each file's own.
        allow_remote: whether rows may name media on the web or in object stores.
        storage_options: passed to fsspec's file system, such as credentials.

    Raises:
        ConfigError: an unknown format or schema.
        DataError: no such files, or none whose format is known.
    """
    given = str(path)
    if format not in ("auto", *FORMATS):
        raise ConfigError(f"Unknown format {format!r}. Allowed: auto, {', '.join(FORMATS)}.")
    rules = MediaRules(None if root is None else str(root), allow_remote)
    called = name or given.rstrip("/").rpartition("/")[2].partition(".")[0]
    shards = []
    for file in find_files(given, storage_options or {}):
        reader = FORMATS[_format_of(file) if format == "auto" else format](file)
        shards.append(Shard(called, reader, Normaliser(schema, text_column, file.folder, rules)))
    return Source(called, tuple(shards))


def _format_of(file: File) -> str:
    suffixes = [suffix for suffix in Path(file.url).suffixes if suffix not in COMPRESSIONS]
    known = EXTENSIONS.get(suffixes[-1].lower()) if suffixes else None
    if known is None:
        raise DataError(
            f"The format of {file.url} is not known by its extension. Known are {', '.join(EXTENSIONS)}, also "
            f"followed by {' or '.join(COMPRESSIONS)}; or name the format, one of {', '.join(FORMATS)}."
        )
    return known
