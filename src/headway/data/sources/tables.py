"""Parquet and Arrow: rows of tables, with values as JSON would have them.

That is: without the nulls of other rows' keys, and with JSON and classes read.
"""

import json
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from headway.data.sources.files import HEAD_BYTES, cached_path, from_cache, write_cached
from headway.data.sources.reader import EMPTY_MESSAGE, ParsedRow, Raw, Reader, lasting, until_damage
from headway.data.sources.text_rows import Unreadable, shortened
from headway.errors import DataError, first_line

_BATCH_ROWS = 64  # decoded at once: few, as a row may hold images
_ARROW_FILE = b"ARROW1"  # first bytes of an Arrow file; an Arrow stream begins without them
_JSON_EXTENSION = "arrow.json"
_BYTES_OF_WORDS = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


class TableReader(Reader):
    """A file of record batches.

    Random access maps an Arrow file into memory. Parquet, compressed Arrow and remote files are written to the cache as
    uncompressed Arrow first, in one pass: Parquet has no way to a row but to decode the row group around it.
    """

    @abstractmethod
    def batches(self, start: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Record batches in order, each with its first row; batches that end before `start` may be left out."""

    def parse(self, content: pa.RecordBatch) -> ParsedRow:
        """Take the only row of a batch."""
        return ParsedRow(row_values(content))

    def get(self, row: int) -> Raw:  # noqa: D102 - as the base class says
        starts, batches, damage, _ = self._rows()
        if damage and row == starts[-1]:
            return self._damaged(row, damage)
        number = bisect_right(starts, row) - 1
        faults = self._table[3]
        if number not in faults:
            faults[number] = _fault(batches[number])
        return _raw(starts[number], batches[number], row - starts[number], faults[number])

    def __len__(self) -> int:
        starts, _, damage, _ = self._rows()
        return starts[-1] + bool(damage)

    def _read(self, start: int) -> Iterator[Raw]:
        for first, batch in self.batches(max(start - 1, 0)):
            fault = _fault(batch)
            for place in range(max(start - 1 - first, 0), batch.num_rows):
                yield _raw(first, batch, place, fault)

    @contextmanager
    def _opened(self) -> Iterator[pa.NativeFile]:
        if not self.file.is_local:
            with self.file.opened() as stream, pa.PythonFile(stream, "r") as source:
                yield source
            return
        self.file.check(Path(self.file.url).stat())
        with pa.memory_map(self.file.url) as source:
            self.file.check_head(source.read_at(HEAD_BYTES, 0))
            yield source

    def _rows(self) -> tuple[list[int], list[pa.RecordBatch], str, dict[int, str]]:
        """Rows before each batch and of all; the batches, mapped into memory; why they end before their time; faults.

        A batch is looked through when its first row is read: to do so at once would read the whole file.
        """
        if not hasattr(self, "_table"):
            batches, damage = self._directly() or self._from_copy()
            self._table = [0, *accumulate(batch.num_rows for batch in batches)], batches, damage, dict[int, str]()
        return self._table

    def _directly(self) -> tuple[list[pa.RecordBatch], str] | None:
        """The file's own batches; None if the file lies neither here nor uncompressed."""
        return None

    def _from_copy(self) -> tuple[list[pa.RecordBatch], str]:
        path = cached_path(self.file, f"{type(self).__name__} rows 2").with_suffix(".arrow")
        damage_file = path.with_suffix(".damage")

        def copied() -> list[pa.RecordBatch] | None:
            try:
                if path.stat().st_size:
                    return list(pa.ipc.open_stream(pa.memory_map(str(path))))
            except (OSError, pa.ArrowException):
                return None
            return [] if damage_file.is_file() else None

        def copy(target: BinaryIO) -> None:
            """Write all rows as an Arrow stream; name a damage beside it."""
            writer, damage = None, ""
            for item in until_damage(self.batches(0)):
                if isinstance(item, DataError):
                    damage = lasting(item, self.file)
                elif item[1].num_rows:
                    writer = writer or pa.ipc.new_stream(target, item[1].schema)
                    writer.write_batch(item[1])
            if writer is not None:
                writer.close()
            elif not damage:
                damage = EMPTY_MESSAGE
            if damage:
                write_cached(damage_file, lambda file: file.write(damage.encode()))

        batches = from_cache(path, copied, lambda path: write_cached(path, copy), f"The copy of {self.file.url}")
        return batches, damage_file.read_text("utf-8") if damage_file.exists() else ""


class Arrow(TableReader):
    """An Arrow file or stream, such as the files of `datasets`."""

    def batches(self, start: int) -> Iterator[tuple[int, pa.RecordBatch]]:  # noqa: ARG002, D102 - skipping costs nothing
        row = 0
        for _, batch in self._batches():
            yield row, batch
            row += batch.num_rows

    def _batches(self) -> Iterator[tuple[pa.NativeFile, pa.RecordBatch]]:
        with self._opened() as source:
            is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
            source.seek(0)
            table = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            assert table.schema.names is not None  # read here, as names that are no UTF-8 are a damage
            for batch in map(table.get_batch, range(table.num_record_batches)) if is_file else table:
                yield source, batch

    def _directly(self) -> tuple[list[pa.RecordBatch], str] | None:
        if not self.file.is_local:
            return None
        batches: list[pa.RecordBatch] = []
        for item in until_damage(self._batches()):
            if isinstance(item, DataError):
                return batches, lasting(item, self.file)
            source, batch = item
            if not batches and not _lies_in(source, batch):
                return None
            batches.append(batch)
        return batches, "" if any(batch.num_rows for batch in batches) else EMPTY_MESSAGE


class Parquet(TableReader):
    """A Parquet file."""

    def batches(self, start: int) -> Iterator[tuple[int, pa.RecordBatch]]:  # noqa: D102 - as the base class says
        with self._opened() as source, pq.ParquetFile(source, page_checksum_verification=True) as table:
            row = 0
            for group in range(table.num_row_groups):
                stop = row + table.metadata.row_group(group).num_rows
                if stop > start:
                    for batch in table.iter_batches(_BATCH_ROWS, row_groups=[group]):
                        yield row, batch
                        row += batch.num_rows
                row = stop


def _lies_in(source: pa.MemoryMappedFile, batch: pa.RecordBatch) -> bool:
    """Tell whether a batch's buffers are the file's own bytes, instead of having been decompressed."""
    place = source.tell()
    source.seek(0)
    file_buffer = source.read_buffer()
    source.seek(place)
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None and buffer.size]
    return all(file_buffer.address <= buffer.address < file_buffer.address + file_buffer.size for buffer in buffers)


