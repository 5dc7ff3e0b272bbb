"""A pretended asynchronous device: a queue and a clock of its own, behind a host whose clock only work moves.

A `Device` stands where CUDA would: the host launches work and goes on at once, the device does it in order, and marks
(`headway.meter.clock.mark`) pass when the device comes to them. Nothing sleeps, so a run of hours takes milliseconds.
"""

from collections import deque
from contextlib import contextmanager
from unittest.mock import patch


class Device:
    """A host and a device.

    Args:
        depth: launches that the queue holds; a host that launches more waits for the oldest.

    Attributes:
        host_ns: the host's clock [ns].
        free_ns: when the device will have done all that it was given [ns].
        busy_ns: time that the device has worked or will work [ns].
        num_waits: how often the host waited for the device, but for a full queue.
    """

    def __init__(self, depth=1_000):
        self.host_ns = 1_000_000_000
        self.free_ns = self.host_ns
        self.busy_ns = 0
        self.num_waits = 0
        self._depth = depth
        self._launched = deque()

    def work(self, seconds):
        """Let the host work."""
        self.host_ns += round(seconds * 1e9)

    def launch(self, seconds):
        """Give the device work."""
        while self._launched and self._launched[0] <= self.host_ns:
            self._launched.popleft()
        if len(self._launched) >= self._depth:
            self.host_ns = max(self.host_ns, self._launched.popleft())
        ns = round(seconds * 1e9)
        self.free_ns = max(self.free_ns, self.host_ns) + ns
        self.busy_ns += ns
        self._launched.append(self.free_ns)

    def wait(self):
        """Let the host wait until the device has done everything, as `.item()` does."""
        self.host_ns = max(self.host_ns, self.free_ns)

    def now_ns(self):
        return self.host_ns

    def now_s(self):
        return self.host_ns / 1e9

    def mark(self, _device=None, _host_s=None):
        return Mark(self)

    @contextmanager
    def stands_in(self, mark=None):
        """Stand where the host's clock and CUDA's events are; `mark` makes other marks than the device's own."""
        with (
            patch("headway.meter.clock.now_ns", self.now_ns),
            patch("headway.meter.clock.mark", self.mark if mark is None else lambda *_: mark(self)),
        ):
            yield self


class Mark:
    """A point in the queue."""

    def __init__(self, device):
        self._device = device
        self.host_s = device.now_s()
        self._passes_ns = max(device.host_ns, device.free_ns)

    def has_passed(self):
        return self._device.host_ns >= self._passes_ns

    def wait(self):
        if not self.has_passed():
            self._device.num_waits += 1
            self._device.host_ns = self._passes_ns

    def seconds_since(self, other):
        assert self.has_passed(), "a time was read off the device before it was there"
        return (self._passes_ns - other._passes_ns) / 1e9


class HostMark(Mark):
    """The defect that the laws are there to catch: times that end when the launch returns."""

    def has_passed(self):
        return True

    def wait(self):
        pass

    def seconds_since(self, other):
        return self.host_s - other.host_s


TOLERANCE = 1e-3


def check_time(step_s, seconds, wall_s):
    """Hold the sum of the steps' times, goodput's buckets and the wall clock against each other, to 0.1 %.

    Args:
        step_s: times of the steps, the wait for data included [s].
        seconds: goodput's, by bucket [s].
        wall_s: the process's time [s].
    """
    in_steps = seconds["step"] + seconds["data wait"]
    others = sum(s for bucket, s in seconds.items() if bucket not in ("step", "data wait"))
    assert abs(sum(step_s) - in_steps) <= TOLERANCE * in_steps
    assert abs(wall_s - others - in_steps) <= TOLERANCE * in_steps
