"""The one clock: the host's time, and points in a device's queue, whose times are read after the device passed them.

Everything that times a step or charges a second asks here, so that a test can put a pretended device in its place.
`ForwardTimer` asks how long a rank computes without waiting for others. Collectives make the steps of all ranks equally
long, so step times cannot tell a slow device from a heavy pack. The FLOPs of a rank's forwards over the time that it
computed them can: a heavy pack has more of both, a slow device less of one for the other.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.meter.hooks import guarded, hook

if TYPE_CHECKING:
    from torch import nn


now_ns, now_s = time.monotonic_ns, time.monotonic
"""The host's monotonic clock [ns] and [s]."""


class Mark:
    """A point in a loop: when the host came by, and on a CUDA device the place in its queue.

    Args:
        device: a `torch.device`, or None for the CPU, which has no queue: what the host has passed is done.
        host_s: reading of the host's clock; read now when None [s].
    """

    __slots__ = ("_event", "host_s")

    def __init__(self, device: Any = None, host_s: float | None = None) -> None:
        self.host_s = now_s() if host_s is None else host_s
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

    def seconds_since(self, other: "Mark") -> float:
        """Measure the time between two points that the device has passed, by its own clock if it has one [s]."""
        if self._event is None:
            return self.host_s - other.host_s
        return float(other._event.elapsed_time(self._event)) / 1e3


class CoreWait:
    """Time for which the thread that makes it has waited for a core that others had.

    Source: Linux, Documentation/scheduler/sched-stats: second number of /proc/PID/task/TID/schedstat [ns].
    """

    def __init__(self) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:  # other systems do not say
            return
        weakref.finalize(self, os.close, self._file)

    def read_ns(self) -> int:
        """Time since the thread's start; 0 where the system does not say [ns]."""
        try:
            return 0 if self._file is None else int(os.pread(self._file, 128, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return 0


class HostCopy:
    """A few numbers on their way from the device.

    Args:
        values_K: numbers on the device, shape (K,).
    """

    def __init__(self, values_K: Any) -> None:
        import torch

        self._values_K = values_K.detach()
        if values_K.device.type == "cuda":
            self._values_K = torch.empty(values_K.shape, dtype=values_K.dtype, pin_memory=True)
            self._values_K.copy_(values_K.detach(), non_blocking=True)
        self._arrived = Mark(values_K.device)

    def read(self) -> list[float]:
        """Return the numbers; waits for them if the device has not passed the copy."""
        self._arrived.wait()
        numbers: list[float] = self._values_K.tolist()
        return numbers


class Span(NamedTuple):
    """Time between two points of a loop."""

    begin: Mark
    end: Mark

    @property
    def seconds(self) -> float:
        """Duration, once the device has passed its end [s]."""
        return self.end.seconds_since(self.begin)


class ForwardTimer:
    """Notes when each forward of a model begins and ends, and when it waits for parameters that other ranks hold.

    Two marks a forward, and two for each group of parameters that `fully_shard` gathers in it; nothing is waited for.
    Exchanges within the forward of one pack (tensor, sequence and expert parallelism) are not taken out: ranks that
    share a forward are equally busy.

    Attributes:
        is_paused: whether forwards go by unnoticed, as those that generate do: no hook runs then.
        on_begin: called at each forward's begin, with its mark.
        on_end: called at its end, with its mark and what it returned.
        on_scoring: called with True and False where a forward without gradients begins and ends.
    """

    def __init__(self, model: "nn.Module", mark: Callable[[], Mark], on_error: Callable[[Exception], None]) -> None:
        from headway.tracing.unwrap import unwrapped

        self._model = weakref.ref(model)  # the timer, found by its model, must not keep it alive
        self._inner = weakref.ref(unwrapped(model))
        self._mark, self._on_error = mark, on_error
        self._begin: Mark | None = None
        self._is_scoring = False
        self._waits: list[Span] = []
        self._forwards: list[tuple[Span, list[Span]]] = []
        self._wrapped: list[Any] | None = None
        self.is_paused = False
        self.on_begin: Callable[[Mark], None] | None = None
        self.on_end: Callable[[Mark, Any], None] | None = None
        self.on_scoring: Callable[[bool], None] | None = None
        _timers[model] = self
        self._handles: list[Any] = []
        self.resume()

    @property
    def model(self) -> "nn.Module | None":
        """The model, without its wrappers if only they are gone; None once nobody else holds it."""
        model = self._model()
        return self._inner() if model is None else model

    def take(self) -> list[tuple[Span, list[Span]]]:
        """Return the forwards since the last call, each with its waits."""
        forwards, self._forwards = self._forwards, []
        return forwards

    def pause(self) -> None:
        """Let forwards go by until `resume`."""
        self.is_paused = True
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def resume(self) -> None:
        """Go on after a pause."""
        self.is_paused = False
        model = self._model()
        if model is not None and not self._handles and _timers.get(model) is self:
            begins, ends = (guarded(function, self._on_error) for function in (_forward_begins, _forward_ends))
            self._handles = [hook(model, "forward_pre", begins), hook(model, "forward", ends, always_call=True)]

    def close(self) -> None:
        """Leave the model as it was."""
        self.pause()
        for group in self._wrapped or ():
            del group.unshard, group.wait_for_unshard
        self._wrapped = None
        model = self._model()
        if model is not None and _timers.get(model) is self:
            del _timers[model]

    def _time_waits(self, model: "nn.Module") -> None:
        """Time the waits for parameters, from the first forward on: `fully_shard` may have come after the meter."""
        groups = [group for module in model.modules() for group in sharded_groups(module)]
        self._wrapped = [*dict.fromkeys(groups)]  # modules that are sharded together share theirs
        for group in self._wrapped:
            group.unshard = self._timed(group.unshard)
            group.wait_for_unshard = self._timed(group.wait_for_unshard)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._begin is None:  # in backward
                return call(*args, **kwargs)
            begin = self._mark()
            result = call(*args, **kwargs)
            self._waits.append(Span(begin, self._mark()))
            return result

        return timed


# The hooks find their timer here: so a model that is metered can be copied and pickled, and the copy has none.
_timers: "weakref.WeakKeyDictionary[nn.Module, ForwardTimer]" = weakref.WeakKeyDictionary()


def _forward_begins(model: "nn.Module", _args: Any) -> None:
    import torch

    timer = None if torch.compiler.is_compiling() else _timers.get(model)
    if timer is None or timer.is_paused:
        return
    if timer.on_scoring is not None and not torch.is_grad_enabled():
        timer._is_scoring = True
        timer.on_scoring(True)
    if not model.training:
        return
    if timer._wrapped is None:
        timer._time_waits(model)
    timer._waits, timer._begin = [], timer._mark()
    if timer.on_begin is not None:
        timer.on_begin(timer._begin)


def _forward_ends(model: "nn.Module", _args: Any, results: Any) -> None:
    import torch

    timer = None if torch.compiler.is_compiling() else _timers.get(model)
    if timer is None:
        return
    if timer._is_scoring and timer.on_scoring is not None:
        timer._is_scoring = False
        timer.on_scoring(False)
    if timer._begin is None:
        return
    end = timer._mark()
    timer._forwards.append((Span(timer._begin, end), timer._waits))
    timer._begin = None
    if timer.on_end is not None:
        timer.on_end(end, results)


def sharded_groups(module: Any) -> list[Any]:
    """List the groups of parameters that `fully_shard` gathers for a module; older versions of torch keep one group."""
    if not hasattr(module, "_get_fsdp_state"):
        return []
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return [*state._fsdp_param_groups]
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
