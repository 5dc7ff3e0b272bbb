"""Outputs behind URLs: object stores and other file systems that fsspec opens, as the places of files and folders.

A path that was made of a URL keeps it: `Path("s3://bucket/run")` is `s3:/bucket/run`, whose first part no file of this
machine is meant by. So an output may be a URL wherever it may be a path, and joins and parents work on both. What has
to be written piece by piece, as records and weights, is written to a folder of the cache that stands for the URL, its
*spool*, and sent from there, because a store takes whole objects only and appends nothing.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from headway.cache import cache_root
from headway.errors import StoreError, UsageError, first_line

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)
_SPOOLS = "spools"
_UNSENT = re.compile(r"\..*|.*\.writing")  # a lock, or what is being written under another name


def url_of(path: str | Path) -> str | None:
    """The URL that a path was made of; None for a path of this machine.

    >>> url_of(Path("s3://bucket/run") / "metrics.jsonl"), url_of(Path("file:///tmp/x")), url_of(Path("runs/x"))
    ('s3://bucket/run/metrics.jsonl', 'file:///tmp/x', None)
    """
    match = _URL.fullmatch(os.fspath(path))
    if match is None:
        return None
    return f"{match[1]}://{'/' if match[1] == 'file' else ''}{match[2]}"


def shown(path: Path) -> str:
    """A place in words: the URL that a path was made of or is the spool of, or the path itself."""
    return url_of(place(path)) or str(path)


def spool(path: Path) -> Path:
    """The folder on this machine that stands for a URL; the path itself where it is no URL."""
    if url_of(path) is None:
        return path
    scheme, *parts = path.parts
    return cache_root() / _SPOOLS / scheme.removesuffix(":") / Path(*parts)


def place(path: Path) -> Path:
    """The place that a path below a spool stands for; the path itself where it is no such path."""
    root = cache_root() / _SPOOLS
    if not path.is_relative_to(root) or path == root:
        return path
    scheme, *parts = path.relative_to(root).parts
    return Path(f"{scheme}:/", *parts)


def refuse(path: Path, purpose: str) -> None:
    """Refuse a URL for what is written piece by piece where it lies.

    Args:
        path: where it is to lie.
        purpose: what it is, as the subject of a sentence.

    Raises:
        UsageError: it is a URL.
    """
    if (url := url_of(path)) is not None:
        raise UsageError(f"{purpose} is {url}, and cannot lie behind a URL. Give a path of this machine.")


def open_system(path: Path) -> tuple[Any, str]:
    """The file system behind a URL, and the place in it.

    Raises:
        UsageError: none is installed for its scheme.
    """
    url = url_of(path)
    assert url is not None
    try:
        import fsspec

        system, inside = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # of unknown protocols, and of packages that are missing
        raise UsageError(
            f"{url} cannot be written or read: {first_line(error).rstrip('.')}. Give a path of this machine, or "
            "install what opens such URLs (s3fs for s3://, gcsfs for gs://)."
        ) from error
    return system, str(inside)


@contextmanager
def store_errors(path: Path, doing: str = "cannot be reached") -> Iterator[None]:
    """Say in one sentence whatever a store's client raises.

    Raises:
        StoreError: the store refused something, or does not answer.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        if isinstance(error, StoreError | UsageError):
            raise
        raise StoreError(f"{shown(path)} {doing}: {first_line(error).rstrip('.')}.") from error


def exists(path: Path) -> bool:
    """Whether something is at a place, here or behind a URL."""
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
        return cast(BinaryIO, system.open(inside, "rb"))


def read_bytes(path: Path) -> bytes:
    """All of a file, here or behind a URL.

    Raises:
        OSError: it cannot be read.
    """
    with open_file(path) as file, store_errors(path, "cannot be read"):
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
    """Delete a folder and all within; what is not there stays so.

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


def fetch(target: Path, wanted: Callable[[str], bool] = lambda _: True) -> Path:
    """Copy a folder behind a URL into its spool, but for files that are there as they are in the store.

    Args:
        target: the URL of a file or folder; one that is not there leaves an empty spool.
        wanted: whether a file is, by its path below the folder.

    Returns:
        The spool; a path of this machine is returned as it is.
    """
    if url_of(target) is None:
        return target
    system, inside = open_system(target)
    here = spool(target)
    with store_errors(target, "cannot be read"):
        system.invalidate_cache()
        files = system.find(inside, detail=True)
        for name, info in sorted(files.items()):
            below = "" if name.rstrip("/") == inside.rstrip("/") else name[len(inside) :].strip("/")
            if below and not wanted(below):
                continue
            path = here / below if below else here
            if _is_copy(path, info):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}.{os.getpid()}")
            system.get_file(name, str(unfinished))
            unfinished.replace(path)
    return here


class Mirror:
    """Sends what changes in a spool to the place that it stands for.

    Args:
        folder: the spool of a run.
        left_out: names of folders in it that are not sent.
    """

    def __init__(self, folder: Path, left_out: tuple[str, ...]) -> None:
        self._folder, self._left_out = folder, left_out
        self._sent: dict[str, tuple[int, int]] = {}

    def send(self) -> None:
        """Send every file that is new or another than when it was sent.

        Raises:
            StoreError: the store refuses one.
        """
        for name, stamp in self._stamps().items():
            if self._sent.get(name) != stamp:
                send(self._folder, place(self._folder), [name])
                self._sent[name] = stamp

    def _stamps(self) -> dict[str, tuple[int, int]]:
        stamps = {}
        for path in self._folder.rglob("*"):
            parts = path.relative_to(self._folder).parts
            if parts[0] in self._left_out or any(map(_UNSENT.fullmatch, parts)):
                continue
            with suppress(FileNotFoundError):  # renamed or deleted meanwhile
                status = path.stat()
                if path.is_file():
                    stamps["/".join(parts)] = (status.st_size, status.st_mtime_ns)
        return stamps


def _is_copy(path: Path, info: dict[str, Any]) -> bool:
    """Whether a file here is as large as an object and was fetched after the object was written."""
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
