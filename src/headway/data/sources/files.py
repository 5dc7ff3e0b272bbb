"""Files of a dataset, local or behind any fsspec URL: listing, identity, opening and decompression."""

import gzip
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from errno import ENOENT
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from headway.cache import cache_root, write_whole
from headway.errors import DataError, first_line
from headway.files import is_utf8
from headway.stores import as_os_errors, open_url, url_system

T = TypeVar("T")

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
# Content fields of fsspec's stores, best first.
_CONTENT_FIELDS = ("content-md5", "md5hash", "blob-id", "etag", "last-modified")
_GLOB = re.compile(r"[*?\[]")
HEAD_BYTES = 64
_PAGES = ("", ".txt", ".md", ".html", ".htm", ".xhtml", ".xml")  # texts, of which a web page may be one
_MOST_PATHS = 3_000_000  # most paths of a glob; the largest public folders of pictures have half as many
_OPEN_FILES = 64  # kept open for random access, per process; well below the usual limit of 1024


@dataclass(frozen=True, slots=True)
class File:
    """One file of a dataset.

    Attributes:
        url: path or fsspec URL.
        size: bytes as stored; None where the store does not say.
        stamp: changes when the content does: size and time of modification, or what a remote store says of it. Empty
            where it is not looked at, as of a copy in the cache, which other processes may replace by the same.
        name: path below the root of the dataset: the folder that was named, or the one before a glob's first star.
    """

    url: str
    size: int | None
    stamp: str
    name: str = field(default="", compare=False, repr=False)

    @property
    def is_local(self) -> bool:
        """True if the file's address is a path of this machine."""
        return "://" not in self.url

    @property
    def changed(self) -> str:
        """Time of modification of a local file [ns], or a remote store's stamp of the content."""
        return self.stamp.rpartition("-")[2] if self.is_local else self.stamp

    @property
    def has_tag(self) -> bool:
        """True if a remote store has a stamp that changes with the content."""
        return "=" in self.stamp

    @property
    def compression(self) -> str | None:
        """Compression of its content, by its extension: "gzip", "zstd" or not at all."""
        suffix = Path(without_query(self.url)).suffix.lower()
        return "gzip" if suffix == ".tgz" else COMPRESSIONS.get(suffix)

    @property
    def extension(self) -> str:
        """The extension of its name, in lower case, without that of its compression."""
        path = Path(without_query(self.url))
        return (path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path).suffix.lower()

    @property
    def folder(self) -> str:
        """The folder or URL that the file lies in."""
        return str(Path(self.url).parent) if self.is_local else without_query(self.url).rpartition("/")[0]

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open for reading from start to end, decompressed.

        Raises:
            DataError: the file changed since it was found, or while it was read to its end.
            OSError: it cannot be opened. What reading raises then is the libraries' own.
        """
        with ExitStack() as stack:
            if self.is_local:
                raw: Any = stack.enter_context(Path(self.url).open("rb"))
                self.check(os.fstat(raw.fileno()))
            else:
                raw = stack.enter_context(open_url(self.url))
            self.check_head(raw.peek(HEAD_BYTES)[:HEAD_BYTES])
            if self.compression == "gzip":
                raw = stack.enter_context(gzip.GzipFile(fileobj=raw))
            elif self.compression == "zstd":
                # Arrow's reader knows several frames in a file and tells a truncated one; zstandard's knows neither.
                raw = stack.enter_context(io.BufferedReader(cast(Any, pa.CompressedInputStream(raw, "zstd"))))
            yield raw
            if self.is_local:
                self.check(Path(self.url).stat())

    def check_head(self, head: bytes) -> None:
        """Refuse the files that other programs leave in place of data.

        Args:
            head: the first `HEAD_BYTES` as stored.

        Raises:
            OSError: it is a pointer of Git LFS, or a web page under a name that promises none.
        """
        if head.startswith(b"version https://git-lfs.github.com/"):
            raise OSError("it is a pointer that Git LFS left in place of the file, which `git lfs pull` fetches")
        if head.lstrip().lower().startswith((b"<!doctype html", b"<html")) and self.extension not in _PAGES:
            raise OSError("it is a web page in place of the file, such as one to sign in at")

    def check(self, status: os.stat_result) -> None:
        """Refuse a local file that is another one than was found."""
        if self.stamp not in ("", _stamp(status)):
            raise DataError(
                f"The file {self.url} changed while it was in use: it has {status.st_size} bytes now, and had "
                f"{self.size}. Leave a dataset as it is during a run, and open it again after changing it."
            )


def without_query(url: str) -> str:
    """An address without its query, where signatures stand; a path of this machine as it is.

    >>> without_query("https://host/t.jsonl?X-Amz-Signature=ab/cd.ef")
    'https://host/t.jsonl'
    """
    return url.partition("?")[0].partition("#")[0] if "://" in url else url


def find_files(path: str) -> tuple[list[File], str | None]:
    """Find the files that a path, glob or URL names, in the order of their names.

    Returns:
        The files; and the folder that was named, which stands for all files within but hidden ones, or None.

    Raises:
        DataError: there are none, or they cannot be reached.
    """
    try:
        with as_os_errors():
            return _found(path)
    except (OSError, ImportError) as error:  # ImportError: the library of a protocol is not installed
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(
            f"The dataset {path} cannot be read: {reason}. Give the path of a file or folder, a glob, or a URL."
        ) from error


def _found(path: str) -> tuple[list[File], str | None]:
    system, inside = url_system(path)
    # A single file's root is its folder; on this machine it keeps the path as it was written. A web server is asked
    # once: it has no folders, and says of what it does not give why.
    is_page = path.lower().startswith(("http://", "https://")) and not _GLOB.search(without_query(path))
    kind = "file" if is_page else _kind(system, inside)
    if kind == "file":
        is_plain = isinstance(system, LocalFileSystem) and "://" not in path
        root = without_query(inside).rpartition("/")[0]
        return [_file(system, path if is_plain else inside, root)], None
    folder = None
    # A folder stands for all files within, a glob for those it matches; hidden ones only where a glob names them.
    if kind == "directory":
        folder = _file_url(system, inside)
        paths = _walk(inside, None) if isinstance(system, LocalFileSystem) else system.find(inside)
        names = sorted(name for name in paths if not _is_hidden(name[len(inside) :]))
    else:
        names = sorted(_glob(system, inside))
        if not Path(inside).name.startswith("."):  # a shell leaves hidden files out, too
            names = [name for name in names if not Path(name).name.startswith(".")]
    if folder and not names:
        raise DataError(
            f"The dataset {path} is a folder without files (those whose names begin with . or _ are not looked at). "
            "Put the dataset into it, or name another path."
        )
    if not names:
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
    # Names below the root, so that a copy elsewhere is the same data.
    root = inside if folder else _GLOB.split(inside, maxsplit=1)[0].rpartition("/")[0]
    return [_file(system, name, root) for name in names], folder


def _kind(system: Any, inside: str) -> str | None:
    """Either "file" or "directory"; None of a missing path. fsspec's `isfile` would take any failure for a no."""
    if isinstance(system, LocalFileSystem):
        return "file" if system.isfile(inside) else "directory" if system.isdir(inside) else None
    try:
        return str(system.info(inside)["type"])
    except FileNotFoundError:
        return None


