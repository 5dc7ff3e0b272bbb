"""Phases of a step: which part of the loop its time went to, by marks at their borders, read once the device is there.

    data      the loop waits for a batch
    input     from there to the forward: copies to the device, and what the loop does with a batch
    exchange  ranks wait for each other, within any gap: `headway train`'s messages, DDP's buffers, a log of the meter
    inference what the loop names as a phase without a backward: generation, scoring
    forward   of the model
    loss      from the forward's end to the backward's begin
    backward  until the last gradient is there
    gradients from there to the optimizer: clipping, norms
    optimizer its step
    after     until the step ends, and from then to the next wait for data: logging, callbacks, zeroing of gradients

Borders come from hooks: of the model's forward, of the gradient of its results, of the end of autograd's pass, and of
all optimizers of torch. A gap between two of them gets its name from the one that ends it. Steps are sampled: all that
are long, and every few of short ones.
"""

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.log.boundary import ErrorBoundary
from headway.meter.clock import ForwardTimer, Mark, Span

if TYPE_CHECKING:
    from torch import nn

PHASES = ("data", "input", "exchange", "inference", "forward", "loss", "backward", "gradients", "optimizer", "after")
LAUNCHING = ("forward", "backward", "optimizer")  # phases in which the host gives a device its work
GAPS = ("input", "loss", "gradients", "after")  # phases in which the loop does what it likes
_LONG_S = 0.02  # a step of this length hides what some marks cost [s]
_EVERY = 16  # number of shorter steps from one sample to the next
_MOST_RESULTS = 8  # results of a forward whose gradients are watched for the backward's begin
_PRODUCT = "The phases of this loop's steps"


class StepPasses(NamedTuple):
    """Passes of the model in one sampled step."""

    num_forwards: int  # forwards with gradients
    num_scorings: int  # forwards without gradients
    scorings: list[Span]  # these forwards, neighbours in a row as one
    num_backwards: int  # backwards, without those that make a graph of their own
    num_updates: int  # most updates of one optimizer


class StepPhases(NamedTuple):
    """Phases of one sampled step.

    Attributes:
        spans: each with its name, in their order, without gaps.
        even: a point at which the device had done all that the host had given it; None on a CPU, which is always there.
        passes: of the model.
    """

    spans: list[tuple[str, Span]]
    even: Mark | None
    passes: StepPasses

    @property
    def is_whole(self) -> bool:
        """True if backwards were seen; without one the gaps have no names."""
        return any(name == "backward" for name, _ in self.spans)

    def extra(self, num_trained: int, num_scored: int) -> dict[str, tuple[int, float]]:
        """Number and time [s] of passes and updates beyond those that a step needs.

        Args:
            num_trained: micro-batches that were counted with their backward.
            num_scored: forwards of the model that were counted without one.
        """
        passes, seconds = self.passes, [(name, span.seconds) for name, span in self.spans]
        extra: dict[str, tuple[int, float]] = {}
        if (number := passes.num_scorings - num_scored) > 0:
            scored_s = sum(span.seconds for span in passes.scorings)
            extra["forward"] = number, scored_s * number / passes.num_scorings
        # One backward over one graph does the work of several: the shortest ones are saved.
        if (number := passes.num_backwards - passes.num_forwards) > 0:
            backwards_s = sorted(s for name, s in seconds if name == "backward")
            extra["backward"] = number, sum(backwards_s[:number])
        if passes.num_updates >= max(2, passes.num_forwards, num_trained):
            updates_s = sum(s for name, s in seconds if name == "optimizer")
            extra["update"] = passes.num_updates - 1, updates_s * (1 - 1 / passes.num_updates)
        return extra

    def seconds(self) -> dict[str, float]:
        """Time of each phase by the device's clock, once it has passed the step [s]."""
        sums: dict[str, float] = {}
        for name, span in self.spans:
            sums[name] = sums.get(name, 0.0) + span.seconds
        return sums

    def lead(self, even: Mark) -> tuple[float, float]:
        """The most that the host was ahead of the device at a border, and the host's time of launching.

        Args:
            even: the point since which both clocks go.

        Returns:
            The lead [s], and the time in which the host gave the device its work [s].
        """
        ends = [span.end for _, span in self.spans]
        lead_s = max(end.seconds_since(even) - (end.host_s - even.host_s) for end in ends)
        launching = [span for name, span in self.spans if name in LAUNCHING]
        return lead_s, sum(span.end.host_s - span.begin.host_s for span in launching)


