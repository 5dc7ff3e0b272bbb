"""Files of one JSON object per line, which a kill may tear at the end and nowhere else."""

import errno
import fcntl
import json
import os
import warnings
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, LogError
from headway.files import open_plain

_CHUNK_BYTES = 1 << 16


class LineFile:
    """A file that grows by whole lines, each handed to the system as it is written.

    A last line without its newline is what a kill left. If it is a whole object it gets its newline, and otherwise the
    fragment is removed; what stands before it is never touched.

    Args:
        path: the file; made, with its folder, if it is not there.
        exclusive: refuse a file that is open in this way already, in this process or another.

    Raises:
        ConfigError: the file cannot be opened, is not one of JSON lines, or is held already.
    """

    def __init__(self, path: Path, *, exclusive: bool = False) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened for appending: {error.strerror}. Give another path.") from error
        try:
            if exclusive:
                self._lock()
            self._repair()
        except BaseException:
            self._file.close()
            raise

    @property
    def is_empty(self) -> bool:
        """True if the file holds no line."""
        return os.fstat(self._file.fileno()).st_size == 0

    def append(self, record: Mapping[str, Any]) -> None:
        """Append an object as one line.

        Raises:
            OSError: the line could not be written whole, as on a full disk.
        """
        self.append_lines(json.dumps(record, allow_nan=False).encode() + b"\n")

    def append_lines(self, lines: bytes) -> None:
        """Append objects that are lines already, all of them or none; raises as `append`."""
        append_whole(self._file, lines, self.path)

    def close(self) -> None:
        """Close the file, and let go of it."""
        self._file.close()

    def _lock(self) -> None:
        try:
            lock(self._file, self.path)
        except BlockingIOError as error:
            raise ConfigError(
                f"{self.path} is open for writing already, in another process or in another part of this one. Write "
                "records on one rank only, wait until the file is closed, or give another path."
            ) from error

    def _repair(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        self._file.seek(0)
        if size and as_object(self._file.readline()) is None:
            raise ConfigError(
                f"{self.path} does not begin with a JSON object, so records cannot be appended. Give another path, "
                "or move the file away."
            )
        _mend_end(self._file)


def append_in_turn(path: Path, line: bytes) -> None:
    """Append a line to a file that several processes add to, and keep it; fragments of killed processes are removed.

    Args:
        path: of the file; made, with its folder, if it is not there.
        line: with its line break.

    Raises:
        OSError: the line could not be written whole, as on a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        if lock(file, path, waits=True):  # else a line without its end may be one that is being written
            _mend_end(file, begin=b"{")
        append_whole(file, line, path)
        os.fsync(file.fileno())


def _mend_end(file: FileIO, *, begin: bytes = b"") -> None:
    """Give a last line its line break if it is a whole object; else remove it, as a fragment that a kill left.

    Args:
        file: opened for appending, without a buffer.
        begin: of every line of the file's own; a last line that begins otherwise is somebody's words, and is kept.
    """
    size = os.fstat(file.fileno()).st_size
    start, tail = size, b""
    while start > 0 and b"\n" not in tail:
        length = min(_CHUNK_BYTES, start)
        start -= length
        tail = os.pread(file.fileno(), length, start) + tail
    fragment = tail[tail.rfind(b"\n") + 1 :]
    if not fragment:
        return
    if as_object(fragment) is not None or not fragment.startswith(begin):
        file.write(b"\n")
    else:
        file.truncate(size - len(fragment))


def append_whole(file: FileIO, line: bytes, path: Path) -> None:
    """Append a line whole or not at all.

    Args:
        file: opened for appending, without a buffer.
        line: with its line break.
        path: of the file, for the error.

    Raises:
        OSError: the line could not be written whole, as on a full disk.
    """
    written = file.write(line)  # in one call, so that lines of two processes do not mix
    if written < len(line):
        os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def lock(file: FileIO, path: Path, *, waits: bool = False) -> bool:
    """Lock a file until it is closed; returns whether it is, as some file systems have no locks, which is a warning.

    Args:
        file: open.
        path: of the file, for the warning.
        waits: wait for whoever has it.

    Raises:
        BlockingIOError: it is locked already, by this process or another.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        warnings.warn(
            f"{path} lies on a file system without locks ({error.strerror}), so Headway would not notice a second "
            "process that writes to this file.",
            RuntimeWarning,
            stacklevel=4,
        )
        return False
    return True


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a file; a fragment that a kill left at the end is passed over.

    Raises:
        LogError: the file cannot be read, or a line before the last is not a JSON object.
    """
    try:
        with open_plain(path) as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror}.") from error
    records = []
    for number, line in enumerate(lines, start=1):
        record = as_object(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise LogError(f"{path}, line {number} is not a JSON object. Repair or delete the line, then try again.")
    return records


def sharing_decoder() -> json.JSONDecoder:
    """A decoder whose objects share their names and texts: many records of one kind take a third less memory."""
    cached: dict[str, str] = {}

    def shared(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {
            cached.setdefault(name, name): cached.setdefault(value, value) if isinstance(value, str) else value
            for name, value in pairs
        }

    return json.JSONDecoder(object_pairs_hook=shared)


def as_object(line: bytes, decoder: json.JSONDecoder | None = None) -> dict[str, Any] | None:
    """Read a line as a JSON object; None for other lines.

    Args:
        line: UTF-8.
        decoder: of `sharing_decoder`, where many lines are kept.
    """
    try:
        value = json.loads(line) if decoder is None else decoder.decode(line.decode())
    except (ValueError, RecursionError):  # bad text or encoding; lists nested too deeply
        return None
    return value if isinstance(value, dict) else None
