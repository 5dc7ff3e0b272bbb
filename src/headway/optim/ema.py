"""An exponential moving average of the weights that learn, in float32 and sharded as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from headway.config.optim import EmaConfig
from headway.optim.parts import Values, cut_parameters
from headway.tracing.unwrap import local


class WeightAverage:
    """The average; a DCP `Stateful`.

    Update n, counted from 1, makes `average = d average + (1 - d) weights`, where d is `ema.decay`, or with
    `ema.warmup` at most (1 + n) / (10 + n). The first average is the weights at the start.

    Args:
        model: its parameters with `requires_grad` are averaged, the others are not copied.
        ema: decay and how often.

    Source: Polyak and Juditsky 1992; the warm-up is that of TensorFlow's `ExponentialMovingAverage(num_updates)`.
    """

    def __init__(self, model: nn.Module, ema: EmaConfig) -> None:
        self._model = model
        self._ema = ema
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._averages = {name: p.detach().to(torch.float32, copy=True) for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after a step, if it is the step's turn.

        Args:
            step: just taken, counted from 1.
        """
        count, remainder = divmod(step, self._ema.every)
        if remainder:
            return
        decay = min(self._ema.decay, (1 + count) / (10 + count)) if self._ema.warmup else self._ema.decay
        in_float32 = [name for name, p in self._parameters.items() if p.dtype is torch.float32]
        if in_float32:
            averages = [local(self._averages[name]) for name in in_float32]
            torch._foreach_lerp_(averages, [local(self._parameters[name]) for name in in_float32], 1.0 - decay)
        others: dict[torch.Tensor, torch.Tensor] = {
            p: self._averages[name] for name, p in self._parameters.items() if p.dtype is not torch.float32
        }
        for parts in cut_parameters(others):  # in float32, as many at a time as the copies may take room for
            weights = Values([part.of(part.parameter) for part in parts])
            torch._foreach_lerp_([part.of(others[part.parameter]) for part in parts], weights.parts, 1.0 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the averaged weights for a while, and give it back its own to the bit.

        Weights in float32 change places with their averages; others are kept aside in their own type.
        """
        own = {name: local(p).clone() for name, p in self._parameters.items() if p.dtype is not torch.float32}
        self._exchange(own, into_model=True)
        try:
            yield
        finally:
            self._exchange(own, into_model=False)

    @torch.no_grad()
    def _exchange(self, own: dict[str, torch.Tensor], *, into_model: bool) -> None:
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # weights that the module has gathered are out of date
        for name, parameter in self._parameters.items():
            weight, average = local(parameter), local(self._averages[name])
            if name in own:
                weight.copy_(average if into_model else own[name])
            else:
                copy = weight.clone()
                weight.copy_(average)
                average.copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        """The averages under the names of their parameters, sharded as these are."""
        return dict(self._averages)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take in averages of the same parameters; the number of updates follows from the step."""
        assert state.keys() == self._averages.keys()
        self._averages = {name: state[name].to(average.device) for name, average in self._averages.items()}
