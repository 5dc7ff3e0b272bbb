"""WebDataset shards: tar archives in which members with the same key are one sample."""

import io
import re
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, cast

from headway.data.sources.reader import ParsedRow, Record, SpanReader, check_row
from headway.data.sources.references import kind_of
from headway.data.sources.text_rows import decoded, parse_object
from headway.errors import DataError

_KEY = re.compile(r"^((?:.*/)?[^./][^./]*)\.([^/]+)$")
_MOST_SAMPLE_BYTES = 2**31  # films are longer than rows of text
_BLOCK_BYTES = 512  # block of a tar archive; two blocks of zeros end the archive


class Tar(SpanReader):
    """A WebDataset shard, plain or compressed.

    A member's key is its name up to the first dot of its last component; what follows says what it is: "json" holds the
    sample's columns, "txt" its text, and images, videos and sounds are told by their extensions.

    Source: webdataset 1.0, `tariterators.base_plus_ext` and `group_by_keys`.
    """

    unit = "sample"

    def records(self, stream: BinaryIO) -> Iterator[Record]:
        """Runs of members with one key, as they lie in the archive.

        Raises:
            OSError: members of a sample do not lie side by side.
        """
        window = _Window(stream)
        with tarfile.open(fileobj=cast(BinaryIO, window), mode="r|") as archive:
            key, start, number = "", 0, 0
            ended = set[int]()  # hashes of the keys of samples before
            for member in archive:
                archive.members.clear()  # type: ignore[attr-defined]  # they would grow with the archive
                member_key = _key_of(member)
                if member_key and member_key != key:  # others, such as folders, lie anywhere
                    if key:
                        number += 1
                        ended.add(hash(key))
                        yield Record(start, number, window.cut(start, member.offset))
                    if hash(member_key) in ended:
                        raise io.UnsupportedOperation(
                            f"members of the sample {member_key} do not lie side by side: {member.name} stands behind "
                            "those of another sample, so it would be missing from its own. Write the shard again, "
                            "sorted by name"
                        )
                    key, start = member_key, member.offset
            stop = archive.offset
        if not window.ends_at(stop):
            raise EOFError("the archive has no end mark")
        if key:
            yield Record(start, number + 1, window.cut(start, stop))

    def place(self, number: int, data: bytes) -> str:
        """Name a sample by its key, which people look for in the archive."""
        with _opened(data) as archive:
            member = archive.next()
        return f"{self.unit} {number if member is None else _key_of(member)}"

    def parse(self, content: bytes) -> ParsedRow:
        """Read a sample's members."""
        fields, members = {}, {}
        names = set()
        with _opened(content) as archive:
            for member in filter(_key_of, archive):
                kind = member.name[len(_key_of(member)) + 1 :].lower()
                file = archive.extractfile(member) if member.isreg() else None
                if file is None or kind in names:
                    raise DataError(f"the member {member.name} is a link, or is there twice. Write the shard again.")
                names.add(kind)
                if kind == "json":
                    fields.update(parse_object(file.read(), f"So must {member.name}."))
                elif kind == "txt":
                    fields.setdefault("text", decoded(file.read()))
                elif kind_of(kind) is not None:
                    members[member.name] = file.read()
        if not names & {"json", "txt"}:
            raise DataError(
                f"the sample holds {', '.join(sorted(names))}, but it needs a member json, with its columns, or txt."
            )
        return ParsedRow(fields, members)


class _Window:
    """A stream that keeps the last bytes read, so that they can be read again."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._bytes, self._start = stream, bytearray(), 0
        self._ends = 0  # reads behind the end

    def read(self, num_bytes: int) -> bytes:
        content = self._stream.read(num_bytes)
        self._ends += not content
        if self._ends > 1:  # tarfile reads on as far as a member's stated size, be it a million years away
            raise EOFError("the archive ends within a member")
        self._bytes += content
        check_row(len(self._bytes), "a sample of the archive", _MOST_SAMPLE_BYTES)
        return content

    def cut(self, start: int, stop: int) -> bytes:
        """Bytes of the stream; bytes before `stop` are forgotten."""
        content = bytes(self._bytes[start - self._start : stop - self._start])
        del self._bytes[: stop - self._start]
        self._start = stop
        return content

    def ends_at(self, place: int) -> bool:
        """Tell whether the block at a place is an archive's end mark, and not the end of a cut file."""
        block = self._bytes[place - self._start :][:_BLOCK_BYTES]
        return len(block) == _BLOCK_BYTES and not any(block)


def _opened(data: bytes) -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(data), mode="r:")


def _key_of(member: tarfile.TarInfo) -> str:
    """A member's key; empty for folders and for members of no sample, such as hidden files."""
    match = None if member.isdir() else _KEY.match(member.name)
    return match[1] if match and not match[1].rpartition("/")[2].startswith("__") else ""
