"""Files of documents: plain text, and corpora that were tokenised before (NumPy arrays and bare token ids)."""

import io
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal, get_args

import numpy as np

from headway.data.sources.files import File
from headway.data.sources.reader import ParsedRow, Record, SpanReader, check_row, lines, whole
from headway.data.sources.text_rows import decoded
from headway.errors import ConfigError

SampleBy = Literal["paragraph", "line", "document"]
"""Unit that makes one document, by the names of `datasets`' text loader."""

DTYPES = ("uint16", "uint32", "int32", "int64")
_CHUNK_TOKENS = 2**20
_MOST_HEADER_BYTES = 2**16  # largest header of an array; NumPy's own reader takes 10,000


class Text(SpanReader):
    """Plain text.

    Args:
        file: the file to read.
        sample_by: "paragraph": lines between blank lines; "line": every line that is not blank; "document": the file.

    Raises:
        ConfigError: anything else.
    """

    def __init__(self, file: File, sample_by: SampleBy = "paragraph") -> None:
        super().__init__(file)
        if sample_by not in get_args(SampleBy):
            raise ConfigError(
                f"Text cannot be read by {sample_by!r}. Allowed for sample_by: {', '.join(get_args(SampleBy))}."
            )
        self.sample_by = sample_by

    @property
    def unit(self) -> str:  # type: ignore[override]  # other formats have one unit
        """Word for a row in messages."""
        return "document" if self.sample_by == "document" else "line"

    def records(self, stream: BinaryIO) -> Iterator[Record]:
        """Documents with the number of their first line."""
        if self.sample_by == "document":
            content = whole(stream)
            if content.strip():
                yield Record(0, 1, content)
            return
        document, start, first, place = list[bytes](), 0, 1, 0
        for number, line in lines(stream):
            if document and (self.sample_by == "line" or line.isspace()):
                yield Record(start, first, b"".join(document))
                document = []
            if not line.isspace():
                if not document:
                    start, first = place, number
                document.append(line)
                check_row(place + len(line) - start, f"the paragraph that begins on line {first}")
            place += len(line)
        if document:
            yield Record(start, first, b"".join(document))

    def parse(self, content: bytes) -> ParsedRow:
        """Decode a document; the line break at its end is left out."""
        return ParsedRow({"text": decoded(content).rstrip("\r\n")})

    def _purpose(self) -> str:
        return f"Text by {self.sample_by}"


class TokenFile(SpanReader):
    """Token ids one after the other, with an id that ends each document; or a NumPy array with a document on each row.

    Args:
        file: a .npy file, or one that holds nothing but ids, as nanoGPT and Megatron-LM write them.
        token_dtype: of bare ids, one of `DTYPES`, in this machine's byte order; a NumPy file tells its own.
        end_token: the id that ends a document and belongs to it; a NumPy file of two dimensions needs none.

    Raises:
        ConfigError: a setting is missing, unknown, or cannot take effect.
    """

    unit = "document"

    def __init__(self, file: File, token_dtype: str | None = None, end_token: int | None = None) -> None:
        super().__init__(file)
        self.is_numpy = file.extension == ".npy"
        if self.is_numpy is not (token_dtype is None) or token_dtype not in (None, *DTYPES):
            raise ConfigError(
                f"The token ids of {file.url} were given the dtype {token_dtype}. A NumPy file tells its own; for bare "
                f"ids, name one of {', '.join(DTYPES)} as token_dtype."
            )
        if not self.is_numpy and end_token is None:
            raise ConfigError(f"Name the id that ends a document of {file.url} as end_token; the ids alone do not.")
        self.token_dtype, self.end_token = token_dtype, end_token

    def records(self, stream: BinaryIO) -> Iterator[Record]:
        """Documents in order, reading a chunk of ids at a time."""
        if not self.is_numpy:
            yield from self._split(stream, 0, np.dtype(self.token_dtype))
            return
        shape, dtype, header_bytes = _numpy_header(stream)
        if len(shape) == 2 and self.end_token is None:
            yield from _rows(stream, header_bytes, shape, dtype)
        elif len(shape) == 1 and self.end_token is not None:
            yield from self._split(stream, header_bytes, dtype, expected_tokens=shape[0])
        else:
            raise io.UnsupportedOperation(
                f"the array has the shape {shape} and end_token is {self.end_token}; give two dimensions, a document "
                "each row, or one dimension and the id that ends a document"
            )

    def parse(self, content: bytes) -> ParsedRow:
        """Read a document's ids."""
        if not hasattr(self, "_dtype"):
            with self.file.opened() as stream:
                self._dtype = _numpy_header(stream)[1] if self.is_numpy else np.dtype(self.token_dtype)
        return ParsedRow({"input_ids": np.frombuffer(content, self._dtype).tolist()})

    def _purpose(self) -> str:
        return f"TokenFile as {self.token_dtype} to {self.end_token}"

    def _split(
        self, stream: BinaryIO, place: int, dtype: np.dtype[Any], expected_tokens: int | None = None
    ) -> Iterator[Record]:
        number, tokens, remainder = 1, 0, b""
        while chunk := stream.read(_CHUNK_TOKENS * dtype.itemsize):
            remainder += chunk
            ids = np.frombuffer(remainder[: len(remainder) // dtype.itemsize * dtype.itemsize], dtype)
            start = 0
            for stop in ((np.flatnonzero(ids == self.end_token) + 1) * dtype.itemsize).tolist():
                yield Record(place + start, number, remainder[start:stop])
                start, number = stop, number + 1
            place, remainder, tokens = place + start, remainder[start:], tokens + start // dtype.itemsize
            check_row(len(remainder), f"document {number}")
        tokens += len(remainder) // dtype.itemsize
        if len(remainder) % dtype.itemsize or tokens < (expected_tokens or 0):
            raise EOFError(f"it is cut within a document, after {tokens} ids")
        if remainder:
            yield Record(place, number, remainder)


def _rows(stream: BinaryIO, place: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[Record]:
    num_bytes = shape[1] * dtype.itemsize
    check_row(num_bytes, "a row of the array")
    for number in range(1, shape[0] + 1):
        row = stream.read(num_bytes)
        if len(row) < num_bytes:
            raise EOFError(f"it announces {shape[0]} rows and is cut within row {number}")
        yield Record(place, number, row)
        place += num_bytes


def _numpy_header(stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, dtype and the header's own bytes.

    Source: the NPY format, versions 1.0 and 2.0 (numpy.lib.format).
    """
    magic = stream.read(8)
    length = stream.read(2 if magic[6:7] == b"\x01" else 4)
    header = length + stream.read(min(int.from_bytes(length, "little"), _MOST_HEADER_BYTES))
    read_header = np.lib.format.read_array_header_1_0 if len(length) == 2 else np.lib.format.read_array_header_2_0
    try:
        np.lib.format.read_magic(io.BytesIO(magic))
        shape, is_fortran, dtype = read_header(io.BytesIO(header))
    except ValueError as error:
        raise EOFError(f"it is no NumPy array: {error}") from error
    if dtype.kind not in "iu" or (is_fortran and len(shape) > 1):
        raise io.UnsupportedOperation(f"the array holds {dtype}, by column: {is_fortran}; give integers, row by row")
    if min(shape, default=1) < 1:
        raise EOFError(f"the array has the shape {shape}, so no documents")
    return shape, dtype, len(magic) + len(header)
