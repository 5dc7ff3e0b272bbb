"""Models that a trainer's steps run beside the one that they train: the reference of DPO, a teacher, a reward."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from headway.integrations.forwards import ForwardCalls
from headway.tracing import trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headway.count import CostModel, Workload
    from headway.meter import Meter


class References:
    """Find the other models that a trainer holds (DPO's reference, a teacher), trace them, and count their forwards.

    A trainer whose `ref_model` is None runs the trained model with its adapters switched off as the reference, which is
    traced as a model of its own.

    Args:
        trainer: a `transformers.Trainer` or what is like one.
        model: the model that is trained.
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        self._trained = model
        self._models = [(other, trace(other)) for other in _others(trainer, model)]
        self._adapter: Any = None
        self._bare: CostModel | None = None
        if getattr(trainer, "ref_model", model) is None and hasattr(model, "disable_adapter"):
            self._adapter = _adapter_of(model)
        if self._adapter is not None:
            with model.disable_adapter():  # type: ignore[operator]  # a PeftModel
                self._bare = trace(model)

    @property
    def cost_models(self) -> list[CostModel]:
        """Cost models of the other models that a step runs, for `Meter(others=...)`."""
        bare = [self._bare] if self._bare is not None else []
        return [*(cost_model for _, cost_model in self._models), *bare]

    def calls(self, meter: Meter, workload: Callable[[Mapping[str, Any]], Workload] | None = None) -> ExitStack:
        """Count the forwards of the trained model and of the others until the stack is closed."""
        stack = ExitStack()
        own = ForwardCalls(self._trained, meter, cost_model=self._without_adapters, workload=workload)
        stack.enter_context(own)
        for other, cost_model in self._models:
            calls = ForwardCalls(other, meter, cost_model=cost_model, trained=self._trained, workload=workload)
            stack.enter_context(calls)
        return stack

    def _without_adapters(self) -> CostModel | None:
        return self._bare if self._adapter is not None and self._adapter.disable_adapters else None


def _others(trainer: Any, model: nn.Module) -> list[nn.Module]:
    """List the models that a trainer holds, without those that wrap the trained one or share its parameters."""
    trained = {id(parameter) for parameter in model.parameters()}
    held = [
        value
        for attribute in vars(trainer).values()
        for value in (attribute if isinstance(attribute, list | tuple) else [attribute])
        if isinstance(value, nn.Module)
    ]
    others = {id(value): value for value in held if next(value.parameters(), None) is not None}
    return [other for other in others.values() if not any(id(p) in trained for p in other.parameters())]


def _adapter_of(model: nn.Module) -> Any:
    """Find one of the layers that peft has put adapters into; they are switched off all at once."""
    layers: Any = sys.modules.get("peft.tuners.tuners_utils")  # where nobody imported peft, there are none
    if layers is None:
        return None
    return next((module for module in model.modules() if isinstance(module, layers.BaseTunerLayer)), None)
