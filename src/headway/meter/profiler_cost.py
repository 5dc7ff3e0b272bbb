"""Cost of a profile to the host: the profiler's addition to each operator's call, the hooks' to each module's."""

import time
from collections.abc import Callable
from typing import Any

_CALLS, _ROUNDS = 32, 4  # calls of a timing, and timings; the fastest counts, because nothing has interrupted it


class ProfilerCost:
    """Times small calls without the profiler, and again while it records.

    What the profiler adds to a step is many times the same: it notes each operator's name, time and shapes, and the
    hooks name each module. So the costs of one operator and of one module tell how far a step of many small operators
    is stretched, whatever else makes steps faster or slower meanwhile. Some hundred calls take under a millisecond.
    """

    def __init__(self) -> None:
        from torch import nn, ones

        self.module = nn.Identity()
        self._tensor, self._factor = ones(1, device="cpu"), ones(1, device="cpu")
        self._operator_s, self._module_s = self._times()

    def added(self) -> dict[str, float]:
        """Time the calls again, and give the difference: `operator_ns` and `module_ns` of one call each [ns]."""
        operator_s, module_s = self._times()
        return {
            "operator_ns": max(0.0, operator_s - self._operator_s) * 1e9,
            "module_ns": max(0.0, module_s - self._module_s) * 1e9,
        }

    def _times(self) -> tuple[float, float]:
        """Time of an operator of one element, and of a module that does nothing [s]."""
        import torch

        with torch.no_grad():
            return _call_s(lambda: self._tensor.mul_(self._factor)), _call_s(lambda: self.module(self._tensor))


def _call_s(call: Callable[[], Any]) -> float:
    """Time of one call in the fastest of some rounds [s]."""
    rounds = []
    for _ in range(_ROUNDS):
        begin_s = time.perf_counter()
        for _ in range(_CALLS):
            call()
        rounds.append(time.perf_counter() - begin_s)
    return min(rounds) / _CALLS
