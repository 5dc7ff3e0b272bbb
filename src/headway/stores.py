"""Files and folders behind URLs: object stores, web servers and other file systems that fsspec opens.

Whatever such a system raises becomes an OSError for inputs (`as_os_errors`) and a StoreError for outputs
(`store_errors`). A file of it ends where its store says, and a server that falls silent is given up.

A path that was made of a URL keeps it: `Path("s3://bucket/run")` is `s3:/bucket/run`, whose first part no file of this
machine is meant by. So an output may be a URL wherever it may be a path, and joins and parents work on both.

A store takes whole objects and appends nothing. So what a run writes piece by piece, as its records, is written to a
folder of the cache that stands for the URL, its *spool*, and sent from there. What is read from a URL by commands that
open local files is copied to another folder of the cache, its *copy*.
"""

import errno
import io
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from headway.cache import cache_root
from headway.errors import StoreError, UsageError, first_line, reraise_own

SILENCE_S = 30.0
"""Time after which a server that takes a connection, or sends, no more is given up [s]; a slow one is waited for."""

_ANSWER_BYTES = 2**26  # longest answer that nobody asked a part of: a page of links
_BUFFER_BYTES = 2**18
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]+):/+(.*)", re.DOTALL)  # with those that one file system hands on
_SPOOLS, _COPIES = "spools", "copies"
_HIDDEN = re.compile(r"\.(?!smoke$|metadata$).*")  # a lock, or what is being written under another name
_SEND_EVERY_S, _SENDING_SHARE = 30.0, 0.05  # time between sends, and the most of all time that they may take


def url_of(path: str | Path) -> str | None:
    """The URL that a path was made of; None for a path of this machine.

    >>> url_of(Path("s3://bucket/run") / "metrics.jsonl"), url_of(Path("file:///tmp/x")), url_of(Path("runs/x"))
    ('s3://bucket/run/metrics.jsonl', 'file:///tmp/x', None)
    """
    match = _URL.fullmatch(os.fspath(path))
    if match is None:
        return None
    scheme = match[1].lower()
    return f"{scheme}://{'/' if scheme.endswith('file') else ''}{match[2]}"


def shown(path: Path) -> str:
    """A place in words: the URL that a path was made of or is the spool of, or the path itself."""
    return url_of(place(path)) or str(path)


def spool(path: Path, kind: str = _SPOOLS) -> Path:
    """The folder on this machine that stands for a URL; the path itself where it is no URL."""
    if url_of(path) is None:
        return path
    scheme, *parts = path.parts
    return cache_root() / kind / scheme.removesuffix(":") / Path(*parts)


def place(path: Path) -> Path:
    """The place that a path below a spool or a copy stands for; the path itself where it is no such path."""
    for root in (cache_root() / _SPOOLS, cache_root() / _COPIES):
        if path.is_relative_to(root) and path != root:
            scheme, *parts = path.relative_to(root).parts
            return Path(f"{scheme}:/", *parts)
    return path


def refuse(path: Path, purpose: str) -> None:
    """Refuse a URL for what is written piece by piece where it lies.

    Args:
        path: where it is to lie.
        purpose: what it is, as the subject of a sentence.

    Raises:
        UsageError: it is a URL.
    """
    if (url := url_of(path)) is not None:
        raise UsageError(f"{purpose} is {url}, but must not be a URL. Give a path of this machine.")


def url_system(url: str) -> tuple[Any, str]:
    """The file system behind a URL, and the URL's path in it. A server's time is bounded by its silence, not by sizes.

    Options of a store, such as {"anon": true} for S3, are fsspec's own: FSSPEC_S3 in the environment, or its files.

    Args:
        url: one that fsspec opens, or a path of this machine.

    Raises:
        OSError: it cannot be reached; so does whatever is done with the system within `as_os_errors`.
        ImportError: the protocol's library is not installed.
        ValueError: fsspec knows no such protocol.
    """
    import fsspec

    is_web = url.partition("://")[0].lower() in ("http", "https")
    system, path = fsspec.core.url_to_fs(url, **({"client_kwargs": _http_bounds()} if is_web else {}))
    return system, path


