"""A cost model, a clock and a device of which a test knows and moves all.

A `Device` stands where CUDA would: the host launches work and goes on at once, the device does it in order, and marks
(`headway.meter.clock.Mark`) pass when the device comes to them. Nothing sleeps, so a run of hours takes milliseconds.
"""

import functools
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

from headway.count import CostModel
from headway.count.rows import Gradient, Parameter, Row
from headway.meter import Goodput

COST_MODEL = CostModel(
    name="one-linear",
    rows=(
        Row(
            module="layers.0.proj",
            op="linear",
            component="language.mlp",
            driver="tokens",
            forward=30,
            gradients=(Gradient("dgrad", 30, 1), Gradient("wgrad", 30, 1)),
            block="layers.0",
            recomputed=True,
            features=(3, 5),
        ),
    ),
    parameters=(Parameter("layers.0.proj.weight", 15, 15, "language.mlp"),),
)


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


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

    def working(self, owner, name, *, host_s=0.0, device_s=0.0):
        """Patch a function that a real loop calls: its work is this device's; what it does takes no pretended time."""
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def worked(*args, **kwargs):
            self.work(host_s)
            if device_s:
                self.launch(device_s)
            return plain(*args, **kwargs)

        return patch.object(owner, name, worked)

    @contextmanager
    def stands_in(self, mark=None):
        """Stand where the host's clock and CUDA's events are; `mark` makes other marks than the device's own."""
        with (
            patch("headway.meter.clock.now_ns", self.now_ns),
            patch("headway.meter.clock.now_s", self.now_s),
            patch("headway.meter.clock.Mark", self.mark if mark is None else lambda *_: mark(self)),
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


HOST_S, DEVICE_S = 0.010, 0.050  # of a step with one micro-batch; four fifths of the device's time are the forward's


class Measured(NamedTuple):
    """What a loop on a pretended device came to.

    Attributes:
        device: it ran on.
        runs: of each process, the meter's window of all its steps.
        seconds: goodput's, by bucket [s].
        wall_s: of all processes [s].
        records: of all windows that were logged.
    """

    device: Device
    runs: list[Any]
    seconds: dict[str, float]
    wall_s: float
    records: list[dict[str, Any]]

    @property
    def num_steps(self):
        return sum(run.num_steps for run in self.runs)

    def hold(self):
        """Hold it to the laws: time has no gaps, and no step is faster than the device."""
        check_time([run.wall_s for run in self.runs], self.seconds, self.wall_s)
        for run in self.runs:
            reachable = run.flops.total / (run.num_steps * DEVICE_S) / run.peak.flops_per_s
            assert run.mfu <= reachable * (1 + TOLERANCE)
        waited_s = sum(run.data_wait_s for run in self.runs)
        assert abs(self.seconds["data wait"] - waited_s) <= TOLERANCE * self.wall_s


def measured(*processes, depth=1_000, mark=None):
    """Run a loop on a pretended device, in as many processes as it is resumed in.

    Args:
        processes: functions of the device and of what `Meter` takes, which return the window of the run.
        depth: of the queue.
        mark: as for `Device.stands_in`.
    """
    device, records, runs, wall_s = Device(depth), [], [], 0.0
    with device.stands_in(mark), TemporaryDirectory() as folder:
        for process in processes:
            start_ns = device.host_ns
            path = Path(folder, "goodput.jsonl")
            with Goodput(path, wall_clock=device.now_s, heartbeat_s=1e6) as ledger:
                device.work(0.3)  # set-up, and work that is queued before the first step
                device.launch(0.5)
                runs.append(process(device, goodput=ledger, on_window=lambda w: records.append(w.to_dict())))
                device.work(0.7)  # after the end
                seconds = ledger.report().seconds
            wall_s += (device.host_ns - start_ns) / 1e9
    return Measured(device, runs, seconds, wall_s, records)


RATE = 1e14  # useful FLOP/s of one device


@dataclass(frozen=True)
class PretendedStep:
    step_s: float


def pretended_step(config, packs, again=None):
    """Time a step by its FLOPs: half a second for each pack, and a third more where backward recomputes each block."""
    share = (again or {"none": 0.0, "full": 1 / 3}).get(config.speed.recompute, 0.2)
    ranks = config.parallel.mesh_shape(config.plan.devices).world_size
    return PretendedStep(packs.flops.total / (ranks * RATE) * (1 + share) + 0.5 * config.optim.accumulation)


@functools.cache
def length_table(count=6000, longest=4000):
    """Lengths of samples of text, the same each time."""
    import numpy as np

    from headway.packing.lengths import LengthTable

    rng = np.random.default_rng(0)
    tokens = rng.integers(longest // 20, longest, count)
    none = np.zeros((0, 3), dtype=np.int64)
    return LengthTable(tokens, np.zeros_like(tokens), none, none[:, 0])