def _glob(system: Any, pattern: str) -> Iterator[str]:
    """Files that a glob names, as fsspec reads globs; on this machine without a list of the files around them."""
    pattern = re.sub(r"(\*\*/)+", "**/", pattern)  # each would be tried at every depth
    if not isinstance(system, LocalFileSystem):
        if "**" in pattern and pattern.lower().startswith(("http://", "https://")):
            raise DataError(f"The dataset {pattern} would follow all links of its server. Name its folders one by one.")
        yield from (name for name, info in system.glob(pattern, detail=True).items() if info["type"] == "file")
        return
    before = _GLOB.split(pattern, maxsplit=1)[0].rpartition("/")[0] + "/"
    depth = None if "**" in pattern else pattern[len(before) :].count("/") + 1
    matches = re.compile(glob_translate(pattern)).match
    yield from (name for name in _walk(before, depth) if matches(name))


def _walk(folder: str, most_depth: int | None) -> Iterator[str]:
    """Files below a folder of this machine, through no link to a folder; too many for a dataset are refused."""
    num_paths, waiting = 0, [(folder.rstrip("/"), 1)]
    while waiting:
        path, depth = waiting.pop()
        with suppress(OSError), os.scandir(path or "/") as entries:  # gone meanwhile, or not ours to read
            for entry in entries:
                num_paths += 1
                if num_paths > _MOST_PATHS:
                    raise DataError(
                        f"Below {folder} lie more than {_MOST_PATHS:,} files and folders, too many to look through. "
                        "Name a folder further down."
                    )
                if entry.is_dir(follow_symlinks=False):
                    if most_depth is None or depth < most_depth:
                        waiting.append((f"{path}/{entry.name}", depth + 1))
                elif entry.is_file():
                    yield f"{path}/{entry.name}"