def open_url(url: str) -> BinaryIO:
    """Open what lies behind a URL to read it.

    Args:
        url: as `url_system` takes it.

    Raises:
        OSError: it cannot be opened. All that reading it raises is one, too, whatever the library behind it raises.
    """
    with as_os_errors():
        return _opened(*url_system(url))


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Run a library of file systems: whatever it raises, such as an HTTP client's own errors, becomes an OSError."""
    try:
        yield
    except BaseException as error:
        reraise_own(error)
        if (translated := _os_error(error)) is error:
            raise
        raise translated from error


@contextmanager
def store_errors(path: Path, doing: str = "cannot be reached") -> Iterator[None]:
    """Run a library of file systems for an output; its "not found" stays what it is.

    Raises:
        FileNotFoundError: the store has no such object.
        StoreError: the store refused something, or does not answer, in one sentence.
    """
    try:
        yield
    except Exception as error:
        reraise_own(error)
        # fsspec's web client says "not found" of every answer, and keeps the answer as the cause
        is_web = type(error.__cause__).__module__.startswith("aiohttp")
        if isinstance(error, FileNotFoundError) and (not is_web or getattr(error.__cause__, "status", 0) in (404, 410)):
            raise
        reason = _os_error(error)
        raise StoreError(f"{shown(path)} {doing}: {reason.strerror or first_line(reason)}.") from error


def _os_error(error: BaseException) -> OSError:
    """A file system's error as an OSError in one line; the error itself where it is one that says why."""
    if isinstance(error, OSError) and (error.errno is not None or (type(error) is OSError and not error.__cause__)):
        return error
    # a store's "not found" may stand for another answer of its server, which it keeps as the cause
    cause = error.__cause__ if isinstance(error, OSError) and error.__cause__ is not None else error
    if isinstance(cause, TimeoutError):
        return TimeoutError(errno.ETIMEDOUT, f"its server was silent for {SILENCE_S:g} s")
    kind = "" if type(cause).__module__ == "builtins" else f"{type(cause).__name__}: "
    return OSError(kind + first_line(cause))


def open_system(path: Path) -> tuple[Any, str]:
    """The file system behind a URL, and the place in it.

    Raises:
        UsageError: none is installed for its scheme.
    """
    url = url_of(path)
    assert url is not None
    try:
        return url_system(url)
    except (ImportError, ValueError) as error:  # an unknown protocol, or a package that is missing
        raise UsageError(
            f"{url} cannot be written or read: {first_line(error)}. Give a path of this machine, or "
            "install what opens such URLs (s3fs for s3://, gcsfs for gs://)."
        ) from error


def exists(path: Path) -> bool:
    """Tell whether something is at a place, here or behind a URL."""
    if url_of(path) is None:
        return path.exists()
    system, inside = open_system(path)
    with store_errors(path):
        system.invalidate_cache()
        return bool(system.exists(inside))


def open_file(path: Path) -> BinaryIO:
    """Open a file to be read, here or behind a URL.

    Raises:
        OSError: it cannot be read.
    """
    if url_of(path) is None:
        return path.open("rb")
    system, inside = open_system(path)
    with store_errors(path, "cannot be read"):
        return _opened(system, inside)


def read_bytes(path: Path) -> bytes:
    """All of a file, here or behind a URL.

    Raises:
        OSError: it cannot be read.
    """
    with store_errors(path, "cannot be read"), open_file(path) as file:
        return file.read()


def size_of(path: Path) -> int | None:
    """Size of a file [bytes]; None where there is none."""
    if url_of(path) is None:
        return path.stat().st_size if path.is_file() else None
    system, inside = open_system(path)
    with store_errors(path), suppress(FileNotFoundError):
        info = system.info(inside)
        return int(info["size"]) if info["type"] == "file" else None
    return None


def write_bytes(path: Path, content: bytes) -> None:
    """Write an object behind a URL, whole or not at all.

    Raises:
        StoreError: the store refuses it.
    """
    system, inside = open_system(path)
    with store_errors(path, "cannot be written"):
        _make_parent(system, inside)
        system.pipe_file(inside, content)


