"""Cost models by shape: of a module whose forward says in no other way how much it computes."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only, tree_map_with_path

from headway.count import CostModel
from headway.tracing.results import Results
from headway.tracing.trace import trace


class ShapeTraces:
    """The cost models of a module, one for each shape of its arguments; a forward costs one segment.

    Args:
        model: any module.
        results: from which of its results its backward starts, as for `trace`.
        change: changes each cost model after its trace.
        around: what a trace runs within.
    """

    def __init__(
        self,
        model: nn.Module,
        results: Results = None,
        change: Callable[[CostModel], CostModel] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model = model
        self.results = results
        self._change, self._around = change, around
        self._traces: dict[str, CostModel] = {}

    def __len__(self) -> int:
        return len(self._traces)

    def of(self, arguments: Any) -> CostModel:
        """Trace the module on arguments of new shapes; of known ones, look its cost model up.

        Args:
            arguments: by name or by position, as `without_data` leaves them.

        Raises:
            TraceError: an operation cannot be explained.
        """
        shapes = tree_map_only(torch.Tensor, _signature, arguments)
        shapes = tree_map_only(float, type, shapes)  # a time or a scale, which decides nothing
        key = repr(([parameter.shape for parameter in self.model.parameters()], shapes, self.results))
        if key not in self._traces:
            inputs = tree_map_only(torch.Tensor, lambda x: x if x.is_meta else x.cpu(), arguments)
            with self._around():
                cost_model = trace(self.model, inputs=inputs, results=self.results)
            self._traces[key] = cost_model if self._change is None else self._change(cost_model)
        return self._traces[key]


def shape_key(arguments: Mapping[str, Any] | tuple[Any, ...]) -> Any:
    """Name the shapes of plain tensors, in a fraction of the time of a look-up by all that decides a trace.

    Returns:
        A key; None where the arguments hold anything else, a mask, or a tensor that requires a gradient.
    """
    key = []
    for name, value in arguments.items() if isinstance(arguments, Mapping) else enumerate(arguments):
        is_plain = isinstance(value, torch.Tensor) and value.dtype is not torch.bool and not value.requires_grad
        if not is_plain or "mask" in str(name):
            return None
        key.append((name, value.shape, value.dtype))
    return tuple(key)


def without_data(arguments: Mapping[str, Any] | tuple[Any, ...]) -> Any:
    """Keep of the floats among arguments their shape, so that no activation stays alive, and who asks for a gradient.

    Integers stay, and so do floats that are called a mask, whose values say how much is computed.
    """

    def without(path: tuple[Any, ...], value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_mask = any("mask" in str(getattr(part, "key", "")) for part in path)
        if value.is_floating_point() and not is_mask:
            return value.detach().to("meta").requires_grad_(value.requires_grad)
        return value.detach()

    return tree_map_with_path(without, arguments)


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Give the facts of a tensor that decide the work: its shape, and a mask's values too."""
    is_mask = tensor.dtype is torch.bool or (tensor.is_floating_point() and not tensor.is_meta)
    values = hash(tensor.cpu().numpy().tobytes()) if is_mask else None
    return tensor.shape, tensor.dtype, tensor.requires_grad, values
