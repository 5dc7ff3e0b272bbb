"""Another library's loop: the trainer that calls us, the forward calls of its model, and the numbers in its log."""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any, Self, TypeVar, cast

import torch
from torch import nn

from headway.count import CostModel, Workload
from headway.errors import HeadwayError, UsageError
from headway.log.sink import flatten
from headway.meter import Meter, Window
from headway.meter.batches import input_gradients_of
from headway.meter.watch import refuse_cached_keys
from headway.tracing.unwrap import unwrapped
from headway.words import Argument

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])

LOGGED = ("mfu", "hfu", "tokens_per_s", "tokens_per_s_per_device", "padding_share", "balance")
LOGGED_OF_PHASES = ("phases/*/wall_s", "phases/*/mfu", "phases/*/mbu")


class Observer:
    """Measures the training of another library, which goes on whatever happens here.

    The first error of a hook, or of counting a forward, warns, ends the measuring and lets go of model and trainer.

    Attributes:
        failure: what ended the measuring; None while all is well.
    """

    failure: Exception | None = None
    name = ""
    """As its user calls it; the class's own name where it is empty."""
    takes = "cost_model=headway.trace(model, inputs=...), workload=..."
    """Arguments for models and batches that say too little by themselves."""

    def stop_measuring(self, error: Exception) -> None:
        """Note an error, warn of it and let go."""
        self.failure = error
        what = str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
        try:
            self._release()
        except Exception as another:  # noqa: BLE001 - what is half set up may not be let go of cleanly either
            what += f" (And {type(another).__name__}: {another})"
        name = self.name or type(self).__name__
        warnings.warn(
            f"{name} measures this training no further: {what} Training goes on without its numbers. For models and "
            f"batches that it cannot read, give it {self.takes}: a cost model, and a function that makes a "
            "headway.Workload of what each forward is given.",
            RuntimeWarning,
            stacklevel=3,
        )

    def _release(self) -> None:
        """Leave the model and the trainer as they were."""


def observing(hook: C) -> C:
    """Make a method of an observer that no error leaves; once the measuring has ended, it does nothing."""

    @functools.wraps(hook)
    def observed(self: Observer, *args: Any, **kwargs: Any) -> Any:
        if self.failure is not None:
            return None
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the observer's, and the training the user's
            self.stop_measuring(error)
            return None

    return cast(C, observed)


@dataclass(eq=False)
class ForwardCalls:
    """While entered, hands the arguments of a model's training forwards to a meter.

    A forward without gradients is counted as forward only; one in evaluation mode is not training and is left out. A
    trainer's own method that runs in place of the forward (so that wrappers gather the
    parameters for it) is looked into: the forward of the model without its head is counted then.
    """

    model: nn.Module  # the innermost one, without wrappers such as DDP
    meter: Meter  # of the loop
    _: KW_ONLY
    # of the model, one of the meter's `others`, or a function that says before each forward which it is; None is the
    # meter's own
    cost_model: CostModel | Callable[[], CostModel | None] | None = None
    # whose mode tells training from evaluation; `model` when None. A reference model is in evaluation mode all the time
    trained: nn.Module | None = None
    # makes a workload from the forward's arguments by name; None where they say it by themselves (see `workload_of`)
    workload: Callable[[Mapping[str, Any]], Workload] | None = None
    # told of an error, which then does not reach the forward; None lets it through
    on_error: Callable[[Exception], None] | None = None
    phase: Callable[[], AbstractContextManager[Any]] = nullcontext  # begins the phase that a forward is in
    is_headless: bool = False  # whether the head of the model runs elsewhere, on the positions that were asked for
    num_calls: int = field(default=0, init=False)  # forwards counted so far
    _begun: list[ExitStack] = field(default_factory=list, init=False)  # of the forwards that go on, one in another
    _handles: list[Any] = field(default_factory=list, init=False)
    _is_entered: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._names = list(inspect.signature(self.model.forward).parameters)
        self._forward = self.model.forward

    def __enter__(self) -> Self:
        self._is_entered = True
        self.resume()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_entered = False
        self.pause()

    def pause(self) -> None:
        """Let forwards go by, at no cost, as those of a generation that is counted as a whole."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def resume(self) -> None:
        """Go on after a pause."""
        if not self._is_entered or self._handles:
            return
        before, after = map(torch.compiler.disable, (self._before, self._after))
        self._handles = [
            # in front of the meter's own hook: a phase without a backward pauses its timing of forwards
            self.model.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            self.model.register_forward_hook(after, always_call=True),
        ]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is not self.model:  # a copy has the hooks, too
            return
        begun = ExitStack()
        self._begun.append(begun)
        try:
            self._begin(begun, args, kwargs)
        except Exception as error:
            if self.on_error is None:
                raise
            self.on_error(error)

    def _after(self, module: nn.Module, *_: Any) -> None:
        if module is self.model and self._begun:
            self._begun.pop().close()

    def _begin(self, begun: ExitStack, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the phase of a forward, and count what it computes."""
        trained = self.model if self.trained is None else self.trained
        if not trained.training:
            return
        if self.model.forward != self._forward and (headless := self._headless()) is not None:
            begun.enter_context(headless)
            return
        begun.enter_context(self.phase())
        arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if self.is_headless and isinstance(num_logits := arguments.get("logits_to_keep"), int):
            arguments["logits_to_keep"] = num_logits - 1  # those of the last position are dropped: they predict nothing
        refuse_cached_keys(type(self.model).__name__, arguments)
        self.num_calls += 1
        self.meter.count(
            arguments if self.workload is None else self.workload(arguments),
            forward_only=not torch.is_grad_enabled(),
            cost_model=self.cost_model() if callable(self.cost_model) else self.cost_model,
            input_gradients=input_gradients_of(arguments),
        )

    def _headless(self) -> "ForwardCalls | None":
        """Make the same for the model without its head, which a method runs in place of the model's forward."""
        inner = getattr(unwrapped(self.model), "base_model", None)
        if not isinstance(inner, nn.Module) or inner is self.model:
            return None
        trained = self.model if self.trained is None else self.trained
        return replace(self, model=inner, trained=trained, is_headless=True)


