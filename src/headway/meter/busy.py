"""How long a rank's device computes without waiting for others: the time of the model's forwards, less its waits.

Collectives make the steps of all ranks equally long, so step times cannot tell a slow device from a heavy pack. The
FLOPs of a rank's forwards over the time that it computed them can: a heavy pack has more of both, a slow device less of
one for the other.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from headway.meter.clock import Mark


class Span(NamedTuple):
    """Time between two points of a loop."""

    begin: Mark
    end: Mark

    @property
    def seconds(self) -> float:
        """How long it took, once the device has passed its end [s]."""
        return self.end.seconds_since(self.begin)


class ForwardTimer:
    """Notes when each forward of a model begins and ends, and when it waits for parameters that other ranks hold.

    Two marks a forward, and two for each group of parameters that `fully_shard` gathers in it; nothing is waited for.
    Exchanges within the forward of one pack (tensor, sequence and expert parallelism) are not taken out: ranks that
    share a forward are equally busy.

    Args:
        model: as the loop calls it.
        mark: marks a point of the loop.
    """

    def __init__(self, model: nn.Module, mark: Callable[[], Mark]) -> None:
        self._model = weakref.ref(model)  # the timer, found by its model, must not keep it alive
        self._mark = mark
        self._begin: Mark | None = None
        self._waits: list[Span] = []
        self._found: list[tuple[Span, list[Span]]] = []
        self._wrapped: list[Any] | None = None
        _timers[model] = self
        self._handles = [
            model.register_forward_pre_hook(_before_forward),
            model.register_forward_hook(_after_forward, always_call=True),
        ]

    def take(self) -> list[tuple[Span, list[Span]]]:
        """Return the forwards since the last call, each with its waits."""
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        for group in self._wrapped or ():
            del group.unshard, group.wait_for_unshard
        self._handles, self._wrapped = [], None
        model = self._model()
        if model is not None and _timers.get(model) is self:
            del _timers[model]

    def before(self, model: nn.Module) -> None:
        """Note that a forward of the model begins."""
        if self._wrapped is None:  # `fully_shard` may have come after the meter
            self._wrapped = [group for module in model.modules() for group in sharded_groups(module)]
            for group in self._wrapped:
                group.unshard = self._timed(group.unshard)
                group.wait_for_unshard = self._timed(group.wait_for_unshard)
        self._waits, self._begin = [], self._mark()

    def after(self) -> None:
        """Note that a forward ends."""
        if self._begin is not None:
            self._found.append((Span(self._begin, self._mark()), self._waits))
            self._begin = None

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
_timers: weakref.WeakKeyDictionary[nn.Module, ForwardTimer] = weakref.WeakKeyDictionary()


def _before_forward(model: nn.Module, _args: Any) -> None:
    import torch

    if not torch.compiler.is_compiling() and model.training and (timer := _timers.get(model)) is not None:
        timer.before(model)


def _after_forward(model: nn.Module, _args: Any, _output: Any) -> None:
    import torch

    if not torch.compiler.is_compiling() and (timer := _timers.get(model)) is not None:
        timer.after()


def sharded_groups(module: Any) -> list[Any]:
    """List what `fully_shard` keeps about the parameters that it gathers for a module; older ones keep one group."""
    if not hasattr(module, "_get_fsdp_state"):
        return []
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return [*state._fsdp_param_groups]
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
