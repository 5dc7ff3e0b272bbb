"""Plain text: documents that are lines, paragraphs or whole files."""

from collections.abc import Iterator
from typing import BinaryIO, Literal, get_args

from headway.data.sources.files import File
from headway.data.sources.json_rows import decoded
from headway.data.sources.reader import ParsedRow
from headway.data.sources.spans import Record, SpanReader
from headway.errors import ConfigError

SampleBy = Literal["paragraph", "line", "document"]
"""What is one document; the names are those of `datasets`' text loader."""


class Text(SpanReader):
    """Plain text.

    Args:
        file: what is read.
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
    def unit(self) -> str:  # type: ignore[override]  # the others name theirs once
        """What a row is called."""
        return "document" if self.sample_by == "document" else "line"

    def records(self, stream: BinaryIO) -> Iterator[Record]:
        """Documents with the number of their first line."""
        if self.sample_by == "document":
            content = stream.read()
            if content.strip():
                yield Record(0, 1, content)
            return
        lines, start, first, place = list[bytes](), 0, 1, 0
        for number, line in enumerate(stream, start=1):
            if lines and (self.sample_by == "line" or line.isspace()):
                yield Record(start, first, b"".join(lines))
                lines = []
            if not line.isspace():
                if not lines:
                    start, first = place, number
                lines.append(line)
            place += len(line)
        if lines:
            yield Record(start, first, b"".join(lines))

    def parse(self, content: bytes) -> ParsedRow:
        """Decode a document; the line break at its end is left out."""
        return ParsedRow({"text": decoded(content).rstrip("\r\n")})

    def _purpose(self) -> str:
        return f"Text by {self.sample_by}"