def _raw(first: int, batch: pa.RecordBatch, place: int, fault: str) -> Raw:
    content = DataError(f"its batch is damaged: {fault}. Copy the file again.") if fault else batch.slice(place, 1)
    return Raw(first + place, f"row {first + place}", content)


class _AsBytes:
    """A batch whose words are bytes, so that each value that is no UTF-8 is an error of its own."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def __arrow_c_array__(self, _: object = None) -> tuple[object, object]:
        """The same memory under another schema. Source: Arrow's PyCapsule interface."""
        fields = [field.with_type(_bytes_type(field.type)) for field in self._batch.schema]
        return pa.schema(fields).__arrow_c_schema__(), self._batch.__arrow_c_array__()[1]


def _bytes_type(kind: pa.DataType) -> pa.DataType:
    """A type of the same layout without words."""
    is_type: Any = pa.types

    def within(field: pa.Field) -> pa.Field:
        return field.with_type(_bytes_type(field.type))

    if isinstance(kind, pa.BaseExtensionType):
        return _bytes_type(kind.storage_type)
    if is_type.is_struct(kind):
        kind = pa.struct(list(map(within, kind)))
    elif is_type.is_map(kind):
        kind = pa.map_(_bytes_type(kind.key_type), _bytes_type(kind.item_type), kind.keys_sorted)
    elif is_type.is_dictionary(kind):
        kind = pa.dictionary(kind.index_type, _bytes_type(kind.value_type), kind.ordered)
    elif is_type.is_fixed_size_list(kind):
        kind = pa.list_(within(kind.value_field), kind.list_size)
    elif is_type.is_list(kind) or is_type.is_large_list(kind):
        kind = (pa.list_ if is_type.is_list(kind) else pa.large_list)(within(kind.value_field))
    return _BYTES_OF_WORDS.get(kind, kind)


def _fault(batch: pa.RecordBatch) -> str:
    """Say why a batch must not be read: its offsets would lead out of its memory; "" for a sound one."""
    try:
        batch.validate()  # sizes of buffers, which the other interface does not hand over
        pa.record_batch(_AsBytes(batch)).validate(full=True)
    except pa.ArrowException as error:
        return first_line(error)
    return ""


def row_values(batch: pa.RecordBatch) -> dict[str, Any]:
    """The only row of a batch.

    Every row of a struct has the keys of all, so a null within one is taken as a key that the row does not have. A map
    is an object, as in JSON. Columns of JSON (`datasets`' `Json`) are read, with their own nulls; classes
    (`ClassLabel`) become their names. A value that cannot be read, such as a date that Python does not have, is
    `Unreadable`: its column may be one that nobody wants.

    Source: datasets 5.2, features.py, `Json` (Arrow's canonical extension arrow.json) and `ClassLabel`.

    >>> row_values(pa.RecordBatch.from_pylist([{"a": {"b": None, "c": [1]}, "d": None}]))
    {'a': {'c': [1]}, 'd': None}
    """
    fields: dict[str, Any] = {}
    classes = _classes(batch.schema)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            if name in fields:
                raise DataError(f'the table has several columns of the name "{name}". Give each a name of its own.')
            value = column[0].as_py()
            if value is not None and _is_nested(column.type):
                value = _json_value(value, column.type, name)
            elif type(value) is int and name in classes:
                value = _class(name, value, classes[name])
        except DataError as error:
            value = Unreadable(error)
        except (ValueError, OverflowError) as error:  # words that are not UTF-8, times that Python has no date for
            reason = f'the column "{name}" cannot be read: {first_line(error)}. Write it as a string, or leave it out.'
            value = Unreadable(DataError(reason))
        fields[name] = value
    return fields


def _is_nested(kind: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind)) or _is_json(kind)


def _is_json(kind: pa.DataType) -> bool:
    return getattr(kind, "extension_name", None) == _JSON_EXTENSION


def _json_value(value: Any, kind: pa.DataType, column: str) -> Any:
    if value is None:
        return None
    if _is_json(kind):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:  # ValueError: no JSON, or a number of too many digits
            raise DataError(f"{column} holds what is not JSON ({error}): {shortened(value)}.") from error
    if pa.types.is_map(kind):
        pairs = ((key, _json_value(item, kind.item_type, column)) for key, item in value)
        return {key: item for key, item in pairs if item is not None}
    if pa.types.is_struct(kind):
        inner = {part.name: _json_value(value[part.name], part.type, column) for part in kind}
        return {name: item for name, item in inner.items() if item is not None}
    if isinstance(value, list) and _is_nested(kind.value_type):
        return [_json_value(item, kind.value_type, column) for item in value]
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
