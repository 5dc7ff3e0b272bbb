"""Files that a user names, or that lie in a folder of a stranger's.

To be written: a plain file is replaced at once, anything else is written into. To be read: a plain file alone, for to
open a pipe waits for whoever writes it, perhaps for ever.
"""

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE, S_ISDIR, S_ISREG
from typing import BinaryIO, TextIO

from headway.cache import write_whole
from headway.errors import UsageError

MOST_BYTES = 2**30
"""Longest text that is read whole, such as a log."""

SETTINGS_BYTES = 2**22
"""Longest file of settings."""

# A file alone may be open to writing, or be mounted by itself, in a folder where no other can be made.
_NO_NEW_FILE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS, errno.EXDEV)


def write_output(path: Path, content: bytes | str, *, option: str = "", new: bool = False) -> None:
    """Write what a user asked for under a name of theirs.

    A plain file, or a name without a file, gets the whole content or none, and the permissions that it had. A link is
    followed. A device, a pipe and a process's own streams (/dev/null, /dev/stdout) are written into: to rename a
    file over them would take them away from every program of the machine.

    Args:
        path: the name; its folder is made if missing.
        content: text is written as UTF-8.
        option: of the command line that named it, for errors: "--plot".
        new: refuse a plain file that is there already.

    Raises:
        UsageError: it cannot be written.
    """
    content = content.encode() if isinstance(content, str) else content
    shown = f"{option} {path}".strip()
    try:
        _write(path, content, new=new)
    except FileExistsError as error:
        raise UsageError(f"{shown} exists already; give another file, or delete it first.") from error
    except OSError as error:
        raise UsageError(f"{shown} cannot be written: {error.strerror or error}. Give another file.") from error


def open_output(path: Path) -> TextIO:
    """Open a new file, or what is no plain file, to write text line by line.

    Raises:
        OSError: a plain file of this name is there, or none can be made.
    """
    return path.open("w" if path.exists() and not is_taken(path) else "x", encoding="utf-8")


def is_taken(path: Path) -> bool:
    """Whether a plain file or a folder has the name already; a device or a pipe is there to be written into."""
    return path.is_file() or path.is_dir()


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file to be read.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a folder.
    """
    check_plain(path)
    return path.open("rb")


def read_text(path: Path, *, errors: str = "strict", most: int = MOST_BYTES) -> str:
    """Read a file that a user names as UTF-8, also from a pipe; what has no end, as /dev/zero, is not read for ever.

    Args:
        path: the name.
        errors: of decoding, as `bytes.decode` takes them.
        most: longest content [bytes].

    Raises:
        OSError: it cannot be read, or is longer.
        UnicodeDecodeError: it is not UTF-8, and errors are strict.
    """
    content = bytearray()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            content += piece
            if len(content) > most:
                raise OSError(errno.EFBIG, f"it has more than {most >> 20:,} MiB", str(path))
    return content.decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


def check_plain(path: Path) -> None:
    """Refuse what is there and is no plain file.

    Raises:
        OSError: nothing of that name, or a pipe, a device or a folder.
    """
    mode = path.stat().st_mode
    if S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def _write(path: Path, content: bytes, *, new: bool) -> None:
    try:
        status = path.stat()
    except FileNotFoundError:
        write_whole(Path(os.path.realpath(path)), lambda file: file.write(content))  # where a link leads to
        return
    # The file that a stream of this process is redirected to, in whatever words: it goes on where the stream stands.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a stream without a file, or closed
            if os.path.samestat(status, os.fstat(stream.fileno())):
                stream.flush()
                stream.buffer.write(content)
                stream.flush()
                return
    if not S_ISREG(status.st_mode):
        _write_into(path, content)
        return
    if new:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    target = Path(os.path.realpath(path))

    def write(file: BinaryIO) -> None:
        os.fchmod(file.fileno(), S_IMODE(status.st_mode))
        file.write(content)

    try:
        write_whole(target, write)
    except OSError as error:
        if error.errno not in _NO_NEW_FILE:
            raise
        _write_into(target, content)


def _write_into(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
