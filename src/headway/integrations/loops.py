"""Another library's loop: the trainer that calls us, the forward calls of its model, and the numbers in its log."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from headway.errors import UsageError, WorkloadError
from headway.log.sink import flatten
from headway.meter.batches import input_gradients_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from headway.count import CostModel, Workload
    from headway.meter import Meter, Window

T = TypeVar("T")

LOGGED = ("mfu", "hfu", "tokens_per_s", "tokens_per_s_per_device", "padding_share", "balance")


class ForwardCalls:
    """While entered, hands the arguments of a model's training forwards to a meter.

    A forward without gradients is counted as forward only; one in evaluation mode is not training and is left out.

    Args:
        model: the innermost model, without wrappers such as DDP.
        meter: of the loop.
        cost_model: of the model, one of the meter's `others`; or a function that says before each forward which it is.
            None is the meter's own.
        trained: the model whose mode tells training from evaluation; `model` itself where it is None. A reference
            model is in evaluation mode all the time.
        workload: makes a workload from the forward's arguments by name; None where they say it by themselves, as
            transformers' do (see `workload_of`).

    Attributes:
        num_calls: forwards counted so far.
    """

    def __init__(
        self,
        model: nn.Module,
        meter: Meter,
        *,
        cost_model: CostModel | Callable[[], CostModel | None] | None = None,
        trained: nn.Module | None = None,
        workload: Callable[[Mapping[str, Any]], Workload] | None = None,
    ) -> None:
        self._model = model
        self._meter = meter
        self._cost_model = cost_model
        self._trained = trained if trained is not None else model
        self._workload = workload
        self._names = list(inspect.signature(model.forward).parameters)
        self._handle: Any = None
        self.num_calls = 0

    def __enter__(self) -> Self:
        uncompiled = torch.compiler.disable(self._on_forward)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._handle = self._model.register_forward_pre_hook(uncompiled, with_kwargs=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()

    def _on_forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._trained.training:
            return
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if (past := given.get("past_key_values")) is not None and past.get_seq_length():
            raise WorkloadError(
                f"{type(self._model).__name__} goes on from cached keys and values while it trains: it generates, and "
                "that is not counted from its forwards. If it is no part of training, switch the model to eval() for "
                "it; else count the step yourself: Meter.count with a Workload whose `past` says how much was cached."
            )
        self.num_calls += 1
        self._meter.count(
            given if self._workload is None else self._workload(given),
            forward_only=not torch.is_grad_enabled(),
            cost_model=self._cost_model() if callable(self._cost_model) else self._cost_model,
            input_gradients=input_gradients_of(given),
        )


def logged(window: Window, names: Sequence[str] = LOGGED, prefix: str = "headway") -> dict[str, int | float]:
    """Pick the numbers of a window that a loop logs, such as `headway/mfu`.

    Args:
        window: steps of a loop.
        names: keys of `Window.as_record()`; one that holds others, such as `flops`, gives each of them.
        prefix: of the names in the log.

    Returns:
        Numbers by name, nested names joined by "/"; without what is not known.

    Raises:
        UsageError: a name is no key of a record.
    """
    record = window.as_record()
    if missing := [name for name in names if name not in record]:
        raise UsageError(f"a window has no {', '.join(missing)} to log; it has {', '.join(record)}.")
    flat = flatten({"step": window.step, **{name: record[name] for name in names}})
    if "step" not in names:
        del flat["step"]
    return {f"{prefix}/{name}": value for name, value in flat.items() if isinstance(value, int | float)}


def caller_of(kind: type[T], called: str) -> T:
    """Find the trainer object that is running, among the callers on the stack.

    Args:
        kind: class of the trainer.
        called: what it calls, for the error.

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
