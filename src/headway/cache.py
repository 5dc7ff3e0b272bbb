"""Where Headway keeps what it can make again: measured ceilings, length indices."""

import os
from pathlib import Path

CACHE_VARIABLE = "HEADWAY_CACHE"


def cache_root() -> Path:
    """Name the cache's folder, there or not: $HEADWAY_CACHE, $XDG_CACHE_HOME/headway or ~/.cache/headway."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"
