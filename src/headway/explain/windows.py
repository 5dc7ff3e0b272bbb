"""Windows of a trace's steps: from a step's begin on the host to the end of its work, without gaps and overlaps.

A step begins with its annotation on the host, so that waiting for data, collating and all else that precedes its first
kernel is its own time. It ends at the later of its end on the host and the end of its kernels. The host runs ahead:
while it launches step 12 the device may still work on step 10. That time is step 10's; step 12 begins when what was
launched before it has ended. On the stream that computes, kernels run in the order of their launches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from headway.errors import ConfigError
from headway.explain.events import NONE, Column, Kind, Trace
from headway.words import Argument

_WHOLE_TRACE = 0  # number of the one "step" of a trace that is taken whole


@dataclass(frozen=True, slots=True)
class StepWindow:
    """A step's time."""

    step: int  # number of the step
    start_ns: int  # beginning [ns]
    end_ns: int  # end [ns]; the next step begins there, if it has the next number
    # the first or the last of a trace of a device: the host was not ahead yet, or launched no step after it
    is_edge: bool = False
    # duration of its annotation on the host, of a whole trace that of all its events there [ns]; None where the host
    # has no events
    host_ns: int | None = None
    # from the first of the events that it launched to the end of the last [ns]; None without a device
    device_ns: int | None = None

    @property
    def ns(self) -> int:
        """Duration [ns]."""
        return self.end_ns - self.start_ns


def step_windows(
    trace: Trace, launch: Column, computes: Sequence[bool], which: Column, *, as_one_step: bool
) -> list[StepWindow]:
    """Find the windows of all steps in a trace, in order.

    Args:
        trace: the trace; one without steps is taken whole.
        launch: of each event of the device the host event that launched it; NONE where none is known.
        computes: of each event of the device whether it is a kernel that computes: neither copy nor collective.
        which: indices of the events that count: of one device, or of the host where there is no device.
        as_one_step: take the whole trace as one step, from the first event that counts to the last.

    Raises:
        ConfigError: nothing runs in the steps.
    """
    if as_one_step or not trace.steps:
        windows = [_whole(trace, which)]
    elif trace.is_cpu_only:
        windows = _on_host(trace, which)
    else:
        windows = _on_device(trace, launch, np.array(computes, dtype=bool), which)
    windows = [window for window in windows if window.ns > 0]
    if not windows:
        raise ConfigError(f"{trace.path}: nothing that takes time runs in it. Profile some training steps.")
    return windows


def _whole(trace: Trace, which: Column) -> StepWindow:
    """Window from the first event of the device to the last: the host's work before it may be no training at all."""
    events = trace.host if trace.is_cpu_only else trace.device.take(which)
    window = StepWindow(_WHOLE_TRACE, int(events.start_ns.min()), int(events.end_ns.max()))
    # Threads that only wait have frames of Python stacks as well, so these tell nothing of how long the host worked.
    host = trace.host.take(np.flatnonzero(trace.host.kind != Kind.PYTHON))
    if trace.is_cpu_only or not len(host):
        return window
    return replace(window, host_ns=int(host.end_ns.max() - host.start_ns.min()), device_ns=window.ns)


def _host_ends(steps: Sequence[tuple[int, int, int]]) -> list[int]:
    """Ends of steps on the host [ns]: the next one's begin where the two follow on each other."""
    ends = [
        following if number + 1 == next_number else min(end, following)
        for (number, _, end), (next_number, following, _) in pairwise(steps)
    ]
    return [*ends, steps[-1][2]]


def _on_host(trace: Trace, which: Column) -> list[StepWindow]:
    starts = trace.host.start_ns[which]
    # The profiler opens a last step that is closed at once: it holds no operator, and is none.
    last_start = int(starts.max(initial=0))
    steps = [step for order, step in enumerate(trace.steps) if order == 0 or step[1] <= last_start]
    return [
        StepWindow(number, start, end, host_ns=own_end - start)
        for (number, start, own_end), end in zip(steps, _host_ends(steps), strict=True)
    ]


def _on_device(trace: Trace, launch: Column, computes: Column, which: Column) -> list[StepWindow]:
    device = trace.device
    step_of = _step_of(trace, launch, which)
    launched = step_of >= 0
    if not launched.any():
        raise ConfigError(
            f"{trace.path}: none of its {len(trace.steps)} steps launched anything on the device. Give ",
            Argument("as_one_step", True),
            " to take the trace as one step.",
        )
    # The profiler opens a last step that is closed at once: it launches nothing, and is none.
    steps = trace.steps[: int(step_of.max()) + 1]
    # Times at which the device had done all steps before each step, by the events that count.
    starts, ends = device.start_ns[which], device.end_ns[which]
    finished = _finished(device.track[which], starts, ends, computes[which], step_of, len(steps))
    # A step's work begins when what was launched before it has ended, and not before the host begins it.
    begins = [max(start, done) for (_, start, _), done in zip(steps, finished, strict=True)]
    windows = []
    for order, ((number, start, own_end), end) in enumerate(zip(steps, _host_ends(steps), strict=True)):
        # The last ends with all of its own events, others where the next one begins, if that has the next number.
        own = step_of == order
        own_ends = int(ends[own].max(initial=0))
        if order + 1 == len(steps):
            finish = max(end, own_ends)
        elif steps[order + 1][0] == number + 1:
            finish = begins[order + 1]
        else:
            finish = min(max(end, finished[order + 1]), begins[order + 1])
        windows.append(
            StepWindow(
                number,
                min(begins[order], finish),
                finish,
                is_edge=order in (0, len(steps) - 1),
                host_ns=own_end - start,
                device_ns=own_ends - int(starts[own].min()) if own.any() else 0,
            )
        )
    return windows


def _step_of(trace: Trace, launch: Column, which: Column) -> Column:
    """Find the place in `trace.steps` of the step that launched each event; NONE for other events."""
    host_starts = np.array([start for _, start, _ in trace.steps], dtype=np.int64)
    launches = launch[which]
    launched_at = trace.host.start_ns[np.maximum(launches, 0)]
    place = np.searchsorted(host_starts, launched_at, side="right") - 1
    is_of_a_step = (launches != NONE) & (launched_at < trace.steps[-1][2])
    return np.where(is_of_a_step, place, NONE)


def _finished(
    track: Column, starts: Column, ends: Column, computes: Column, step_of: Column, num_steps: int
) -> list[int]:
    """Time when the stream that computes most had done all that was launched before each step [ns]; 0 if nothing was.

    Kernels of a stream run in order, so one without a launch belongs to the step of the one before it, and those before
    the first launch to what preceded the trace.
    """
    tracks, places = np.unique(track, return_inverse=True)
    worked = computes if computes.any() else np.ones(len(track), dtype=bool)
    busy = np.bincount(places[worked], weights=(ends - starts)[worked], minlength=len(tracks))
    there = np.flatnonzero(places == int(np.argmax(busy)))  # events come by start
    steps_so_far = np.maximum.accumulate(step_of[there])
    ends_so_far = np.maximum.accumulate(ends[there])
    # The last event of the steps before each: its end, with those of all before it.
    last = np.searchsorted(steps_so_far, np.arange(num_steps), side="left") - 1
    return [int(ends_so_far[at]) if at >= 0 else 0 for at in last.tolist()]
