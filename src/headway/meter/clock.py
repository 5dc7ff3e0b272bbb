"""The one clock: the host's time, and points in a device's queue whose times are read once the device has passed them.

Everything that times a step or charges a second asks here, so that a test can put a pretended device in its place.
"""

from __future__ import annotations

import time
from typing import Any


def now_ns() -> int:
    """Read the host's monotonic clock [ns]."""
    return time.monotonic_ns()


def now_s() -> float:
    """Read the host's monotonic clock [s]."""
    return now_ns() / 1e9


class Mark:
    """A point in a loop: when the host came by, and on a CUDA device the place in its queue.

    Args:
        device: a `torch.device`, or None for the CPU, which has no queue: what the host has passed is done.
        host_s: reading of the host's clock [s].
    """

    def __init__(self, device: Any, host_s: float) -> None:
        self.host_s = host_s
        self._event: Any = None
        if device is not None and device.type == "cuda":
            import torch

            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._event.record(torch.cuda.current_stream(device))

    def has_passed(self) -> bool:
        """Say whether the device has passed this point; never waits."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until the device has passed this point."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, other: Mark) -> float:
        """Measure the time between two points that the device has passed, by its own clock if it has one [s]."""
        if self._event is None:
            return self.host_s - other.host_s
        return float(other._event.elapsed_time(self._event)) / 1e3


def mark(device: Any = None, host_s: float | None = None) -> Mark:
    """Mark the point that the host, and a device's queue, have reached now.

    Args:
        device: a `torch.device`, or None for the CPU.
        host_s: reading of another host clock than `now_s` [s].
    """
    return Mark(device, now_s() if host_s is None else host_s)
