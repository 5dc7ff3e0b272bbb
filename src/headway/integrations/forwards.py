"""Count what a model is really run on: its own forward calls, as they happen in a loop that is not ours."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from torch import nn

    from headway.meter import Meter


class ForwardCalls:
    """While entered, hands the arguments of a model's training forwards to a meter.

    A forward without gradients is counted as forward only; one in evaluation mode is not training and is left out.

    Args:
        model: the innermost model, without wrappers such as DDP.
        meter: of the loop.
    """

    def __init__(self, model: nn.Module, meter: Meter) -> None:
        self._model = model
        self._meter = meter
        self._names = list(inspect.signature(model.forward).parameters)
        self._handle: Any = None

    def __enter__(self) -> Self:
        uncompiled = torch.compiler.disable(self._on_forward)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._handle = self._model.register_forward_pre_hook(uncompiled, with_kwargs=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()

    def _on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:
            given = {**dict(zip(self._names, args, strict=False)), **kwargs}
            self._meter.count(given, forward_only=not torch.is_grad_enabled())