def folders_in(path: Path) -> list[Path]:
    """The folders directly below one, here or behind a URL; none where it is not there."""
    if url_of(path) is None:
        return [below for below in path.iterdir() if below.is_dir()] if path.is_dir() else []
    system, inside = open_system(path)
    with store_errors(path), suppress(FileNotFoundError):
        system.invalidate_cache()
        entries = system.ls(inside, detail=True)
        return [path / _last_part(entry["name"]) for entry in entries if entry["type"] == "directory"]
    return []


def remove(path: Path, first: str = "") -> None:
    """Delete a folder and all within; a missing folder is no error.

    Args:
        path: of the folder, here or behind a URL.
        first: name of the file in it that makes it whole, which goes before all others.
    """
    if url_of(path) is None:
        shutil.rmtree(path, ignore_errors=True)
        return
    system, inside = open_system(path)
    with store_errors(path, "cannot be deleted"):
        system.invalidate_cache()
        if first:
            with suppress(FileNotFoundError):
                system.rm_file(f"{inside}/{first}")
        with suppress(FileNotFoundError):
            system.rm(inside, recursive=True)


def rename(path: Path, target: Path) -> None:
    """Give a folder another name, here or behind a URL, where each object is copied for it."""
    if url_of(path) is None:
        path.rename(target)
        return
    (system, inside), (_, other) = open_system(path), open_system(target)
    with store_errors(path, "cannot be renamed"):
        system.mv(inside, other, recursive=True)
        system.invalidate_cache()


def send(folder: Path, target: Path, names: Iterable[str], *, last: str = "") -> None:
    """Copy files of this machine to a folder behind a URL.

    Args:
        folder: here.
        target: there.
        names: of the files, below both.
        last: the one of them that makes the folder whole, sent after all others.

    Raises:
        StoreError: the store refuses one.
    """
    system, inside = open_system(target)
    for name in sorted(names, key=lambda name: (name == last, name)):
        with store_errors(target / name, "cannot be written"):
            _make_parent(system, f"{inside}/{name}")
            system.put_file(str(folder / name), f"{inside}/{name}")


def fetch(path: Path, wanted: Callable[[str], bool] = lambda _: True, *, here: Path | None = None) -> Path:
    """Copy what lies behind a URL to this machine, but for files that are there as they are in the store.

    Args:
        path: the URL of a file or folder, or a path of this machine.
        wanted: whether a file is, by its path below the folder; one that is, and is not in the store, is deleted here.
        here: where it goes; the URL's copy if None.

    Returns:
        The copy; a path of this machine as it is.

    Raises:
        StoreError: the store cannot be read.
    """
    if url_of(path) is None:
        return path
    system, inside = open_system(path)
    here = here or spool(path, _COPIES)
    with store_errors(path, "cannot be read"):
        system.invalidate_cache()
        infos = {name[len(inside) :].strip("/"): info for name, info in system.find(inside, detail=True).items()}
        infos = {name: info for name, info in infos.items() if not name or wanted(name)}
        for name in [*_files_in(here)]:
            if name not in infos and wanted(name):
                (here / name).unlink()
        for name, info in sorted(infos.items()):
            target = here / name if name else here
            if not _is_copy(target, info):
                target.parent.mkdir(parents=True, exist_ok=True)
                unfinished = target.with_name(f".{target.name}.{os.getpid()}")
                with _opened(system, info["name"]) as source, unfinished.open("wb") as copy:
                    shutil.copyfileobj(source, copy, _BUFFER_BYTES)
                unfinished.replace(target)
    return here


