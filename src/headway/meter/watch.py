"""Forwards that are counted by themselves: of the trained model, and of others that its steps run.

A model of text or latents is traced once, and each forward is read off its arguments. Any other is traced for each
shape of its arguments, after the step in which it came; so is what a method other than `forward` runs of it, as a VAE's
`encode` runs its encoder: the outermost modules that really run are counted.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from headway.count import CostModel, Workload
from headway.errors import TraceError, UsageError, WorkloadError
from headway.meter.step_phases import NamedPhase

if TYPE_CHECKING:
    from torch import nn

    from headway.tracing.shapes import ShapeTraces

# parts of components, as `headway.tracing.classify` names them: all that a trace of some shape may bring, so that ranks
# exchange the same numbers whatever shapes they have met
_PARTS = (
    "attention", "convolution", "embed", "experts", "head", "mlp", "other", "projections", "recurrence", "router",
)  # fmt: skip
_ONE_CALL = Workload(packs=1)  # one forward of the shapes that it was traced on
_MOST_SHAPES = 512  # of one module


def ledger_of(model: "nn.Module", results: Any = None) -> CostModel:
    """Trace a model that reads text or latents; one without rows where its forwards are traced by their shapes."""
    from headway.tracing import trace

    with suppress(TraceError):
        return trace(model, results=results)
    return CostModel(type(model).__name__, (), ())


class CountingMeter(Protocol):
    """The meter of a watched loop; `StepMeter` says what each method does."""

    @property
    def is_away(self) -> bool:
        """Whether the loop has left training."""

    @property
    def trains_now(self) -> bool:
        """Whether the trained model is in training mode."""

    @property
    def current_phase(self) -> NamedPhase | None:
        """The phase that the loop is in."""

    def count(self, batch: Any, *, forward_only: bool = False, cost_model: CostModel | None = None) -> None:
        """Count a forward."""

    def count_in(
        self, phase: NamedPhase | None, batch: Any, forward_only: bool = False, cost_model: CostModel | None = None
    ) -> None:
        """Count a forward in a phase that may have ended."""

    def tracing(self) -> AbstractContextManager[None]:
        """Leave the time of tracing out of the steps'."""

    def add_ledger(self, cost_model: CostModel, *, is_trained: bool) -> None:
        """Take in the ledger of one more shape."""

    def stop_counting(self, error: Exception) -> None:
        """Warn of forwards that cannot be counted."""


