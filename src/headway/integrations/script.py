"""Any training script: its model, optimizer and data loaders are found by torch's own hooks, and metered.

Only optimizer steps are heard of until one has ended. Then torch's hooks on all modules tell which of them the script
calls itself, until the same optimizer steps again. So the first two steps have no numbers, and from the third on
those modules alone have hooks.
"""

import gc
import math
import os
import platform
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from headway.errors import HeadwayError
from headway.log.run_files import METRICS, RUN, write_json
from headway.meter import Goodput, Meter, Window
from headway.meter.batch_share import rank_and_size
from headway.meter.environment import device_of, peak_of
from headway.meter.goodput_report import FILE_NAME
from headway.meter.hooks import guarded
from headway.meter.profile import ProfiledSteps
from headway.report import format_rate, format_rounded, format_share
from headway.version import __version__

_EVERY_S, _LOG_EVERY = 1.0, 20  # time of a record [s], and steps of a record of several ranks
_LOGGED_SINGLY = 10  # first steps, which have a record each
_PROFILED = range(10, 13)  # steps of a profile, which are compared with those before
_LEAST_LOOKS = 32  # steps from one look at a few parameters to the next; of more, a look takes longer
_MOST_SEARCHES = 3  # searches that end without a model
_UNSEEN = 3  # steps without a forward of the model, after which it is looked for again


class Call(NamedTuple):
    """A module that a script calls itself, as it was in the last such call."""

    module: nn.Module
    is_training: bool
    has_gradients: bool
    autocast: torch.dtype | None = None  # the dtype of its matrix products


