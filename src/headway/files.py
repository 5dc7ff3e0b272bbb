"""Files that a user names, or that lie in a folder of a stranger's.

To be written: a plain file is replaced at once, a folder gets its name once all of it is there, a URL is written by
the file system behind it, anything else is written into. To be read: a plain file alone, because to open a pipe waits
for whoever writes it, perhaps for ever.
"""

import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from stat import S_IMODE, S_ISDIR, S_ISREG
from typing import BinaryIO, TextIO

from headway import stores
from headway.cache import write_whole
from headway.errors import CheckpointError, HeadwayError, StoreError, UsageError, first_line

MOST_BYTES = 2**30
"""Longest text that is read whole, such as a log."""

SETTINGS_BYTES = 2**22
"""Longest file of settings."""

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")  # the end of messages of Rust's libraries, safetensors among them
_PROBE_BYTES = 2**20
# A file alone may be open to writing, or be mounted by itself, in a folder where no other can be made.
_NO_NEW_FILE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS, errno.EXDEV)


def write_output(path: Path, content: bytes | str, *, option: str = "", new: bool = False) -> None:
    """Write what a user asked for under a name of theirs.

    A plain file, or a name without a file, gets the whole content or none, and the permissions that it had. A link is
    followed. A device, a pipe and a process's own streams (/dev/null, /dev/stdout) are written into: to rename a
    file over them would take them away from every program of the machine. A URL gets one object.

    Args:
        path: the name; its folder is made if missing.
        content: text is written as UTF-8.
        option: of the command line that named it, for errors: "--plot".
        new: refuse a plain file that is there already.

    Raises:
        UsageError: it cannot be written.
    """
    content = content.encode() if isinstance(content, str) else content
    shown = f"{option} {stores.shown(path)}".strip()
    try:
        if stores.url_of(path) is None:
            _write(path, content, new=new)
        elif new and stores.exists(path):
            raise FileExistsError
        else:
            stores.write_bytes(path, content)
    except StoreError as error:
        raise UsageError(f"{option} {error} Give another place.".strip()) from error
    except FileExistsError as error:
        raise UsageError(f"{shown} exists already. Give another file, or delete this one first.") from error
    except OSError as error:
        raise UsageError(f"{shown} cannot be written: {error.strerror or error}. Give another file.") from error


@contextmanager
def open_output(path: Path, *, option: str = "") -> Iterator[TextIO]:
    """Open a new file, a pipe or a device to write text line by line; a URL's object is made at the end.

    Args:
        path: the name.
        option: of the command line that named it, for errors: "--output".

    Raises:
        UsageError: a plain file of this name is there, or it cannot be written.
    """
    name = f"{option} {stores.shown(path)}".strip()
    if is_taken(path):
        raise UsageError(f"{name} exists already. Give another file, or delete this one first.")
    is_url = stores.url_of(path) is not None
    with tempfile.TemporaryDirectory() if is_url else nullcontext() as folder:
        target = Path(str(folder), path.name) if is_url else path
        try:
            with target.open("w" if target.exists() else "x", encoding="utf-8") as file:
                yield file
        except OSError as error:
            raise UsageError(f"{name} cannot be written: {error.strerror or error}. Give another file.") from error
        finally:
            if is_url and target.is_file():
                write_output(path, target.read_bytes(), option=option)


def is_taken(path: Path) -> bool:
    """Tell whether a plain file or a folder has the name already; a device or a pipe is there to be written into."""
    return path.is_file() or path.is_dir() or (stores.url_of(path) is not None and stores.exists(path))


@contextmanager
def new_folder(path: Path, *, last: str = "") -> Iterator[Path]:
    """A folder to write a model into, which gets its name once it is complete; a failure leaves nothing.

    Args:
        path: its name, or a URL; nothing may be there but an empty folder.
        last: name of the file that makes it whole, which a store gets after all others.

    Raises:
        UsageError: something is there, or no file system of the URL's scheme is installed.
        CheckpointError: the disk or the store refuses to take it, in the system's words or in a library's.
    """
    target = stores.place(path)
    is_url = stores.url_of(target) is not None
    if stores.exists(target) and (is_url or not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{stores.shown(path)} exists already. Give another folder, or delete this one first.")
    home = stores.spool(target)
    temporary = home.with_name(f".{home.name}.writing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        if is_url:
            files = [file.relative_to(temporary).as_posix() for file in temporary.rglob("*") if file.is_file()]
            stores.send(temporary, target, files, last=last)
            shutil.rmtree(temporary)
        else:
            if path.is_dir():
                path.rmdir()
            temporary.rename(path)
    except Exception as error:
        is_own = isinstance(error, HeadwayError) and not isinstance(error, StoreError)
        reason = None if is_own else write_failure(error, temporary)  # asked before there is room again
        if reason is None:
            raise
        raise CheckpointError(
            f"cannot write the model folder {stores.shown(path)}: {reason}. Make room or give another folder."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_failure(error: BaseException, folder: Path) -> str | None:
    """The reason why a write failed, as the system says it, also where a library has words of its own.

    safetensors raises an error of its own, PyTorch speaks of an unexpected position and NumPy of items. Where an error
    does not hold the system's number, the system is asked again, by another file in the same folder.

    Args:
        error: that came out of writing.
        folder: that was written to, as it was left.

    Returns:
        The reason, without a full stop; None if the error is of something else.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        if isinstance(cause, StoreError):
            return first_line(cause)
        if (number := _SYSTEM_ERROR.search(str(cause))) is not None:
            return os.strerror(int(number[1]))
        cause = cause.__cause__ or cause.__context__
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as refusal:
        return refusal.strerror
    return first_line(error) if isinstance(error, OSError) else None


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file to be read.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a folder.
    """
    check_plain(path)
    return path.open("rb")


def read_text(path: Path, *, errors: str = "strict", most: int = MOST_BYTES) -> str:
    """Read a file that a user names as UTF-8, also from a pipe; a file without end, like /dev/zero, is refused.

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


def is_utf8(name: str) -> bool:
    """Tell whether a name can be written in UTF-8; Python reads other names of files as halves of surrogate pairs."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def check_plain(path: Path) -> None:
    """Refuse an existing path that is no plain file.

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
        write_whole(Path(os.path.realpath(path)), lambda file: file.write(content))  # a link is followed to its target
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