def _file(system: Any, name: str, root: str) -> File:
    inside = without_query(name)
    if not is_utf8(name):
        raise DataError(
            f"The name of the file {name} is not UTF-8, which records, indices and checkpoints keep names in. Rename "
            "it."
        )
    below = inside.removeprefix(root).lstrip("/") if inside.startswith(f"{root}/") else Path(inside).name
    if isinstance(system, LocalFileSystem):
        status = Path(name).stat()
        return File(name, status.st_size, _stamp(status), below)
    info = {key.lower().replace("_", "-"): value for key, value in system.info(name).items()}
    # A stamp changes with the content: its hash, its tag, its time, or else all that the store says of it.
    tags = [f"{field_name}={info[field_name]}" for field_name in _CONTENT_FIELDS if info.get(field_name)]
    stamp = tags[0] if tags else str(system.ukey(name))
    return File(_file_url(system, name), info.get("size"), stamp, below)


def _file_url(system: Any, name: str) -> str:
    return name if isinstance(system, LocalFileSystem) else str(system.unstrip_protocol(name))


def _is_hidden(below: str) -> bool:
    return any(part.startswith((".", "_")) for part in below.split("/"))


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}"


def read_span(file: File, start: int, stop: int) -> bytes:
    """Read bytes of a local file; safe in threads.

    Raises:
        DataError: the file changed since it was found, or ends before `stop`.
        OSError: it cannot be read.
    """
    handle = _handle(file)
    data = os.pread(handle.number, stop - start, start)
    handle.check()  # afterwards, so that what was read is what was there when the rows were counted
    if len(data) < stop - start:
        raise DataError(
            f"The file {file.url} ends at byte {start + len(data)}, but a row reaches to byte {stop}. It was cut while "
            "in use; copy it again."
        )
    return data


class _Handle:
    def __init__(self, file: File) -> None:
        self._file = file
        self.number = os.open(file.url, os.O_RDONLY)
        self.check()

    def check(self) -> None:
        """Make sure that the file has not changed since it was listed; a run reads it for days."""
        self._file.check(os.fstat(self.number))

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


_handle = lru_cache(maxsize=_OPEN_FILES)(_Handle)


def cached_path(file: File, purpose: str) -> Path:
    """Name the place in the cache for data derived from the file's present content."""
    place = file.url if not file.is_local else str(Path(file.url).resolve())
    digest = hashlib.sha256(f"{place}\n{file.stamp}\n{purpose}".encode()).hexdigest()
    return cache_root() / "rows" / digest[:32]


def from_cache(path: Path, load: Callable[[], T | None], make: Callable[[Path], object], content: str) -> T:
    """Content of a file of the cache, made again if the file is missing or damaged, so that `load` gives None."""
    value = load()
    if value is None:
        make(path)
        value = load()
    if value is None:
        raise DataError(
            f"{content} cannot be read from {path}, right after writing it. Look after the disk of the cache, or name "
            "another folder in HEADWAY_CACHE."
        )
    return value


def write_cached(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file of the cache, whole or not at all."""
    try:
        write_whole(path, write)
    except OSError as error:
        raise DataError(
            f"The cache {path.parent} cannot be written: {error.strerror or error}. Free space there, or name another "
            "folder in HEADWAY_CACHE."
        ) from error