class Calls:
    """Notes the outermost modules that a script calls, by torch's hooks on all modules.

    Args:
        on_error: is told of an error of a hook.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._of_thread = threading.local()
        self._by_id: dict[int, Call] = {}
        self._autocast: dict[int, torch.dtype] = {}
        self._handles = [
            torch_modules.register_module_forward_pre_hook(guarded(self._begin, on_error)),
            torch_modules.register_module_forward_hook(guarded(self._end, on_error), always_call=True),
        ]
        # torch.compile warns of hooks on all modules, and these leave compiled code alone
        self._has_hooks = torch_modules._has_any_global_hook
        torch_modules._has_any_global_hook = bool

    def close(self) -> list[Call]:
        """Take the hooks away, and give the calls."""
        for handle in self._handles:
            handle.remove()
        torch_modules._has_any_global_hook = self._has_hooks
        return [call._replace(autocast=self._autocast.get(place)) for place, call in self._by_id.items()]

    def _begin(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._of_thread.__dict__.setdefault("stack", [])
        stack.append(module)
        kind = next((parameter.device.type for parameter in module.parameters()), "meta")
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):  # Accelerate enters it within
            self._autocast[id(stack[0])] = torch.get_autocast_dtype(kind)
        if kind == "meta" or len(stack) > 1 or torch._C._current_autograd_node() is not None:
            return
        if torch.is_grad_enabled() or id(module) not in self._by_id:
            self._by_id[id(module)] = Call(module, module.training, torch.is_grad_enabled())

    def _end(self, module: nn.Module, _args: Any, _results: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._of_thread.__dict__.get("stack", [])
        while stack and stack.pop() is not module:  # calls within it that were interrupted
            pass


class ScriptMeter(Meter):
    """Measures the steps of a loop that says nothing: its model's mode tells where it evaluates.

    Args:
        model: that is trained.
        is_training: whether it is in training mode when it is trained; else gradients tell.
        options: as for `Meter`.
    """

    watches_parts = False

    def __init__(self, model: nn.Module, *, is_training: bool, **options: Any) -> None:
        self._has_mode, self._logged_s = is_training, 0.0
        super().__init__(model, watch=True, log_every=sys.maxsize, **options)
        self.looks_every = max(_LEAST_LOOKS, len(self.leaves.names) // 2)

    @property
    def trains_now(self) -> bool:
        """True if the trained model is in the mode in which it is trained, as far as it is known."""
        model = self.model
        return model is None or (bool(model.training) if self._has_mode else torch.is_grad_enabled())

    def hear_of_forward(self, trains: bool) -> None:
        """Leave training with the first forward of an evaluation, and come back with the next one that trains."""
        if self._waits_since is not None:
            self.got_data()
        if trains and self._left_for == "evaluation":
            self.back()
        elif not trains and not self.is_away:
            self.leave("evaluation")

    def hear_of_wait(self) -> None:
        """Note that the loop waits for a batch, if that is one to train on."""
        if self.trains_now if self._has_mode else not self.is_away:
            self.await_data()

    def log_if_due(self) -> None:
        """Write a record of each of the first steps, then one a second; ranks write theirs after the same step."""
        is_alone = self._ranks is None or self._ranks.size == 1
        is_due = self._last.host_s - self._logged_s > _EVERY_S if is_alone else self.num_steps % _LOG_EVERY == 0
        if is_due or self.num_steps <= _LOGGED_SINGLY:
            self._logged_s = self._last.host_s
            self.log()

    @property
    def num_calls(self) -> int:
        """Forwards of the trained model that were counted so far."""
        return self._watches[0].num_calls

    def watch_others(self, modules: Sequence[nn.Module]) -> None:
        """Count the forwards of further modules."""
        watched = [watch._model() for watch in self._watches]
        self._add_others([module for module in modules if not any(module is other for other in watched)])

    def end(self, *, is_whole: bool) -> Window:
        """Sum the run up, and let go of it.

        Ranks do not wait for each other at the end of a script, so their steps since the last record are left out.

        Args:
            is_whole: whether the script has ended well, so that its device can be waited for.
        """
        if is_whole and (self._ranks is None or self._ranks.size == 1):
            return self.close()
        run = self._tally.run(self._step, self._pending.extra)
        self.abandon()
        return run

    def let_go_in_child(self) -> None:
        """Leave the models of a forked process as they were."""
        for part in (*self._watches, self._forwards, self._phases):
            if part is not None:
                part.close()


class _NotedAttribute:
    """An attribute of torch's iterators over data that tells of reads and writes, and leaves no frame in tracebacks."""

    def __init__(self, name: str, *, on_read: Callable[[], Any] = bool, on_write: Callable[[], Any] = bool) -> None:
        self._name, self._on_read, self._on_write = name, on_read, on_write

    def __get__(self, iterator: Any, _owner: Any = None) -> Any:
        if iterator is None:
            return self
        attributes = vars(iterator)
        if self._name in attributes:
            self._on_read()
            return attributes[self._name]
        raise AttributeError(self._name)

    def __set__(self, iterator: Any, value: Any) -> None:
        vars(iterator)[self._name] = value
        self._on_write()


