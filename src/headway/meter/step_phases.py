"""Phases of a step that its loop names, such as rollout, reference and update: their times and devices."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.devices import Peak
from headway.errors import UsageError
from headway.meter.clock import Mark, Span

REST = "rest"
"""Name in a record of the time that no phase claims."""


@dataclass(frozen=True)
class PhaseDevices:
    """Devices of a phase that does not run on the devices of the loop's ranks, such as a server that generates."""

    peak: Peak  # peak of one device
    num_devices: int
    memory_bytes_per_s: float = math.nan  # bandwidth of one device's memory [B/s]; NaN if it is not known


@dataclass(eq=False)
class NamedPhase:
    """A named phase of a step, while the loop is in it.

    Attributes:
        busy_s: time that the phase's own devices worked [s], where they tell it, as those of a server do that
            generates while the loop does something else; as long as the loop was in the phase when None.
    """

    name: str
    forward_only: bool = False  # whether what is counted in it has no backward
    devices: PhaseDevices | None = None  # devices of the phase; None for the devices of the ranks
    busy_s: float | None = None


class PhaseTimes(NamedTuple):
    """Times of the named phases of one step."""

    spans: list[tuple[str, Span]]  # in their order; none lies within another
    busy_s: dict[str, float]  # working time of the phases whose own devices told it [s]


@dataclass
class PhaseClock:
    """Notes when named phases begin and end. A phase within another interrupts it; nothing is waited for.

    Args:
        mark: makes a mark in the device's queue.
    """

    mark: Callable[[], Mark]
    devices: dict[str, PhaseDevices] = field(default_factory=dict)  # phases that have devices of their own
    current: NamedPhase | None = None  # the phase that lasts, the innermost of several
    _stack: list[NamedPhase] = field(default_factory=list)
    _since: Mark | None = None  # since when the innermost phase lasts; None while it is interrupted
    _spans: list[tuple[str, Span]] = field(default_factory=list)
    _busy_s: dict[str, float] = field(default_factory=dict)

    def enter(self, phase: NamedPhase) -> None:
        """Begin a phase.

        Raises:
            UsageError: its name is empty or that of what no phase claims, or it had other devices before.
        """
        if not phase.name or phase.name == REST:
            raise UsageError(f"a phase cannot be called {phase.name!r}; {REST!r} is what no phase claims.")
        if self.devices.get(phase.name, phase.devices) != phase.devices:
            raise UsageError(
                f"the phase {phase.name!r} had other devices before: give it the same each time, or another name."
            )
        if phase.devices is not None:
            self.devices[phase.name] = phase.devices
        self.interrupt(mark := self.mark())
        self._stack.append(phase)
        self.current, self._since = phase, mark

    def leave(self) -> None:
        """End the innermost phase; the one around it goes on."""
        self.interrupt(mark := self.mark())
        phase = self._stack.pop()
        self.current = self._stack[-1] if self._stack else None
        if phase.busy_s is not None:
            self._busy_s[phase.name] = self._busy_s.get(phase.name, 0.0) + phase.busy_s
        self.resume(mark)

    def interrupt(self, mark: Mark) -> None:
        """Note that time until `resume` is in no phase, since the loop is away from training."""
        if self.current is not None and self._since is not None:
            self._spans.append((self.current.name, Span(self._since, mark)))
        self._since = None

    def resume(self, mark: Mark) -> None:
        """Go on with the innermost phase, if there is one."""
        self._since = None if self.current is None else mark

    def take(self, end: Mark) -> PhaseTimes:
        """Give the times of a step that ends; a phase that lasts goes on in the next one."""
        if self.current is not None:
            self.interrupt(end)
            self.resume(end)
        times = PhaseTimes(self._spans, self._busy_s)
        self._spans, self._busy_s = [], {}
        return times
