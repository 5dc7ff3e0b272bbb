"""Where Headway keeps what it can make again: ceilings, length indices, encoded samples, copies and places of rows."""

import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from headway.errors import UsageError

CACHE_VARIABLE = "HEADWAY_CACHE"


def cache_root() -> Path:
    """Name the cache's folder, there or not: $HEADWAY_CACHE, $XDG_CACHE_HOME/headway or ~/.cache/headway.

    Raises:
        UsageError: the variable holds a URL.
    """
    folder = os.environ.get(CACHE_VARIABLE)
    if folder and "://" in folder:
        raise UsageError(f"{CACHE_VARIABLE} is {folder}, but must be a folder of this machine.")
    if folder:
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that any reader sees all of it or none: under another name, made sure of, then renamed.

    Args:
        path: the file's own name; its folder is made if missing.
        write: writes the content into the open file.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = f"{platform.node()}-{os.getpid()}-{threading.get_ident()}"  # another process may write the same file now
    unfinished = path.with_name(f".{path.name}.{writer}")
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