class ScriptWatch:
    """Meters what a script trains, from its first optimizer steps on, until it is closed.

    Nothing that goes wrong in here reaches the script: it is one warning, and the script goes on without numbers.

    Args:
        folder: of the run, made when there is something to write.
        log_to: further places for records, as for `headway.meter.open_sink`.
        profile: whether some steps are recorded by torch's profiler.
        since_ns: reading of the clock from which on the run's time is charged [ns].
        report: is given what went wrong, and the line about a profile.
    """

    def __init__(
        self, folder: Path, *, log_to: Sequence[str], profile: bool, since_ns: int, report: Callable[[str], None]
    ) -> None:
        self.folder = folder
        self._log_to, self._profiles, self._since_ns, self.report = log_to, profile, since_ns, report
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._meter: ScriptMeter | None = None
        self._goodput: Goodput | None = None
        self._profile: ProfiledSteps | None = None
        self._run: Window | None = None
        self._clock: weakref.ref[Optimizer] | None = None  # optimizer whose steps are the run's
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._is_over = self.has_failed = False
        # the search for models, as long as it lasts: calls and optimizers since a first optimizer stepped
        self._calls: Calls | None = None
        self._first: weakref.ref[Optimizer] | None = None
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._num_searches = self._num_unseen = self._num_calls = self._num_steps = 0
        self._handle: Any = None
        self._listen()
        # Attributes of an iterator that it reads as it is asked for a batch, and writes once it has one.
        hear = guarded(self._hear, self._stop)
        waits, arrived = partial(hear, ScriptMeter.hear_of_wait), partial(hear, ScriptMeter.got_data)
        self._iterator: Any = _BaseDataLoaderIter
        self._iterator._profile_name = _NotedAttribute("_profile_name", on_read=waits)  # type: ignore[assignment]
        self._iterator._num_yielded = _NotedAttribute("_num_yielded", on_write=arrived)  # type: ignore[assignment]
        os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(self)))

    def _listen(self) -> None:
        """Hear of optimizer steps, behind all who do so already."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = register_optimizer_step_post_hook(guarded(self._stepped, self._stop))

    def _hear(self, event: Callable[[ScriptMeter], None]) -> None:
        if self._meter is not None and threading.get_ident() == self._thread:
            event(self._meter)

    def _stepped(self, optimizer: Optimizer, _args: Any, _options: Any) -> None:
        if self._clock is None and self._calls is None:
            self._thread = threading.get_ident()
        if threading.get_ident() == self._thread and not self._is_over:
            self._take(optimizer)

    def _take(self, optimizer: Optimizer) -> None:
        """End a step, or go on with the search for what it trains."""
        meter, is_clock = self._meter, self._clock is not None and self._clock() is optimizer
        if meter is not None and not is_clock and optimizer not in self._known and _owned(meter.model, [optimizer]):
            self._known.add(optimizer)  # the loop goes on with another optimizer of the same model
            self._clock, is_clock = weakref.ref(optimizer), True
        if meter is not None and is_clock:
            self._end_step(meter)
        if self._calls is not None:
            self._seen.add(optimizer)
            if self._first is not None and self._first() is optimizer:
                calls, self._calls = self._calls.close(), None
                self._meter_some_of(calls)
        elif optimizer not in self._known and self._num_searches < _MOST_SEARCHES:
            self._first, self._seen = weakref.ref(optimizer), weakref.WeakSet([optimizer])
            self._calls = Calls(self._stop)
            self._num_steps = 0 if self._meter is None else self._meter.num_steps

    def _end_step(self, meter: ScriptMeter) -> None:
        self._num_unseen = self._num_unseen + 1 if meter.num_calls == self._num_calls else 0
        self._num_calls = meter.num_calls
        if self._num_unseen == _UNSEEN and meter.failure is None and self._num_searches < _MOST_SEARCHES:
            self._num_searches += 1
            self._known.clear()  # the model runs in another form, such as a compiled one
        meter.step()
        meter.log_if_due()

    def _meter_some_of(self, calls: Sequence[Call]) -> None:
        """Meter the model that the optimizers train most of, and all other modules that the script calls."""
        optimizers = [*self._seen]
        self._known.update(optimizers)
        meter = self._meter
        trained = _trained(calls, optimizers)
        others = [] if trained is None else _others(calls, trained.module)
        if meter is not None and meter.num_steps > self._num_steps + (self._num_unseen > 0):
            meter.watch_others(others if trained is None else [_bare(trained.module), *others])
            return
        if trained is None:
            self._num_searches += 1
            self._known.clear()
            if self._num_searches == _MOST_SEARCHES:
                self._warn_of("no module was called whose parameters the optimizer has")
            return
        if meter is not None:
            self._end_meter(meter, is_whole=True)
        self._begin(trained, others, max(optimizers, key=lambda optimizer: _owned(trained.module, [optimizer])))

    def _begin(self, trained: Call, others: Sequence[nn.Module], optimizer: Optimizer) -> None:
        is_first = rank_and_size()[0] == 0
        if is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
        if is_first and self._goodput is None:
            self._goodput = Goodput(self.folder / FILE_NAME, since_ns=self._since_ns)
        model, autocast = _bare(trained.module), trained.autocast
        with _warnings_taken() as texts:
            meter = ScriptMeter(
                model,
                peak=autocast and peak_of(model, device_of(model), autocast),
                is_training=trained.is_training,
                others=others,
                goodput=self._goodput,
                log_to=[f"jsonl:{self.folder / METRICS}", *self._log_to],
                steps_before=2 if self._run is None else self._run.step,
            )
        for text in texts:
            self.report(f"Warning: {text}")
        meter.on_failure, meter.boundary.warn = self._warn_of_failure, lambda text: self.report(f"Warning: {text}")
        if self._profiles and self._profile is None:
            steps = range(_PROFILED.start + meter.steps_before, _PROFILED.stop + meter.steps_before)
            self._profile = ProfiledSteps(meter, self.folder / "profile", steps=steps, report=self.report)
            self._profile.__enter__()
        self._clock, self._num_calls, self._num_unseen = weakref.ref(optimizer), 0, 0
        meter.start()
        self._meter = meter
        self._listen()
        if is_first:
            write_json(self.folder / RUN, _facts(meter))

    def _warn_of_failure(self, error: Exception) -> None:
        self._warn_of(str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}")

    def _warn_of(self, text: str) -> None:
        with suppress(Exception):  # standard error may be closed
            self.report(f"Warning: {text.rstrip('.')}. The script goes on, without its MFU.")

    def _stop(self, error: Exception) -> None:
        """Warn of an error, and meter no more."""
        self.has_failed = True
        self._warn_of_failure(error)
        with suppress(Exception):
            self.close(is_whole=False)

    def _end_meter(self, meter: ScriptMeter, *, is_whole: bool) -> None:
        self._meter = None
        with _warnings_taken():  # a run without a step that counts is told in its line
            run = meter.end(is_whole=is_whole)
            if self._profile is not None:
                self._profile.__exit__(None, None, None)
        self._run = run if run.num_steps or self._run is None else self._run

    def close(self, *, is_whole: bool, error: BaseException | None = None) -> None:
        """Leave torch as it was, and write the last records.

        Args:
            is_whole: whether the script has ended well.
            error: the error that ended the script, if one did.
        """
        if self._is_over or os.getpid() != self._pid:
            return
        self._is_over = True
        self._handle.remove()
        del self._iterator._profile_name, self._iterator._num_yielded
        if self._calls is not None:
            self._calls.close()
        if self._meter is not None:
            self._end_meter(self._meter, is_whole=is_whole)
        if self._goodput is not None:
            self._goodput.__exit__(None, error, None)

    @property
    def line(self) -> str:
        """The run in one line; empty on other ranks than the first, and where nothing was trained."""
        run = self._run
        if run is None or self._goodput is None:
            return ""
        rates = ["no step was counted"]
        if run.num_steps:
            mfu = format_rate(run.flops_per_s) if math.isnan(run.mfu) else f"MFU {format_share(run.mfu)}"
            speed = f"{format_rounded(run.tokens_per_s)} tokens/s" if run.tokens else f"{1 / run.step_s:.3g} steps/s"
            rates = [mfu, speed]
        if run.data_wait_s:
            rates.append(f"{100 * run.data_wait_share:.0f} % of the time waited for data")
        return f"{', '.join(rates)}. headway report {self.folder}"


class NotebookWatch:
    """Meters each cell of a notebook that trains, as `%load_ext headway` asks for.

    Args:
        events: of IPython's shell.
    """

    _watch: ScriptWatch | None = None
    _num_cells = 0

    def __init__(self, events: Any) -> None:
        self._events = events
        events.register("pre_run_cell", self.begin)
        events.register("post_run_cell", self.end)
        self.begin()

    def begin(self, *_: Any) -> None:
        """Listen to the cell that begins."""
        if self._watch is None:
            self._num_cells += 1  # some begin within a second
            folder = Path("runs", f"notebook-{time.strftime('%Y%m%d-%H%M%S')}-{self._num_cells}").absolute()
            self._watch = ScriptWatch(folder, log_to=(), profile=False, since_ns=time.monotonic_ns(), report=print)

    def end(self, result: Any = None) -> None:
        """Print the line of a cell that has trained."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close(is_whole=True, error=getattr(result, "error_in_exec", None))
            if watch.line:
                watch.report(watch.line)

    def close(self) -> None:
        """Listen no more, for `%unload_ext headway`."""
        self._events.unregister("pre_run_cell", self.begin)
        self._events.unregister("post_run_cell", self.end)
        self.end()


