"""Times of making a pack: reading, decoding and tokenising, each by the clock of the thread that does it."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

Part = Literal["read", "decode", "tokenise"]
"""Reading rows and files from storage; decoding images, videos and sounds; applying templates and tokenising."""

_of_thread = threading.local()


@contextmanager
def charged_to(part: Part) -> Iterator[None]:
    """Charge the time of a block to a part of making packs; what a block within it is charged to has its own.

    >>> _ = take_charges()
    >>> with charged_to("decode"):
    ...     with charged_to("read"):
    ...         pass
    >>> sorted(take_charges())
    ['decode', 'read']
    """
    spent, open_parts = _state()
    begin = perf_counter()
    if open_parts:
        outer, since = open_parts[-1]
        spent[outer] += begin - since
    open_parts.append((part, begin))
    try:
        yield
    finally:
        end = perf_counter()
        _, since = open_parts.pop()
        spent[part] += end - since
        if open_parts:
            open_parts[-1] = (open_parts[-1][0], end)


def take_charges() -> dict[str, float]:
    """Return the seconds that this thread has spent on each part since the last call."""
    spent, _ = _state()
    charges = dict(spent)
    spent.clear()
    return charges


def _state() -> tuple[defaultdict[str, float], list[tuple[str, float]]]:
    if not hasattr(_of_thread, "state"):
        _of_thread.state = defaultdict(float), []
    state: tuple[defaultdict[str, float], list[tuple[str, float]]] = _of_thread.state
    return state
