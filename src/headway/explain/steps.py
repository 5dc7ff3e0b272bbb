"""Windows of the steps on the device's clock.

The host runs ahead: while it launches step 12 the device may still work on step 10. A step's window goes from the first
device event that was launched in it to the first that was launched in the next step.
"""

from dataclasses import dataclass

import numpy as np

from headway.errors import ConfigError
from headway.explain.attribute import Attribution
from headway.explain.trace import NONE, Column, Trace

WHOLE_TRACE = 0  # number of the one "step" of a trace that is taken whole


@dataclass(frozen=True, slots=True)
class StepWindow:
    """A step's time.

    Attributes:
        step: its number.
        start_ns: beginning [ns].
        end_ns: end [ns]; the next step begins there.
        is_edge: the first or the last of a trace of a device: the one still has kernels of before the trace, the other
            has no successor that ends it.
    """

    step: int
    start_ns: int
    end_ns: int
    is_edge: bool = False

    @property
    def ns(self) -> int:
        """Duration [ns]."""
        return self.end_ns - self.start_ns


def step_windows(trace: Trace, attribution: Attribution, on_device: Column, *, as_one_step: bool) -> list[StepWindow]:
    """Find the windows of all steps in a trace, in order.

    Args:
        trace: the trace.
        attribution: which call launched what.
        on_device: indices of the device's events that count, by start.
        as_one_step: take the whole trace as one step.

    Raises:
        ConfigError: the trace has no steps, or nothing runs in them.
    """
    windows = [window for window in _windows(trace, attribution, on_device, as_one_step=as_one_step) if window.ns]
    if not windows:
        raise ConfigError(f"{trace.path}: nothing that takes time runs in it. Profile some training steps.")
    return windows


def _windows(trace: Trace, attribution: Attribution, on_device: Column, *, as_one_step: bool) -> list[StepWindow]:
    if as_one_step:
        events = trace.host if trace.is_cpu_only else trace.device.take(on_device)
        return [StepWindow(WHOLE_TRACE, int(events.start_ns.min()), int(events.end_ns.max()))]
    if not trace.steps:
        raise ConfigError(
            f"{trace.path} has no steps. Call profiler.step() after each step, with a schedule, or give --whole to "
            "take the trace as one step."
        )
    if trace.is_cpu_only:
        starts = [start for _, start, _ in trace.steps]
        ends = [*starts[1:], trace.steps[-1][2]]
        return [StepWindow(number, start, end) for (number, start, _), end in zip(trace.steps, ends, strict=True)]
    return _on_device(trace, attribution, on_device)


def _on_device(trace: Trace, attribution: Attribution, on_device: Column) -> list[StepWindow]:
    launched = on_device[attribution.launch[on_device] != NONE]
    launched_at = trace.host.start_ns[attribution.launch[launched]]
    host_starts = np.array([start for _, start, _ in trace.steps], dtype=np.int64)
    step_of = np.searchsorted(host_starts, launched_at, side="right") - 1
    begun: list[tuple[int, int]] = []  # number, start of a step that launched something
    for order, (number, _, _) in enumerate(trace.steps):
        of_it = launched[step_of == order]
        if len(of_it):
            start = int(trace.device.start_ns[of_it].min())
            if not begun or start > begun[-1][1]:
                begun.append((number, start))
    if not begun:
        raise ConfigError(
            f"{trace.path}: none of its {len(trace.steps)} steps launched anything on the device. Give --whole to take "
            "the trace as one step."
        )
    end = int(trace.device.end_ns[on_device].max())
    starts = [start for _, start in begun]
    last = len(begun) - 1
    return [
        StepWindow(number, start, following, is_edge=order in (0, last))
        for order, ((number, start), following) in enumerate(zip(begun, [*starts[1:], end], strict=True))
    ]