@contextmanager
def replaced(owner: Any, name: str, substitute: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace a method of an object, and of no other of its class, within a block.

    Args:
        owner: of the method.
        name: of the method.
        substitute: makes what stands in its place of the method.
    """
    attributes = vars(owner)
    method, own = getattr(owner, name), attributes.get(name)
    if getattr(method, "__self__", None) is owner:

        @functools.wraps(method.__func__)
        def bound(self: Any, *args: Any, **kwargs: Any) -> Any:
            return substitute(MethodType(method.__func__, self))(*args, **kwargs)  # a copy of the owner runs its own

        attributes[name] = MethodType(bound, owner)
    else:
        attributes[name] = functools.wraps(method)(substitute(method))
    try:
        yield
    finally:
        if own is None:
            attributes.pop(name, None)  # what was put there hides the class's own
        else:
            attributes[name] = own


def ranks_of_sequences(accelerator: Any, workload: object) -> int | None:
    """Ranks in a row that share a batch whose sequences are cut over them; None where none are cut.

    Args:
        accelerator: an `accelerate.Accelerator`, whose mesh has the ranks of one batch in a row.
        workload: what makes a batch's workload; None where forwards are to say it.

    Raises:
        UsageError: sequences are cut, and no `workload` says how long they are as a whole.
    """
    parallel = getattr(accelerator, "parallelism_config", None)
    if parallel is None or parallel.cp_size * parallel.sp_size == 1:
        return None
    if workload is None:
        raise UsageError(
            f"sequences are cut over {parallel.cp_size * parallel.sp_size} ranks (ParallelismConfig's cp_size or "
            "sp_size), and a forward sees a part of them, from which nobody can tell their length. Give ",
            Argument("workload"),
            ", a function that makes a headway.Workload of the whole batch.",
        )
    ranks: int = parallel.non_data_parallel_size
    return ranks


def logged(window: Window, names: Sequence[str] = LOGGED, prefix: str = "headway") -> dict[str, int | float]:
    """Pick the numbers of a window that a loop logs, such as `headway/mfu`.

    Args:
        window: steps of a loop.
        names: keys of `Window.to_dict()`; one that holds others, such as `flops`, gives each of them. Behind a "/" they
            go on within one, `*` for any: `phases/rollout/mfu`, `phases/*/wall_s`.
        prefix: of the names in the log.

    Returns:
        Numbers by name, nested names joined by "/"; without what is not known.

    Raises:
        UsageError: a name is no key of a record.
    """
    record = window.to_dict()
    if missing := [name for name in names if name.partition("/")[0] not in record]:
        raise UsageError(f"a window has no {', '.join(missing)} to log; it has {', '.join(record)}.")
    patterns: dict[str, list[str]] = {}  # by the entry of the record that they are within
    for name in names:
        patterns.setdefault(name.partition("/")[0], []).append(name)
    flat = flatten({"step": window.step, **{entry: record[entry] for entry in patterns}})
    return {
        f"{prefix}/{key}": value
        for key, value in flat.items()
        if isinstance(value, int | float)
        and any(
            fnmatchcase(key, name) or key.startswith(f"{name}/") for name in patterns.get(key.partition("/")[0], ())
        )
    }


def caller_of(kind: type[T], called: str) -> T:
    """Find the trainer object that is running, among the callers on the stack.

    Raises:
        UsageError: no such trainer calls.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(trainer := frame.f_locals.get("self"), kind):
            return trainer
    raise UsageError(
        f"{called} is called by no {kind.__module__.partition('.')[0]}.{kind.__name__}: it finds there what a step "
        "runs. In a loop of your own use headway.Meter."
    )