class Mirror:
    """Sends what changes in a spool to the place that it stands for, from time to time and when asked.

    Args:
        folder: the spool of a run.
        left_out: names of folders in it that are not sent.
    """

    def __init__(self, folder: Path, left_out: tuple[str, ...]) -> None:
        self._folder, self._left_out = folder, left_out
        self._sent: dict[str, tuple[int, int]] = {}
        self._turn, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Take what is there for sent, and begin to send what changes."""
        self._sent = dict(self._stamps())
        self._thread = threading.Thread(target=self._send_often, name="headway mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the rest, and no more.

        Raises:
            StoreError: the store refuses it.
        """
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            self.send()

    def send(self) -> None:
        """Send every file that is another than when it was sent.

        Raises:
            StoreError: the store refuses one.
        """
        with self._turn:
            for name, stamp in self._stamps():
                if self._sent.get(name) != stamp:
                    send(self._folder, place(self._folder), [name])
                    self._sent[name] = stamp

    def _send_often(self) -> None:
        pause_s, is_told = _SEND_EVERY_S, False
        while not self._ended.wait(pause_s):
            start_s = time.monotonic()
            try:
                self.send()
            except StoreError as error:  # the next checkpoint sends them too, and fails if they cannot be sent
                if not is_told:
                    warnings.warn(f"The run's records wait here: {error}", RuntimeWarning, stacklevel=1)
                is_told = True
            # records grow, and are sent whole
            pause_s = max(_SEND_EVERY_S, (time.monotonic() - start_s) / _SENDING_SHARE)

    def _stamps(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for name in _files_in(self._folder):
            if name.split("/")[0] not in self._left_out:
                with suppress(FileNotFoundError):  # renamed or deleted meanwhile
                    status = (self._folder / name).stat()
                    yield name, (status.st_size, status.st_mtime_ns)


def _opened(system: Any, inside: str) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(_UrlFile(system, inside), _BUFFER_BYTES))


class _UrlFile(io.RawIOBase):
    """A file of fsspec's whose errors are OSErrors, and whose end is where its store says that it is."""

    def __init__(self, system: Any, path: str) -> None:
        self._system = system  # closes an archive that it reads when it goes
        self._file = system.open(path, "rb")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        with as_os_errors():
            return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        with as_os_errors():
            content = self._file.read(len(buffer))
            size = getattr(self._file, "size", None)
            if not content and size is not None and (place := self._file.tell()) < size:
                raise OSError(f"it ends after {place:,} of the {size:,} bytes that its server promised")
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with as_os_errors():
            self._file.seek(offset, whence)
            return int(self._file.tell())

    def tell(self) -> int:
        with as_os_errors():
            return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            super().close()
            with as_os_errors():
                self._file.close()


def _http_bounds() -> dict[str, Any]:
    """Settings of aiohttp's client: silence ends it, and no answer is longer than what was asked for."""
    import aiohttp

    class Bounded(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            span = self.request_info.headers.get("Range", "").removeprefix("bytes=").split("-")
            is_span = len(span) == 2 and all(map(str.isdecimal, span))
            most = int(span[1]) - int(span[0]) + 1 if is_span else _ANSWER_BYTES
            if self._body is None:
                content = bytearray()
                while piece := await self.content.read(_BUFFER_BYTES):
                    content += piece
                    if len(content) > most:
                        self.close()
                        raise OSError(f"its server sends more than the {most:,} bytes that were asked for")
                self._body = bytes(content)
            return self._body

    return {
        "timeout": aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S),
        "response_class": Bounded,
    }


def _files_in(folder: Path) -> Iterator[str]:
    """The files below a folder, by their paths from it; not those that are hidden, or in hidden folders."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(map(_HIDDEN.fullmatch, parts)):
            yield "/".join(parts)


def _is_copy(path: Path, info: dict[str, Any]) -> bool:
    """Tell whether a file here is as large as an object and was fetched after the object was written."""
    written = info.get("LastModified") or info.get("mtime") or info.get("created") or info.get("updated")
    if not path.is_file() or path.stat().st_size != info["size"] or written is None:
        return False
    since = getattr(written, "timestamp", lambda: written)()
    return isinstance(since, int | float) and path.stat().st_mtime > since


def _make_parent(system: Any, inside: str) -> None:
    """Make the folder of an object, where the store has folders; an object store's buckets are its user's to make."""
    parent = inside.rpartition("/")[0]
    if parent.strip("/").count("/") > 0:
        system.makedirs(parent, exist_ok=True)


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[-1]