@contextmanager
def _warnings_taken() -> Iterator[list[str]]:
    """Take warnings: a script may make errors of them, and to change Python's filters would show its own again."""
    texts: list[str] = []
    warn, warnings.warn = warnings.warn, lambda text, *_, **__: texts.append(str(text))  # type: ignore[assignment]
    try:
        yield texts
    finally:
        warnings.warn = warn


def _leave_to_parent(watch: "weakref.ref[ScriptWatch]") -> None:
    """Meter nothing in a process that the script forks."""
    if (parent := watch()) is not None and not parent._is_over:
        parent._is_over = True
        with suppress(Exception):
            if parent._meter is not None:
                parent._meter.let_go_in_child()
            parent._meter = None


def _bare(model: nn.Module) -> nn.Module:
    """Strip a model of data parallelism, around which a script may call it too, to evaluate."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    return model


def _owned(model: nn.Module | None, optimizers: Sequence[Optimizer]) -> int:
    """Count the parameters of a model that optimizers update."""
    owned = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return sum(p.numel() for p in (() if model is None else model.parameters()) if id(p) in owned)


def _trained(calls: Sequence[Call], optimizers: Sequence[Optimizer]) -> Call | None:
    """Find the outermost module of which optimizers update most; a module compiled in place runs around all hooks."""
    candidates = [call for call in calls if call.has_gradients]
    if not candidates:
        modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
        candidates = [Call(m, m.training, True) for m in modules if m._compiled_call_impl is not None]
    sizes = [(_owned(call.module, optimizers), sum(1 for _ in call.module.modules())) for call in candidates]
    if not any(owned for owned, _ in sizes):  # optimizers of flat or doubled weights have tensors of their own
        sizes = [(sum(p.numel() for p in call.module.parameters() if p.requires_grad), 0) for call in candidates]
    best = max(sizes, default=(0, 0))
    return candidates[sizes.index(best)] if best[0] else None


def _others(calls: Sequence[Call], trained: nn.Module) -> list[nn.Module]:
    """List the other modules that a script calls, without parts of the trained one that run apart to evaluate."""
    parts = {id(part) for part in trained.modules()}
    return [
        _bare(call.module)
        for call in calls
        if call.module is not trained and (call.has_gradients or id(_bare(call.module)) not in parts)
    ]


def _facts(meter: ScriptMeter) -> dict[str, Any]:
    """Name what a run was made with, as a page of the run shows it."""
    peak, model = meter.peak, meter.model
    return {
        "software": {"headway": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "command": ["headway", "run", *sys.argv],
        "host": socket.gethostname(),
        "device": {"name": peak.name, "kind": str(meter.device), "threads": torch.get_num_threads()},
        "ranks": rank_and_size()[1],
        "peak": {"flops_per_s": peak.flops_per_s, "dtype": peak.dtype, "kind": peak.kind, "source": peak.source},
        "model": {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())},
    }
