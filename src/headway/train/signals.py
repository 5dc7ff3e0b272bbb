"""Signals that ask a run to stop: it finishes its step, saves and ends, as all its processes agree."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Ctrl-C, and what Slurm, Kubernetes and torchrun send before they kill.
STOPPING = (signal.SIGINT, signal.SIGTERM)
NAMES = {int(signal.SIGINT): "Ctrl-C", int(signal.SIGTERM): "SIGTERM"}


@contextmanager
def stop_requests() -> Iterator[Callable[[], int]]:
    """Turn Ctrl-C and SIGTERM into a wish to stop after the step; a second Ctrl-C interrupts at once.

    Yields:
        A function that gives the number of the signal that came, 0 as long as none has.
    """
    wished: list[int] = []

    def wish(number: int, _frame: FrameType | None) -> None:
        wished.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[signal.SIGINT])

    def wish_of() -> int:
        return wished[0] if wished else 0

    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread only
        yield wish_of
        return
    before = {number: signal.signal(number, wish) for number in STOPPING}
    try:
        yield wish_of
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