class ForwardWatch:
    """Counts the forwards of one model for a meter, until it is closed.

    Args:
        model: whose forwards are counted; its wrappers may be around it.
        meter: of the loop.
        cost_model: of the model, without rows where each shape is traced; the meter's own for the trained model.
        is_trained: whether the steps train this very model.
        results: as for `headway.trace`.
    """

    def __init__(
        self, model: "nn.Module", meter: CountingMeter, cost_model: CostModel, *, is_trained: bool, results: Any = None
    ) -> None:
        from headway.tracing.unwrap import unwrapped

        self.name = type(unwrapped(model)).__name__
        self.num_calls = 0  # forwards so far
        self._meter, self._cost_model = meter, cost_model
        self._is_trained, self._results = is_trained, results
        self._has_warned = False
        self._depth = 0  # of watched modules that run in each other
        # modules, their arguments without data, whether no gradient, and the phase that they ran in
        self._calls: list[tuple[Any, Any, bool, NamedPhase | None]] = []
        self._traces: dict[Any, ShapeTraces] = {}
        self._handles: list[Any] = []
        self._compiled: list[tuple[Any, Any]] = []
        self._hook(model)
        if not cost_model.rows:
            for module in _outermost(unwrapped(model)):
                self._hook(module)

    @property
    def keys(self) -> tuple[tuple[str, str], ...]:
        """Component and driver of each row that the traces of its shapes may have."""
        return tuple((f"{self.name}.{part}", "packs") for part in _PARTS)

    def close(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        for module, call in self._compiled:
            module._compiled_call_impl = call
        for module in [module for module, owner in _watches.items() if owner is self]:
            del _watches[module]
        self._handles, self._compiled, self._calls = [], [], []
        self._traces.clear()

    def settle(self) -> None:
        """Count the step's forwards; shapes that are new are traced here, in no step's time.

        Raises:
            HeadwayError: one of them cannot be counted.
        """
        calls, self._calls = self._calls, []
        for module, arguments, forward_only, phase in calls:
            self._meter.count_in(phase, _ONE_CALL, forward_only, self._traced(module, arguments))

    def _hook(self, module: "nn.Module") -> None:
        _watches[module] = self
        compiled = module._compiled_call_impl
        if compiled is not None:  # of `module.compile()`, which compiles a module's hooks with it
            module._compiled_call_impl = _around(module, compiled)
            self._compiled.append((module, compiled))
            return
        self._handles.append(module.register_forward_pre_hook(_before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(_after, always_call=True))

    def begin(self, module: "nn.Module", args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note that a watched module begins to run; the outermost one is a forward."""
        self._depth += 1
        if self._depth == 1:
            self._note(module, args, kwargs)

    def end(self) -> None:
        """Note that a watched module has run, or failed."""
        self._depth -= 1

    def _note(self, module: "nn.Module", args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count a forward, or keep the shapes of its arguments until the step ends."""
        import torch

        # an evaluation, and what a checkpoint runs again in the backward, are no work of the step's; all of a phase is
        trains = self._meter.trains_now or self._meter.current_phase is not None
        if self._meter.is_away or torch._C._current_autograd_node() is not None or not trains:
            return
        forward_only = not torch.is_grad_enabled()
        try:
            arguments = _by_name(module, args, kwargs)
            if forward_only and isinstance(arguments, Mapping) and arguments.get("past_key_values") is not None:
                self._note_generation()
                return
            self.num_calls += 1
            if self._cost_model.rows and isinstance(arguments, Mapping):
                refuse_cached_keys(self.name, arguments)
                with suppress(WorkloadError):  # as of states that require a gradient: their shapes tell more
                    own = None if self._is_trained else self._cost_model
                    self._meter.count(arguments, forward_only=forward_only, cost_model=own)
                    return
            from headway.tracing.shapes import without_data

            self._calls.append((module, without_data(arguments), forward_only, self._meter.current_phase))
        except Exception as error:  # noqa: BLE001 - whatever it is, the forward is the loop's
            self._meter.stop_counting(error)

    def _note_generation(self) -> None:
        """Leave out a forward that fills or reads a cache; the loop counts what it generates as a whole."""
        if self._meter.current_phase is None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self.name} generates within a step, and its forwards with a cache are not counted one by one: count "
                'them as a whole, with meter.phase("rollout", forward_only=True): '
                "meter.count(headway.Generation(prompts, answers)).",
                RuntimeWarning,
                stacklevel=2,
            )

    def _traced(self, module: "nn.Module", arguments: Any) -> CostModel:
        from headway.tracing.shapes import ShapeTraces

        traces = self._traces.get(module)
        if traces is None:
            traces = self._traces[module] = ShapeTraces(module, self._results, self._named, self._meter.tracing)
        if len(traces) >= _MOST_SHAPES:
            raise UsageError(
                f"{self.name} is called with other shapes again and again, {_MOST_SHAPES} by now: give its cost model, "
                "headway.trace(model, inputs=FUNCTION OF A WORKLOAD), and count its batches."
            )
        cost_model = traces.of(arguments)
        self._meter.add_ledger(cost_model, is_trained=self._is_trained)
        return cost_model

    def _named(self, cost_model: CostModel) -> CostModel:
        return in_components_of(cost_model, self.name, driver="packs")


# The hooks find their watch here: so a model that is watched can be copied and pickled, and the copy is not counted.
_watches: "weakref.WeakKeyDictionary[nn.Module, ForwardWatch]" = weakref.WeakKeyDictionary()


def _before(module: "nn.Module", args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    import torch

    if not torch.compiler.is_compiling() and (watch := _watches.get(module)) is not None:
        watch.begin(module, args, kwargs)


def _after(module: "nn.Module", _args: Any, _results: Any) -> None:
    import torch

    if not torch.compiler.is_compiling() and (watch := _watches.get(module)) is not None:
        watch.end()


def _around(module: "nn.Module", compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Watch the calls of what `module.compile()` made."""

    def call(*args: Any, **kwargs: Any) -> Any:
        _before(module, args, kwargs)
        try:
            return compiled(*args, **kwargs)
        finally:
            _after(module, args, None)

    return call


def in_components_of(cost_model: CostModel, name: str, driver: str | None = None) -> CostModel:
    """Rename the components of a model for its class, so that a step's models are told apart.

    Args:
        cost_model: of the model.
        name: of its class: components are `AutoencoderKL.convolution` and so on.
        driver: that each row has from now on; its own when None.
    """
    rows = (
        replace(row, component=f"{name}.{row.component.rpartition('.')[2]}", driver=driver or row.driver)
        for row in cost_model.rows
    )
    return replace(cost_model, rows=tuple(rows))


def refuse_cached_keys(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse a forward that goes on from cached keys and values.

    Raises:
        WorkloadError: it does.
    """
    past = arguments.get("past_key_values")
    if past is not None and past.get_seq_length():
        raise WorkloadError(
            f"{name} goes on from cached keys and values while it trains: it generates, and that is not counted from "
            "its forwards. If it is no part of training, switch the model to eval() for it; else count the step "
            "yourself: Meter.count with a headway.Generation, in a Meter.phase."
        )


def _outermost(model: "nn.Module") -> "Iterator[nn.Module]":
    """Iterate over what runs outermost where a model's own forward does not: its parts, and the items of its lists."""
    from torch import nn

    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _outermost(child)
        else:
            yield child


def _by_name(module: "nn.Module", args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Give arguments their names; a tuple where the forward takes them by position alone."""
    import inspect

    from headway.tracing.unwrap import unwrapped

    parameters = inspect.signature(unwrapped(module).forward).parameters
    names = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        if kwargs:
            raise UsageError(f"{type(module).__name__} takes arguments by position and by name that have no name.")
        return args
    return {**dict(zip(names, args, strict=False)), **kwargs}
