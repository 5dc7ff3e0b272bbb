"""Balance of a model's routers: slots of each expert, counted where the experts run.

Tensor letters: M layers with experts, E experts of all layers, one layer after the other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from headway.models.experts import experts_of


class RouterSummary(NamedTuple):
    """Balance of a step's routing over the experts.

    Attributes:
        max_over_mean: slots of a layer's busiest expert over the mean of its experts, averaged over layers; 1 is even.
        worst_max_over_mean: the same of the worst layer.
        unused: experts, over all layers, that no slot chose.
    """

    max_over_mean: float
    worst_max_over_mean: float
    unused: int


class RouterLoad:
    """Counts the slots that each expert of each layer is given while the model trains; no host waits for it.

    Padding slots are routed and counted like others. A layer that is recomputed in the backward pass counts its slots
    twice, which no ratio within the layer shows.

    Args:
        model: its experts run by one of Headway's implementations.
        device: where they run.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        modules: list[Any] = list(experts_of(model).values())
        sizes = [module.down_proj.shape[0] for module in modules]
        self._load_E = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        size_M = torch.tensor(sizes, dtype=torch.int64)
        self._layer_E = torch.repeat_interleave(torch.arange(len(sizes)), size_M).to(device)
        self._size_M = size_M.to(device)
        for module, load in zip(modules, torch.split(self._load_E, sizes), strict=True):
            module.router_load = load

    def take(self, sum_: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Reduce the counts since the last call to the numbers of a `RouterSummary`, on the device.

        Args:
            sum_: replaces a tensor by its sum over the processes.

        Returns:
            Shape (3,), or (0,) where the model has no experts.
        """
        if not len(self._size_M):
            return self._load_E.float()
        sum_(self._load_E)
        none_M = torch.zeros_like(self._size_M)
        most_M = none_M.scatter_reduce(0, self._layer_E, self._load_E, "amax")
        ratio_M = most_M / (none_M.scatter_add(0, self._layer_E, self._load_E) / self._size_M)
        unused = (self._load_E == 0).sum()
        self._load_E.zero_()
        return torch.stack((ratio_M.mean(), ratio_M.amax(), unused))
