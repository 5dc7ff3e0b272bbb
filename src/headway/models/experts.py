"""The experts implementation "headway_experts": every slot's rows go to their experts in one grouped product each.

Tensor letters: T slots, K experts a slot, S = T x K rows, E experts (of all layers where loads are counted), M layers
with experts, D hidden size, F size inside an expert.

transformers' models look their experts up in its `ExpertsInterface`, as they do attention. What distinguishes one
model's experts from another's (a gate, biases, the layout of the weights) they declare there, and it is honoured here.
Rows are sorted by expert and put back by index look-ups in both directions, so that no gradient is scattered: the
result is the same on every run. `headway.models.parallel.experts` spreads experts over processes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from headway.errors import ConfigError
from headway.models.blocks import experts_of
from headway.models.products import grouped_linear, permute_rows, product_dtype
from headway.models.quantised import layouts_of, multiply_rows
from headway.tracing.unwrap import local

NAME = "headway_experts"


def register_experts() -> None:
    """Make "headway_experts" known to transformers; calling it again changes nothing."""
    ExpertsInterface.register(NAME, run_experts)


def use_experts(model: PreTrainedModel, name: str = NAME) -> None:
    """Switch every part of a model to one experts implementation; a model without experts stays as it is.

    Raises:
        ConfigError: no implementation of that name is registered.
    """
    register_experts()
    implementations = ["eager", *sorted(ALL_EXPERTS_FUNCTIONS.valid_keys())]
    if name not in implementations:
        raise ConfigError(f"There is no experts implementation {name!r}. Known are: {', '.join(implementations)}.")
    for module in experts_of(model).values():
        config: Any = module.config
        config._experts_implementation_internal = name


def run_experts(
    module: Any, hidden_TD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """Run a layer's experts; the function that transformers' models call.

    Args:
        module: the layer's experts. Where they are spread, its attribute `run_spread` stands in for this function.
        hidden_TD: what the experts see, shape (T, D).
        chosen_TK: the experts of each slot, shape (T, K), each below E.
        weights_TK: their weights, shape (T, K).

    Returns:
        The weighted sums of what each slot's experts made of it, shape (T, D).
    """
    run_spread = getattr(module, "run_spread", None)
    if run_spread is not None:
        spread_TD: torch.Tensor = run_spread(module, hidden_TD, chosen_TK, weights_TK)
        return spread_TD
    sorted_S, order_S = chosen_TK.flatten().sort(stable=True)
    place_S = order_S.argsort()
    experts = torch.arange(module.down_proj.shape[0], device=sorted_S.device, dtype=sorted_S.dtype)
    ends_E = torch.searchsorted(sorted_S, experts, right=True, out_int32=True)
    if module.training and hasattr(module, "router_load"):
        module.router_load.add_(rows_per_expert(ends_E))

    dtype = _product_dtype(module, hidden_TD)
    # no name for the rows here, so that they are gone once they were multiplied
    out_SD = apply_experts(
        module, permute_rows(hidden_TD, order_S, place_S, chosen_TK.shape[1], dtype), ends_E, sorted_S
    )
    out_TKD = permute_rows(out_SD, place_S, order_S).view(*chosen_TK.shape, out_SD.shape[-1])
    out_TD: torch.Tensor = (out_TKD * weights_TK.unsqueeze(-1)).sum(1).to(hidden_TD.dtype)
    return out_TD


def apply_experts(module: Any, rows_SD: torch.Tensor, ends_E: torch.Tensor, expert_S: torch.Tensor) -> torch.Tensor:
    """Run the experts of this process.

    Args:
        module: the layer's experts; where they are spread, E are this process' own.
        rows_SD: sorted by expert, shape (S, D).
        ends_E: where the rows of each expert end [rows], int32, shape (E,).
        expert_S: the expert of each row, shape (S,).

    Returns:
        What the experts made of the rows, shape (S, D).
    """
    layouts, dtype = layouts_of(module), _product_dtype(module, rows_SD)

    def linear(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight, turned = local(getattr(module, name)), module.is_transposed
        if not weight.is_floating_point():
            out = multiply_rows(rows.to(dtype), weight, ends_E, layouts[name], is_transposed=turned)
        else:
            out = grouped_linear(rows.to(dtype), weight.to(dtype), ends_E, is_transposed=turned)
        return out + local(getattr(module, name + "_bias")).to(dtype)[expert_S] if module.has_bias else out

    up_SF = linear(rows_SD, "gate_up_proj" if module.has_gate else "up_proj")
    del rows_SD  # the rows are as large as the output; experts that learn have kept them
    inside_SF = module._apply_gate(up_SF) if module.has_gate else module.act_fn(up_SF)
    out_SD = linear(inside_SF, "down_proj")
    has_norm = getattr(module, "has_post_expert_norm", False)  # transformers 5.17 knows no such experts
    return module.post_expert_norm(out_SD) if has_norm else out_SD


def _product_dtype(module: Any, x: torch.Tensor) -> torch.dtype:
    """The type that the experts' products compute in; a base in 4 or 8 bits is dequantised to that of `x`."""
    weight = module.down_proj
    return product_dtype(x, weight if weight.is_floating_point() else x)


def rows_per_expert(ends_E: torch.Tensor) -> torch.Tensor:
    """The rows of each expert, from where they end, shape (E,)."""
    return ends_E.diff(prepend=ends_E.new_zeros(1))


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