class PhaseTimer:
    """Notes where the phases of sampled steps begin and end. Nothing is waited for, and all of it can be taken away.

    Args:
        forwards: timer of the model's forwards, which tells of them.
        mark: makes a mark in the device's queue.
        boundary: around all that may fail.
        has_queue: whether a device works behind the host.

    Attributes:
        optimizer: how the last optimizer updates: its `name`, `num_tensors`, and `mode` "fused", "foreach" or "loop";
            empty where none was seen.
    """

    def __init__(
        self, forwards: ForwardTimer, mark: Callable[[], Mark], boundary: ErrorBoundary, *, has_queue: bool = False
    ) -> None:
        self.optimizer: dict[str, Any] = {}
        self.looks: Collection[Any] = ()
        self.on_gap: Callable[[str, str], None] = lambda _border, _name: None
        self._mark, self.guard = mark, boundary.guard(_PRODUCT)
        self._is_sampled = False
        self._spans: list[tuple[str, Span]] = []
        self._has_queue, self._even = has_queue, None if not has_queue else mark()
        self._since: Mark | None = None
        self._border = ""  # the phase that lasts, or that has ended last
        self._lasts = False
        self._depth = 0  # number of optimizers in each other
        self._is_away = self._is_parted = False  # parted: a part of the present gap has no name yet
        self._clear_passes()
        self._seen_optimizer: weakref.ref[Any] | None = None
        self._forwards = forwards
        self._on_gradient = _Hook(self, PhaseTimer.backward_begins)
        self._handles: list[Any] = []
        with self.guard:
            self._hook()

    @property
    def is_over(self) -> bool:
        """True if nobody holds the model any more."""
        return self._forwards.model is None

    @property
    def border(self) -> str:
        """The phase that lasts, or " " and the phase before the present gap; "" away from training."""
        return "" if self._is_away else self._border if self._lasts else f" {self._border}"

    def _hook(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._forwards.on_begin, self._forwards.on_end = functools.partial(self.begin, "forward"), self.after_forward
        self._forwards.on_scoring = self.scoring
        self._handles = [
            register_optimizer_step_pre_hook(_Hook(self, PhaseTimer.before_update)),
            register_optimizer_step_post_hook(_Hook(self, PhaseTimer.after_update)),
        ]

    def close(self) -> None:
        """Leave the forwards and torch's optimizers as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._is_sampled = [], False
        self._forwards.on_begin = self._forwards.on_end = self._forwards.on_scoring = None

    def _clear_passes(self) -> None:
        self._num_forwards = self._num_scorings = self._num_backwards = 0
        self._num_graphs = 0  # backwards that make a graph of their own, as for a penalty of gradients
        self._scorings: list[Span] = []
        self._scored_since: Mark | None = None
        self._scored_at = 0  # number of phases before the last forward without gradients
        self._updates: dict[int, int] = {}  # number of updates of each optimizer

    def next_step(self, number: int, mark: Mark, last_s: float) -> StepPhases | None:
        """Give the phases of the step that ends, and decide whether the step that begins is sampled.

        Args:
            number: of the step that begins, from 1.
            mark: between the two.
            last_s: how long the host took for the one that ends [s].

        Returns:
            None if the step was not sampled, or had neither backward nor update.
        """
        if self._is_away:
            self.back(mark)
        if self._lasts:
            self.end(self._border, mark)
        self._close_gap("after", mark)
        phases = None
        if self._is_sampled and (self._num_backwards or self._updates):
            counts = self._num_forwards, self._num_scorings, self._scorings, self._num_backwards - self._num_graphs
            passes = StepPasses(*counts, max(self._updates.values(), default=0))
            phases = StepPhases(self._spans, self._even, passes)
        self._is_sampled = bool(self._handles) and (last_s >= _LONG_S or number % _EVERY == 1)
        if self._spans or phases is not None:
            self._spans = []
        self._since = mark
        if number == 1 and self._has_queue:  # the meter has waited for the device
            self._even = mark
        self._border, self._lasts, self._depth = "after", False, 0
        if self._is_sampled:
            self._clear_passes()
        return phases

    def begin(self, phase: str, mark: Mark | None = None) -> None:
        """Note that a phase begins, and with it ends the gap before; nothing if another phase lasts."""
        if self._lasts and (self._border, phase) == ("exchange", "forward"):
            self.end("exchange", mark)
        if self._lasts or self._is_away:
            return
        # data after an update is the next step's, other data a further batch
        usual = "after" if self._border in ("after", "optimizer") else "input"
        self._close_gap(_GAP_BEFORE.get(phase, usual), mark)
        self._border, self._lasts = phase, True

    def end(self, phase: str, mark: Mark | None = None) -> None:
        """Note that a phase ends, if it is the one that lasts."""
        if not self._lasts or self._border != phase or self._is_away:
            return
        self._note(phase, mark)
        self._lasts = False

    def leave(self, mark: Mark) -> None:
        """Note that the loop leaves training: time until `back` is in no phase."""
        if self._is_away:
            return
        self._note(self._border if self._lasts else "", mark)  # a gap has its name from what ends it
        self._is_away = True

    def back(self, mark: Mark) -> None:
        """Note that training goes on in the phase that it was left in; the device has been waited for."""
        self._is_away, self._since = False, mark
        self._even = mark if self._has_queue else None

    def _close_gap(self, name: str, mark: Mark | None) -> None:
        if self.looks:
            self.on_gap(self.border, name)
        if not self._is_sampled:
            return
        self._note(name, mark)
        if self._is_parted:  # the part before an absence is of the same gap
            self._spans = [(phase or name, span) for phase, span in self._spans]
            self._is_parted = False

    def _note(self, name: str, mark: Mark | None) -> None:
        """Add the time since the last border to a phase."""
        if not self._is_sampled:
            return
        mark = self._mark() if mark is None else mark
        if self._since is not None:
            self._spans.append((name, Span(self._since, mark)))
            self._is_parted = self._is_parted or not name
        self._since = mark

    @contextmanager
    def within_gap(self, phase: str) -> Iterator[None]:
        """Note a block as a phase, behind which the gap that it lies in goes on; nothing where a phase lasts."""
        if self._lasts or self._is_away:
            yield
            return
        self._note("", None)  # the gap has its name from what ends it
        yield
        self._note(phase, None)

    def listen_to(self, wrapper: "nn.Module") -> None:
        """Note where a wrapper of data parallelism begins: ranks wait for each other there before the forward."""
        _of_wrappers[wrapper] = self
        self._handles.append(wrapper.register_forward_pre_hook(_before_exchange, prepend=True))

    def scoring(self, begins: bool) -> None:
        """Note that a forward without gradients begins or ends; forwards in a row, with no phase between, are one."""
        if begins and self._is_sampled and not self._is_away and not self._lasts:
            self._num_scorings += 1
            in_a_row = bool(self._scorings) and self._scored_at == len(self._spans)
            self._scored_since = self._scorings.pop().begin if in_a_row else self._mark()
            self._scored_at = len(self._spans)
        elif not begins and self._scored_since is not None:
            self._scorings.append(Span(self._scored_since, self._mark()))
            self._scored_since = None

    def after_forward(self, mark: Mark, results: Any) -> None:
        """Note that a forward ends, and watch for its backward."""
        if not self._lasts or self._border != "forward":
            return
        import torch

        self.end("forward", mark)
        self._num_forwards += torch.is_grad_enabled()
        if self._is_sampled:
            with self.guard:
                for result in _with_gradient(results):
                    result.register_hook(self._on_gradient)

    def backward_begins(self, _gradient: Any) -> None:
        """Note that gradients begin to flow; called by autograd, which calls back once they have all arrived."""
        if not self._is_sampled or self._lasts or self._is_away:
            return
        self.begin("backward")
        import torch
        from torch.autograd import Variable

        self._num_backwards += 1
        self._num_graphs += torch.is_grad_enabled()

        call_back = Variable._execution_engine.queue_callback
        # behind what others, such as sharded modules, have called back at the end of this pass
        call_back(functools.partial(call_back, functools.partial(self.end, "backward")))

    def before_update(self, optimizer: Any, _args: Any, _options: Any) -> None:
        """Note that an optimizer begins to update, and how it does."""
        self._depth += 1
        if self._depth > 1:
            return
        self.begin("optimizer")
        if not self._is_sampled:
            return
        self._updates[id(optimizer)] = self._updates.get(id(optimizer), 0) + 1
        if self._seen_optimizer is None or self._seen_optimizer() is not optimizer:
            self._seen_optimizer = weakref.ref(optimizer)
            with self.guard:
                self.optimizer = update_of(optimizer)

    def after_update(self, _optimizer: Any, _args: Any, _options: Any) -> None:
        """Note that an optimizer has launched its update."""
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self.end("optimizer")


_GAP_BEFORE = {
    "forward": "input",
    "exchange": "input",
    "inference": "input",
    "backward": "loss",
    "optimizer": "gradients",
}
"""Name of a gap by the phase behind it; before data it depends on what stands before."""


def _with_gradient(results: Any, depth: int = 0) -> list[Any]:
    """List the tensors among a forward's results through which a backward comes back, a few of them."""
    if getattr(results, "requires_grad", False) and hasattr(results, "register_hook"):
        return [results]
    values = results.values() if isinstance(results, Mapping) else results if isinstance(results, list | tuple) else ()
    tensors: list[Any] = []
    for value in values if depth < 2 else ():
        tensors += _with_gradient(value, depth + 1)
        if len(tensors) >= _MOST_RESULTS:
            break
    return tensors


def update_of(optimizer: Any) -> dict[str, Any]:
    """Say how an optimizer updates: all tensors in one kernel, in lists, or one after the other, if it can be known.

    Source: torch.optim.optimizer._default_to_fused_or_foreach (PyTorch 2.11): without a choice lists are for devices.
    """
    groups = optimizer.param_groups
    tensors = [tensor for group in groups for tensor in group["params"]]
    update: dict[str, Any] = {"name": type(optimizer).__name__, "num_tensors": len(tensors)}
    if (mode := getattr(optimizer, "update_mode", None)) is not None:  # Headway's own
        return {**update, "mode": mode}
    if not tensors or not any(name in groups[0] for name in ("fused", "foreach")):
        return update
    foreach = groups[0].get("foreach")
    if groups[0].get("fused"):
        return {**update, "mode": "fused"}
    in_lists = tensors[0].device.type != "cpu" if foreach is None else foreach
    return {**update, "mode": "foreach" if in_lists else "loop"}


# The hook finds its timer here, so that a wrapper can be copied and pickled.
_of_wrappers: "weakref.WeakKeyDictionary[nn.Module, PhaseTimer]" = weakref.WeakKeyDictionary()


def _before_exchange(wrapper: "nn.Module", _args: Any) -> None:
    import torch

    if not torch.compiler.is_compiling() and wrapper.training and (timer := _of_wrappers.get(wrapper)) is not None:
        timer.begin("exchange")


def data_parallel_around(model: "nn.Module") -> "list[nn.Module]":
    """Find the DistributedDataParallel modules around a model, which does not know them: they refer to their class."""
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is None:
        return []
    kind = parallel.DistributedDataParallel
    return [item for item in gc.get_referrers(kind) if type(item) is kind and item.module is model]


class _Hook:
    """A hook that holds its timer weakly: it stands at a tensor, or in a table of the whole process."""

    __torch_unserializable__ = True  # a tensor with it may be written

    def __init__(self, timer: PhaseTimer, method: Callable[..., None]) -> None:
        self._timer, self._method = weakref.ref(timer), method

    def __call__(self, *args: Any) -> None:
        import torch

        if not torch.compiler.is_compiling() and (timer := self._timer()) is not None:
            with timer.guard:
                self._method(timer, *args)
